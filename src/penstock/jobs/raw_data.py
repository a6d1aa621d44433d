"""Raw samples into prepared ones, once for the same content: JSONL, tables and texts, with the tokenizer that suits the model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.data.dataset import DataSet, open_data
from penstock.data.filled import FilledPositions, filled_positions
from penstock.data.forms import form_of
from penstock.data.manifest import MANIFEST
from penstock.data.text.chats import TEMPLATE_FILES
from penstock.data.text.cleaning import parse_split
from penstock.data.text.declared import DECLARING_FILES, tokenizer_folder
from penstock.data.text.lines import PAIRS, TEXT, LineFields, parse_fields
from penstock.data.workers import Report
from penstock.errors import InputError
from penstock.files import csv_rows, read_text, readable_file
from penstock.jobs.cache import cache_folder, digest, digest_of_files, made_once
from penstock.jobs.columns import column_files, column_rows, is_columns
from penstock.models.huggingface import hf_folder

if TYPE_CHECKING:
    from penstock.batching.plan import SampleLengths
    from penstock.models.ops import Model

__all__ = ["PreparedData", "fitted", "prepare_raw", "sample_lengths"]

_RECIPE = 3
"""Raised when the same texts would be prepared otherwise."""
_TRAINED_VOCAB = 8192
"""Tokens of a tokenizer that is trained on the texts, at most."""
_ANY_LENGTH = 1 << 20
_MOST_LENGTHS = 200_000
"""Samples that are looked at, spread over all of them: a few batches are drawn from them."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Samples that training can map, and what they fill of a model's positions."""

    data: DataSet
    filled: FilledPositions
    was_there: bool
    """Whether an earlier run had prepared them."""

    @property
    def folder(self) -> str:
        """Their folder."""
        return str(self.data.folder)


def prepare_raw(
    paths: Sequence[str], model: Model, source: str, *, tokenizer: str | None = None, split: str = "949,50,1", over_long: str = "refuse",
    prompt_loss: bool = False, keeps_weights: bool = True, fields: str = "", report: Report = lambda *_: None,
) -> PreparedData:  # fmt: skip
    """Prepares raw files for a model that `source` names, or opens what is prepared; refuses what the model cannot take.

    `keeps_weights`: it begins with weights that only the tokenizer they were trained with goes with. `fields`: as in
    `input=question,target=answer`, where samples have their texts under other names than ours.
    """
    named = parse_fields(fields) if fields else ()
    folder, was_there = _folder(paths, model, source, tokenizer, split, keeps_weights, named, report)
    data = open_data(folder)
    data.check()
    return fitted(data, model, over_long, prompt_loss, was_there)


def fitted(data: DataSet, model: Model, over_long: str, prompt_loss: bool = False, was_there: bool = True) -> PreparedData:
    """Samples with what they fill of a model's positions; refused where some have more than there are, unless those are to be cut off."""
    filled = filled_positions(form_of(model, data, prompt_loss=prompt_loss), data, _most_positions(model), model.dec_length)
    if model.seq_length and filled.num_truncated and over_long == "refuse":
        longest = int(max(side.max() for side in data.lengths))
        raise InputError(
            f"{filled.num_truncated:,} of {len(filled.own):,} samples are longer than the {model.seq_length:,} positions of model "
            f"'{model.name}' (the longest has {longest:,} tokens). Split them, or cut them off there: over_long=truncate (as a field of a "
            "job: --set data.over_long=truncate)."
        )
    return PreparedData(data, filled, was_there)


def _most_positions(model: Model) -> int:
    """Tokens that a sample may have; somebody's module does not say, nor do models of transformers without places, and may take any."""
    unknown = model.seq_length and "origin" in model.config and not model.config.get("positions")
    return _ANY_LENGTH if unknown else model.seq_length


def sample_lengths(prepared: PreparedData) -> list[SampleLengths]:
    """The samples to plan for."""
    import numpy as np

    from penstock.batching.plan import SampleLengths

    filled = prepared.filled
    taken = np.union1d(np.linspace(0, len(filled.own) - 1, min(_MOST_LENGTHS, len(filled.own))).astype(int), filled.own.argmax())
    return [SampleLengths(int(at), max(1, int(filled.own[at])), int(filled.dec[at])) for at in taken]


def _folder(
    paths: Sequence[str], model: Model, source: str, tokenizer: str | None, split: str, keeps_weights: bool, fields: LineFields,
    report: Report,
) -> tuple[Path, bool]:  # fmt: skip
    """The folder of prepared data, made now unless it is there, and whether it was."""
    if len(paths) == 1 and ((Path(paths[0]) / MANIFEST).is_file() or Path(f"{paths[0]}.idx").is_file()):
        return Path(paths[0]), True
    for path in paths:
        if is_columns(Path(path)):
            continue
        if os.path.isdir(path):
            raise InputError(
                f"data '{path}' is a folder without {MANIFEST}. Give the files in it; images and shards are prepared by "
                "`penstock prepare-data`."
            )
        if not readable_file(path, "data").stat().st_size:
            raise InputError(f"data '{path}' is empty. Give a file with a sample on each line, such as {{\"text\": \"…\"}}.")
    if tokenizer is not None and not tokenizer.strip():
        raise InputError("the tokenizer has no name. Give a file or folder (--tokenizer PATH), or leave it out for the model's own.")
    given = tokenizer or _own_tokenizer(model, source, keeps_weights)
    vocab = 0 if given else min(_TRAINED_VOCAB, int(model.config.get("vocab", 0)))
    known = digest_of_files([*_tokenizer_files(given), *_files_beside(given)]) if given else vocab
    names = [Path(path).name for path in paths]
    files = (file for path in paths for file in column_files(Path(path)))
    out = cache_folder("data") / digest(_RECIPE, names, digest_of_files(files), known, split, fields)
    if given:
        _check_vocabulary(given, model)

    def make(path: Path) -> None:
        from penstock.data.text.prepare import TextRequest, prepare_text

        with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
            inputs = tuple(_as_jsonl(Path(given), Path(scratch), fields) for given in paths)
            workers = len(os.sched_getaffinity(0))
            prepare_text(TextRequest(inputs, path, given, vocab or None, split=parse_split(split), workers=workers, fields=fields), report)

    return out, made_once(out, make)


def _own_tokenizer(model: Model, source: str, keeps_weights: bool) -> str | None:
    """The tokenizer of a model's folder; None where one can be trained, since weights are random."""
    folder = hf_folder(source)
    if folder is not None and _tokenizer_files(str(folder)):
        return str(folder)
    if not keeps_weights and model.config.get("vocab"):
        return None
    where = f"folder '{folder}' holds none" if folder is not None else f"'{source}' names none"
    raise InputError(
        f"there is no tokenizer for model '{model.name}': {where}, and one trained on these texts would not suit its weights. Give the one "
        "that it was trained with: --tokenizer PATH (tokenizer.json, vocab.json, SentencePiece .model, or a folder)."
    )


def _tokenizer_files(path: str) -> list[Path]:
    """The files that decide a tokenizer: its own, or the files of that kind in a folder."""
    given = Path(path)
    if not given.is_dir():
        return [given]
    return sorted(found for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "*.model") for found in given.glob(name))


def _files_beside(path: str) -> list[Path]:
    """The files in a tokenizer's folder that decide, beside its own, which tokens there are and how chats are written out."""
    names = sorted({"merges.txt", *TEMPLATE_FILES, *DECLARING_FILES})
    return [found for name in names if (found := tokenizer_folder(path) / name).is_file()]


def _check_vocabulary(path: str, model: Model) -> None:
    """Refuses a tokenizer with ids that the model has no row for, before anything is tokenised."""
    from penstock.data.text.tokenizer import load_tokenizer

    found, vocab = load_tokenizer(path).get_vocab_size(), int(model.config.get("vocab", 0))
    if vocab and found > vocab:
        raise InputError(
            f"tokenizer '{path}' has {found:,} tokens, the vocabulary of model '{model.name}' only {vocab:,}. Use its own tokenizer "
            f"(--tokenizer), or a model with `vocab: {found}`."
        )


def _as_jsonl(path: Path, scratch: Path, fields: LineFields) -> Path:
    """The file itself, or its samples as JSONL: a CSV has columns `text`, or `input` and `target`, unless `fields` says which; of a text,
    each line is a sample."""
    if is_columns(path):
        rows = column_rows(path, fields)
    elif path.suffix.lower() in (".csv", ".tsv"):
        rows = _csv_rows(path, fields)
    elif path.suffix.lower() == ".txt":
        rows = ({"text": line} for line in read_text(path, "data").split("\n"))
    else:
        return path
    out = scratch / f"{path.stem}.jsonl"
    with out.open("w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")
    return out


def _csv_rows(path: Path, fields: LineFields) -> Iterator[dict[str, str]]:
    rows = csv_rows(path, "data", "\t" if path.suffix.lower() == ".tsv" else ",")
    columns = next(rows, [])
    wanted = fields or (PAIRS if set(PAIRS) <= set(columns) else TEXT)
    if not set(wanted) <= set(columns):
        expected = " and ".join(f"`{name}`" for name in fields) if fields else "`text`, or `input` and `target`,"
        raise InputError(f"data '{path}' has columns {', '.join(columns) or 'none'}; {expected} were expected.")
    for row in rows:
        if row:
            cells = dict(zip(columns, row, strict=False))
            yield {name: cells.get(name, "") for name in wanted}
