"""Writing files: a reader sees the old one or the new one, never half of it; several can appear together or not at all."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files.outputs import is_special
from penstock.files.places import check_no_directory, home_of

__all__ = ["write_bytes", "write_json", "write_text", "written_together"]


def write_text(path: str | Path, text: str) -> None:
    """Replaces `path` with UTF-8 text in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replaces `path` in one step: readers see the old file or the new, never half of it."""
    path = Path(path)
    check_no_directory(path)
    if is_special(path):  # /dev/stdout, a named pipe: nothing to replace
        _write_through(path, data)
        return
    if path.is_symlink():  # the link stays, what it leads to is replaced
        path = Path(os.path.realpath(path))
    home_of(path)
    with written_together() as group:
        group.add(path, data)


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def _write_through(path: Path, data: bytes) -> None:
    try:
        with open(path, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None


@contextmanager
def written_together() -> Iterator[_Group]:
    """Files that are written inside appear when it ends, all of them; if anything fails before, none does, nor a folder made for one."""
    outer = _GROUP.get()
    if outer is not None:
        yield outer
        return
    group = _Group()
    token = _GROUP.set(group)
    try:
        yield group
        group.appear()
    except BaseException:
        group.vanish()
        raise
    finally:
        _GROUP.reset(token)


class _Group:
    """Files under other names beside those that they are to have, so that nothing but renaming them is left to do."""

    def __init__(self) -> None:
        self._files: list[tuple[str, Path]] = []
        self._folders: list[Path] = []

    def add(self, path: Path, data: bytes) -> None:
        try:
            self._folders += [parent for parent in (path.parent, *path.absolute().parents) if not os.path.exists(parent)]
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
            self._files.append((temporary, path))
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, _mode(path))
        except OSError as error:
            raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None

    def appear(self) -> None:
        while self._files:
            temporary, path = self._files[0]
            try:
                os.replace(temporary, path)
            except OSError as error:
                raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
            del self._files[0]

    def vanish(self) -> None:
        for temporary, _ in self._files:
            with suppress(OSError):
                os.unlink(temporary)
        for folder in self._folders:  # the innermost of each file first
            with suppress(OSError):  # somebody else has put something there meanwhile
                os.rmdir(folder)


def _mode(path: Path) -> int:
    """Who may do what with a file that is to be at `path`: as with the one that is there, or as with any new file."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


_GROUP: ContextVar[_Group | None] = ContextVar("files that are written together", default=None)
