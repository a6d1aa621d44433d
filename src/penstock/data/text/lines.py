"""Reading JSONL in pieces that several processes share: each piece is the lines that begin in a range of bytes."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from penstock.errors import InputError
from penstock.files import readable_file

__all__ = ["BadLine", "Form", "LineSpan", "detect_form", "pieces_of", "read_samples"]

Form = Literal["pairs", "text"]

_PIECE_BYTES = 4 << 20
_EXPECTED = {"pairs": '{"input": "…", "target": "…"}', "text": '{"text": "…"}'}


class _Pair(msgspec.Struct):
    input: str
    target: str


class _Text(msgspec.Struct):
    text: str


@dataclass(frozen=True)
class LineSpan:
    """The lines of a file whose first byte lies in a range."""

    path: Path
    start: int
    stop: int


class BadLine(Exception):
    """A line that is not a sample; `number` counts from 1 within its piece. Its reader knows what came before the piece."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(number, problem)
        self.number, self.problem = number, problem


def pieces_of(path: Path, piece_bytes: int = _PIECE_BYTES) -> list[LineSpan]:
    """A file in pieces, in order."""
    try:
        with open(readable_file(path, "input"), "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            stream.read(1)  # some files can be opened only
    except OSError as error:
        raise InputError(f"input '{path}' cannot be read: {error.strerror}.") from None
    return [LineSpan(path, start, min(start + piece_bytes, size)) for start in range(0, size, piece_bytes)]


def _lines(piece: LineSpan) -> Iterator[bytes]:
    with open(piece.path, "rb") as stream:
        if piece.start:
            stream.seek(piece.start - 1)
            stream.readline()  # the rest of a line that begins in the piece before
        elif stream.read(len(BOM_UTF8)) != BOM_UTF8:  # the mark that spreadsheets put before a text
            stream.seek(0)
        place = stream.tell()
        while place < piece.stop and (line := stream.readline()):
            place += len(line)
            yield line


def read_samples(piece: LineSpan, form: Form) -> Iterator[tuple[str, ...] | None]:
    """The texts of each line, one per side; None for a blank one."""
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Pair if form == "pairs" else _Text)
    for number, line in enumerate(_lines(piece), start=1):
        if not line.strip():
            yield None
            continue
        try:
            found = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadLine(number, f"{error}. Expected was {_EXPECTED[form]}") from None
        yield (found.input, found.target) if form == "pairs" else (found.text,)


def detect_form(path: Path) -> Form:
    """Whether a file holds pairs or plain text, from its first line."""
    for piece in pieces_of(path, max(os.path.getsize(path), 1) if os.path.isfile(path) else 1):
        for number, line in enumerate(_lines(piece), start=1):
            if not line.strip():
                continue
            try:
                fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(f"{path}, line {number}: {error}. Expected was {_EXPECTED['pairs']} or {_EXPECTED['text']}.") from None
            if "input" in fields:
                return "pairs"
            if "text" in fields:
                return "text"
            names = ", ".join(list(fields)[:8]) or "none"
            raise InputError(f"{path}, line {number}: fields are {names}. Expected was {_EXPECTED['pairs']} or {_EXPECTED['text']}.")
    raise InputError(f"input '{path}' holds no samples.")
