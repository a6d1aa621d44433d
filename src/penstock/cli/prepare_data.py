"""`penstock prepare-data`: text pairs, images or BERT shards into files that training maps."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.console import JsonFlag, Ticker, format_count, out, print_json, progress, table
from penstock.cli.options import new_folder_to_write, options_said, within
from penstock.errors import InputError, near_misses

if TYPE_CHECKING:
    from penstock.data.manifest import DataManifest

__all__ = ["prepare_data"]

_POLICIES = ("truncate", "drop")
_OPTIONS_FOR = {
    "texts": ("tokenizer", "train-tokenizer", "fields", "weights", "max-input", "max-target", "over-long", "keep-duplicates", "end-token"),
    "images": ("image-size",),
    "HDF5 shards": ("vocab-size",),
}
"""Options that mean something for one kind of input alone."""


def prepare_data(
    inputs: Annotated[list[str], typer.Argument(metavar="INPUT…", help="JSONL files, each a task; images; HDF5 shards; or `bundled`.")],
    path: Annotated[Path, typer.Option("--out", callback=new_folder_to_write, help="Folder to write; it must not exist, or be empty.")],
    tokenizer: Annotated[str | None, typer.Option(help="tokenizer.json, vocab.json, vocab.txt, SentencePiece .model, or a folder.")] = None,
    train_tokenizer: Annotated[int | None, typer.Option(metavar="N", help="Train a byte-level BPE of N tokens instead.")] = None,
    fields: Annotated[str, typer.Option(metavar="SIDE=NAME,…", help="Names of the texts, as in input=inputs,target=targets.")] = "",
    weights: Annotated[str | None, typer.Option(help="Share of each task in training, as in 3,1,1; without: its share of samples.")] = None,
    split: Annotated[str, typer.Option(help="Parts for train, validation and test.")] = "949,50,1",
    max_input: Annotated[int | None, typer.Option(callback=within(2, 2**31 - 1), help="Longest input, in tokens.")] = None,
    max_target: Annotated[int | None, typer.Option(callback=within(2, 2**31 - 1), help="Longest target, in tokens.")] = None,
    over_long: Annotated[str, typer.Option(help="What happens to longer samples: truncate or drop.")] = "truncate",
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep samples that are equal to earlier ones.")] = False,
    end_token: Annotated[str, typer.Option(help="Token put after each target; auto: the tokenizer's usual one; none.")] = "auto",
    image_size: Annotated[int, typer.Option(callback=within(0, 4096), help="Height and width of images from folders.")] = 0,
    vocab_size: Annotated[int, typer.Option(callback=within(1, 2**31 - 1), help="Vocabulary of HDF5 shards.")] = 30522,
    workers: Annotated[int, typer.Option(callback=within(0, 256), help="Processes; 0: one per processor.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Turn samples into indexed files: JSONL of {"input", "target"}, {"text"} or {"messages"}, CIFAR-10's binary files, folders of images,
    BERT shards.

    Example: penstock prepare-data bundled --train-tokenizer 2048 --out data
    """
    from penstock.data.bert import is_hdf5, prepare_bert
    from penstock.data.images import is_cifar10, is_image_folder, prepare_images
    from penstock.data.text.cleaning import parse_split

    said = options_said(prepare_data, locals())
    paths, parts = _paths(inputs), parse_split(split)
    shards, images = any(map(is_hdf5, paths)), any(is_cifar10(given) or is_image_folder(given) for given in paths)
    _refuse_unused(said, "HDF5 shards" if shards else "images" if images else "texts")
    with _reporting(quiet=json) as report:
        if shards:
            manifest = prepare_bert(paths, path, parts, vocab_size, report)
        elif images:
            manifest = prepare_images(paths, path, parts, image_size, report)
        else:
            from penstock.data.text.lines import parse_fields
            from penstock.data.text.prepare import TextRequest, prepare_text

            request = TextRequest(
                tuple(paths), path, tokenizer, train_tokenizer, _weights(weights), parts, keep_duplicates, (max_input, max_target),
                _policy(over_long), end_token, workers or len(os.sched_getaffinity(0)), parse_fields(fields) if fields else (),
            )  # fmt: skip
            manifest = prepare_text(request, report)
    _tell(manifest, path, json)


def _refuse_unused(said: Collection[str], kind: str) -> None:
    """Refuses options that say nothing of what is given."""
    for other, names in _OPTIONS_FOR.items():
        unused = [f"--{name}" for name in names if name in said and other != kind]
        if unused:
            raise InputError(f"{', '.join(unused)}: for {other}; what is given are {kind}. Leave it out.")


def _paths(inputs: list[str]) -> list[Path]:
    if inputs == ["bundled"] and not Path("bundled").exists():
        from penstock.data.bundled import bundled_files

        return bundled_files()
    return [Path(given) for given in inputs]


def _weights(text: str | None) -> tuple[float, ...] | None:
    try:
        return tuple(float(part) for part in text.split(",")) if text is not None else None
    except ValueError:
        raise InputError(f"--weights is '{text}'; numbers were expected, one for each input, as in 3,1,1.") from None


def _policy(text: str) -> Literal["truncate", "drop"]:
    if text not in _POLICIES:
        raise InputError(f"--over-long is '{text}'. {near_misses(text, _POLICIES)}")
    return "drop" if text == "drop" else "truncate"


@contextmanager
def _reporting(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each phase of the work, in thousandths of it."""
    with progress("looking", 1000, quiet=quiet) as bar:
        state = {"what": "", "shown": 0}
        yield lambda what, done, total: _move(bar, state, what, done, total)


def _move(bar: Ticker, state: dict[str, object], what: str, done: int, total: int) -> None:
    if state["what"] != what:
        bar.describe(what)
        bar.advance(-int(str(state["shown"])))
        state.update(what=what, shown=0)
    place = 1000 * done // max(total, 1)
    bar.advance(place - int(str(state["shown"])))
    state["shown"] = place


def _tell(manifest: DataManifest, path: Path, json: bool) -> None:
    if json:
        import msgspec

        print_json({"out": path, **msgspec.to_builtins(manifest)})
        return
    rows = [
        (name, format_count(split.samples), *(format_count(split.tokens.get(side, 0)) for side in manifest.sides))
        for name, split in manifest.splits.items()
    ]
    out().print(table(f"data {path}", ("split", "samples", *(f"{side} tokens" for side in manifest.sides)), rows))
    out().print(", ".join(f"{what} {count}" for what, count in manifest.counts.items()), markup=False, soft_wrap=True)
