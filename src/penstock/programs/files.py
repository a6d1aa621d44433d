"""Programs as files, text or binary, one for each rank; a folder of them is an iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock.files import MAX_TEXT_BYTES, decoded, readable_bytes, write_bytes, written_together
from penstock.programs.binary import MARK, decode, encode
from penstock.programs.instructions import Program
from penstock.programs.text import TITLE, format_program, parse_program

__all__ = ["holds_programs", "read_program", "read_programs", "write_programs"]


def _begins_like_a_program(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            start = stream.read(4096)
    except OSError:
        return False
    words = [line.split(b"#")[0].strip() for line in start.splitlines()]
    return start.startswith(MARK) or next((word for word in words if word), b"").startswith(TITLE.encode())


def _program_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and _begins_like_a_program(path))


def holds_programs(path: str | Path) -> bool:
    """Whether this is a program, or a folder with at least one."""
    path = Path(path)
    return bool(_program_files(path)) if path.is_dir() else path.is_file() and _begins_like_a_program(path)


def read_program(path: str | Path) -> Program:
    """The program of one file, whichever form it has."""
    path, where = Path(path), f"program '{path}'"
    data = readable_bytes(path, "program", MAX_TEXT_BYTES)
    return decode(data, where) if data.startswith(MARK) else parse_program(decoded(data, path, "program"), where)


def read_programs(path: str | Path) -> list[Program]:
    """The program of a file, or all programs of a folder; other files in it are left alone."""
    path = Path(path)
    return [read_program(file) for file in _program_files(path)] if path.is_dir() else [read_program(path)]


def write_programs(folder: str | Path, programs: Iterable[Program], text: bool = False) -> Sequence[Path]:
    """One file per rank: `rank-3.program`, or `rank-3.txt` in the readable form."""
    paths = []
    with written_together():
        for program in programs:
            path = Path(folder) / f"rank-{program.rank}.{'txt' if text else 'program'}"
            write_bytes(path, format_program(program).encode() if text else encode(program))
            paths.append(path)
    return paths
