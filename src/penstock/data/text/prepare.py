"""From JSONL to token files: one pass looks at every line, a second tokenises those that stay; both in parallel.

    pass 1   line → digest, empty or not           then here: duplicates dropped, splits chosen, a tokenizer trained if asked
    pass 2   line → tokens of each side            then here: written in the order of the files

Processes share the pieces of the files; what they return is used in order, so the result never depends on their number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from penstock.data.indexed import IndexedWriter, token_dtype
from penstock.data.manifest import SPANS, DataManifest, DataSplit, TaskRange, write_manifest
from penstock.data.text.chats import ChatTemplate
from penstock.data.text.cleaning import SPLITS
from penstock.data.text.lines import CHAT, PAIRS, LineFields, LineSpan, detect_fields, pieces_of
from penstock.data.text.looking import Codes, look
from penstock.data.text.tokenising import TokenJob, chosen, tokenise
from penstock.data.text.tokenizer import check_own_end_token, check_vocab_size, find_end_token, load_tokenizer, train_tokenizer
from penstock.data.workers import Pool, Report, in_order, new_folder, start_pool
from penstock.errors import InputError, plural

__all__ = ["TextRequest", "check_weights", "prepare_text", "task_names"]

_TRAINING_BYTES = 64 << 20
"""Text that a tokenizer is trained on, at most."""
_INLINE_BYTES = 1 << 20
"""Smaller inputs are done before another process has started."""


@dataclass(frozen=True)
class TextRequest:
    """A request to prepare text: the files, and how."""

    inputs: tuple[Path, ...]
    """Each file is a task."""
    out: Path
    tokenizer: str | None = None
    train_tokenizer: int | None = None
    weights: tuple[float, ...] | None = None
    split: tuple[float, ...] = (949.0, 50.0, 1.0)
    keep_duplicates: bool = False
    limits: tuple[int | None, int | None] = (None, None)
    """Longest input and target, in tokens."""
    over_long: Literal["truncate", "drop"] = "truncate"
    end_token: str = "auto"
    workers: int = 1
    fields: LineFields = ()
    """Of each line; found from the first if not given."""


def prepare_text(request: TextRequest, report: Report = lambda *_: None) -> DataManifest:
    """Writes the token files and returns what they hold."""
    names = task_names(request.inputs)
    _check(request)
    # What is wrong with an option is told before the work.
    given = None if request.tokenizer is None else load_tokenizer(request.tokenizer)
    if given is not None:
        find_end_token(given, request.end_token, request.tokenizer)
    fields = request.fields or detect_fields(request.inputs[0])
    chats = fields == CHAT
    if chats:
        if request.tokenizer is None:
            raise InputError("samples are chats, and a tokenizer that is trained here has no chat template. Give one: --tokenizer FOLDER.")
        ChatTemplate(request.tokenizer)
    pieces = [pieces_of(path) for path in request.inputs]
    small = sum(piece.stop - piece.start for parts in pieces for piece in parts) < _INLINE_BYTES
    with new_folder(request.out) as folder, start_pool(1 if small else request.workers) as pool:
        counts: Counter[str] = Counter()
        codes = look(pool, pieces, fields, request.split, request.keep_duplicates, counts, report)
        tokenizer = given or train_tokenizer(_training_texts(fields, pieces, codes), request.train_tokenizer or 0)
        tokenizer.save(str(folder / "tokenizer.json"))
        of_template = chats and request.end_token == "auto"  # which ends its texts itself
        end = None if of_template else find_end_token(tokenizer, request.end_token, request.tokenizer)
        job = TokenJob(
            fields, tokenizer.get_vocab_size(), end, request.limits, request.over_long, str(folder / "tokenizer.json"),
            str(request.tokenizer) if chats else "",
        )  # fmt: skip
        splits = _write(pool, folder, names, pieces, codes, job, request.weights, counts, report)
        sides = list(PAIRS[: len(fields)])
        manifest = DataManifest("text", sides, splits, job.vocab_size, end, "tokenizer.json", counts=dict(counts), spans=chats)
        write_manifest(folder, manifest)
    return manifest


def task_names(inputs: Sequence[Path]) -> list[str]:
    """A name for each input: that of the file, which must be its own."""
    names = [path.name.removesuffix(".jsonl") for path in inputs]
    if not names:
        raise InputError("no input was given. Name at least one file.")
    for name, count in Counter(names).items():
        if count > 1:
            raise InputError(f"{count} inputs are called '{name}'; each is a task and needs a name of its own. Rename all but one.")
    return names


def check_weights(weights: Sequence[float] | None, num_inputs: int) -> None:
    """Refuses weights that are not one share for each input."""
    if weights is None:
        return
    if len(weights) != num_inputs:
        raise InputError(f"{plural(len(weights), 'weight')} given for {plural(num_inputs, 'input')}. Give one for each, in their order.")
    if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
        raise InputError(f"weights {', '.join(map(str, weights))} are not shares: none may be negative, and one must be more than zero.")


def _check(request: TextRequest) -> None:
    if (request.tokenizer is None) == (request.train_tokenizer is None):
        raise InputError("give a tokenizer (--tokenizer PATH), or the size of one to train (--train-tokenizer N).")
    if request.train_tokenizer is not None:
        check_vocab_size(request.train_tokenizer)
        check_own_end_token(request.end_token)
    check_weights(request.weights, len(request.inputs))
    if any(limit is not None and limit < 2 for limit in request.limits):
        raise InputError(f"limits are {request.limits}; a side needs room for at least 2 tokens.")
    if request.workers < 1:
        raise InputError(f"{request.workers} workers cannot work; give at least 1.")


def _training_texts(fields: LineFields, pieces: list[list[LineSpan]], codes: Codes) -> Iterator[str]:
    """Texts of training samples, piece by piece from all files in turn, up to a limit."""
    spent = 0
    for depth in range(max(len(parts) for parts in pieces)):
        for parts, splits in zip(pieces, codes, strict=True):
            if depth >= len(parts):
                continue
            for texts in chosen(parts[depth], fields, splits[depth] == 0):
                yield from texts[0]
                spent += sum(map(len, texts[0]))
            if spent > _TRAINING_BYTES:
                return


def _write(
    pool: Pool, folder: Path, names: list[str], pieces: list[list[LineSpan]], codes: Codes,
    job: TokenJob, weights: tuple[float, ...] | None, counts: Counter[str], report: Report,
) -> dict[str, DataSplit]:  # fmt: skip
    """Writes what the second pass returns; the splits as they became."""
    sides = ("input", SPANS) if job.chats else PAIRS[: len(job.fields)]
    used = [code for code in range(len(SPLITS)) if any((part == code).any() for parts in codes for part in parts)]
    total = sum(piece.stop - piece.start for parts in pieces for piece in parts)
    arguments = ((piece, code, job) for parts, own in zip(pieces, codes, strict=True) for piece, code in zip(parts, own, strict=True))
    results, done = in_order(pool, tokenise, arguments), 0
    sizes = {code: [0] * (len(names) + 1) for code in used}
    tokens: Counter[tuple[int, str]] = Counter()
    dtype = token_dtype(job.vocab_size)
    with ExitStack() as stack:
        writers = {
            (code, side): stack.enter_context(IndexedWriter(folder / f"{SPLITS[code]}_{side}", np.int32 if side == SPANS else dtype))
            for code in used
            for side in sides
        }
        for task, parts in enumerate(pieces, start=1):
            for code in used:
                sizes[code][task] = sizes[code][task - 1]
            for piece in parts:
                found, own_counts = next(results)
                counts.update(own_counts)
                for code, samples in found.items():
                    sizes[code][task] += len(samples.lengths[0])
                    for side, lengths, values in zip(sides, samples.lengths, samples.tokens, strict=True):
                        writers[code, side].add_many(values, lengths)
                        tokens[code, side] += len(values)
                done += piece.stop - piece.start
                report("tokenising", done, total)
    if job.over_long == "truncate":
        counts["truncated"] = counts.pop("over-long", 0)
    counts["kept"] = sum(size[-1] for size in sizes.values())
    if not counts["kept"]:
        raise InputError(f"no sample is left of {counts['read']}: {dict(counts)}.")
    shares = weights or (None,) * len(names)
    return {
        SPLITS[code]: DataSplit(
            size[-1], {side: tokens[code, side] for side in sides if side != SPANS},
            [_task(name, size[i], size[i + 1], shares[i]) for i, name in enumerate(names)],
        )
        for code, size in sizes.items()
    }  # fmt: skip


def _task(name: str, start: int, stop: int, weight: float | None) -> TaskRange:
    """A task without samples in this split has no share of it."""
    return TaskRange(name, start, stop, 0.0 if weight is not None and start == stop else weight)
