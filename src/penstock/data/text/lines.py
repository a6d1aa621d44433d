"""Reading JSONL in pieces that several processes share: each piece is the lines that begin in a range of bytes."""

from __future__ import annotations

import os
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from penstock.errors import InputError, near_misses, shell_words
from penstock.files import readable_file

__all__ = ["CHAT", "PAIRS", "TEXT", "BadLine", "LineFields", "LineSpan", "detect_fields", "parse_fields", "pieces_of", "read_samples"]

LineFields = tuple[str, ...]
"""Fields of a line that hold the texts of a sample: those of its input and its target, or the one of a text alone."""
PAIRS, TEXT, CHAT = ("input", "target"), ("text",), ("messages",)

_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class LineSpan:
    """The lines of a file whose first byte lies in a range."""

    path: Path
    start: int
    stop: int


class _Message(msgspec.Struct):
    """A message of a chat; templates may read more."""

    role: str
    content: str


_Messages = Annotated[list[_Message], msgspec.Meta(min_length=1)]


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


def read_samples(piece: LineSpan, fields: LineFields) -> Iterator[tuple[str, ...] | None]:
    """The texts of each line, one per side, messages of a chat as JSON; None for a blank one."""
    kind: type = msgspec.Raw if fields == CHAT else str
    sides = [f"side{number}" for number in range(len(fields))]
    line_type = msgspec.defstruct("Line", [(side, kind) for side in sides], rename=dict(zip(sides, fields, strict=True)))
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(line_type)
    for number, line in enumerate(_lines(piece), start=1):
        if not line.strip():
            yield None
            continue
        try:
            found = decoder.decode(line)
            if fields == CHAT:
                msgspec.json.decode(found.side0, type=_Messages)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadLine(number, f"{error}. Expected was {_example(fields)}") from None
        yield (bytes(found.side0).decode(),) if fields == CHAT else msgspec.structs.astuple(found)


def detect_fields(path: Path) -> LineFields:
    """Whether a file holds pairs, plain text or chats, from its first line."""
    expected = f"{_example(PAIRS)}, {_example(TEXT)} or {_example(CHAT)}"
    for piece in pieces_of(path, max(os.path.getsize(path), 1) if os.path.isfile(path) else 1):
        for number, line in enumerate(_lines(piece), start=1):
            if not line.strip():
                continue
            try:
                found = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                array = f", each on a line of its own: jq -c '.[]' {shell_words(path)} > lines.jsonl" if line.lstrip()[:1] == b"[" else ""
                raise InputError(f"{path}, line {number}: {error}. Expected was {expected}{array}.") from None
            for fields in (PAIRS, TEXT, CHAT):
                if set(fields) <= set(found):
                    return fields
            names = ", ".join(list(found)[:8]) or "none"
            raise InputError(
                f"{path}, line {number}: fields are {names}. Expected was {expected}; say which fields are meant, as in "
                "--fields input=inputs,target=targets (penstock train: --set data.fields=input=inputs,target=targets)."
            )
    raise InputError(f"input '{path}' holds no samples.")


def parse_fields(text: str) -> LineFields:
    """Parses `input=inputs,target=targets`, or `text=body`.

    >>> parse_fields("input=question, target=answer")
    ('question', 'answer')
    """
    named = dict[str, str]()
    for part in text.split(","):
        side, _, name = (word.strip() for word in part.partition("="))
        if side not in (*PAIRS, *TEXT):
            raise InputError(f"fields are '{text}', but '{side}' is no side of a sample. {near_misses(side, (*PAIRS, *TEXT))}")
        if not name or side in named:
            raise InputError(f"fields are '{text}'; one name for '{side}' was expected, as in {side}=NAME.")
        named[side] = name
    for sides in (PAIRS, TEXT):
        if set(named) == set(sides):
            return tuple(named[side] for side in sides)
    raise InputError(f"fields are '{text}'; those of input and target, or that of text, were expected.")


def _example(fields: LineFields) -> str:
    if fields == CHAT:
        return '{"messages": [{"role": "user", "content": "…"}, …]}'
    return "{" + ", ".join(f'"{field}": "…"' for field in fields) + "}"
