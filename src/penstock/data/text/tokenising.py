"""The second pass over JSONL: the samples that stay become tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.data.indexed import token_dtype
from penstock.data.text.chats import ChatTemplate
from penstock.data.text.cleaning import DROPPED
from penstock.data.text.lines import LineFields, LineSpan, read_samples
from penstock.data.text.tokenizer import load_tokenizer

__all__ = ["TokenJob", "Tokens", "chosen", "tokenise"]

_BATCH = 256


@dataclass(frozen=True)
class TokenJob:
    """A tokenising process' job."""

    fields: LineFields
    vocab_size: int
    end: int | None
    limits: tuple[int | None, int | None]
    over_long: Literal["truncate", "drop"]
    tokenizer_path: str
    chats: str = ""
    """The folder whose chat template writes samples out; empty: they are texts."""


@dataclass(frozen=True)
class Tokens:
    """Samples of one split in one piece: for each side lengths and tokens end to end; of chats also the spans of each as a side."""

    lengths: list[npt.NDArray[np.int32]]
    tokens: list[npt.NDArray[Any]]


def chosen(piece: LineSpan, fields: LineFields, wanted: npt.NDArray[np.bool_]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The texts of the chosen samples of a piece, each with its number."""
    number = -1
    for texts in read_samples(piece, fields):
        if texts is None:
            continue
        number += 1
        if wanted[number]:
            yield texts, number


_loaded: dict[str, Any] = {}


def tokenise(argument: tuple[LineSpan, npt.NDArray[np.uint8], TokenJob]) -> tuple[dict[int, Tokens], Counter[str]]:
    """The samples of a piece as tokens, by split."""
    piece, codes, job = argument
    if job.tokenizer_path not in _loaded:
        _loaded.clear()
        _loaded[job.tokenizer_path] = load_tokenizer(job.tokenizer_path), ChatTemplate(job.chats) if job.chats else None
    (tokenizer, template), counts = _loaded[job.tokenizer_path], Counter[str]()
    kept: dict[int, list[list[list[int]]]] = {}
    batch: list[tuple[tuple[str, ...], int]] = []

    def flush() -> None:
        columns = [list(column) for column in zip(*(texts for texts, _ in batch), strict=True)]
        if template is not None:
            samples = _chats(columns[0], tokenizer, template)
        else:
            encoded = [tokenizer.encode_batch_fast(column, add_special_tokens=False) for column in columns]
            samples = ([part.ids for part in sides] for sides in zip(*encoded, strict=True))
        for (_, number), sides in zip(batch, samples, strict=True):
            sample = _fitted(sides, job, counts)
            if sample is not None:
                kept.setdefault(int(codes[number]), []).append(sample)
        batch.clear()

    for entry in chosen(piece, job.fields, codes != DROPPED):
        batch.append(entry)
        if len(batch) == _BATCH:
            flush()
    if batch:
        flush()
    dtypes = [token_dtype(job.vocab_size)] * len(job.fields) + ([np.dtype(np.int32)] if job.chats else [])
    return {code: _joined(samples, dtypes) for code, samples in kept.items()}, counts


def _fitted(sides: list[list[int]], job: TokenJob, counts: Counter[str]) -> list[list[int]] | None:
    """A sample with its end token and within its limits, or None if it is dropped."""
    sides, spans = (sides[:1], sides[1:]) if job.chats else (sides, [])
    if spans and not spans[0]:
        counts["without an answer"] += 1
        return None
    if not all(sides):
        counts["without tokens"] += 1
        return None
    result, cut = [], False
    for index, tokens in enumerate(sides):
        end = [job.end] if job.end is not None and index == len(sides) - 1 else []
        limit = job.limits[index]
        if limit is not None and len(tokens) + len(end) > limit:
            tokens, cut = tokens[: limit - len(end)], True
        result.append(tokens + end)
    counts["over-long"] += cut
    return None if cut and job.over_long == "drop" else [*result, *spans]


def _chats(chats: list[str], tokenizer: Any, template: ChatTemplate) -> Iterator[list[list[int]]]:
    """Tokens of each chat, and the spans of those that the assistant said, end to end."""
    written = [template.written(chat) for chat in chats]
    encoded = tokenizer.encode_batch([text for text, _ in written], add_special_tokens=False)
    for found, (_, spans) in zip(encoded, written, strict=True):
        offsets = np.array(found.offsets, np.int64).reshape(-1, 2)
        first, last = (np.array(side, np.int64) for side in zip(*spans, strict=True)) if spans else (offsets[:0, 0], offsets[:0, 1])
        both = np.searchsorted(offsets[:, 1], first, "right"), np.searchsorted(offsets[:, 0], last)
        yield [found.ids, np.stack(both, 1).flatten().tolist()]


def _joined(samples: list[list[list[int]]], dtypes: list[np.dtype[Any]]) -> Tokens:
    sides = list(zip(*samples, strict=True))
    lengths = [np.fromiter(map(len, side), np.int32, len(side)) for side in sides]
    both = zip(sides, dtypes, strict=True)
    return Tokens(lengths, [np.concatenate([np.array(tokens, dtype) for tokens in side]) for side, dtype in both])
