"""What was made once and need not be made again: prepared data, measured costs, plans; each in a folder named by all that decides it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files import readable_file

__all__ = ["CACHE_VARIABLE", "cache_folder", "digest", "digest_of_files", "made_once", "only_one"]

CACHE_VARIABLE = "PENSTOCK_CACHE"
_PIECE_BYTES = 1 << 22


def cache_folder(kind: str) -> Path:
    """The folder in which things of a kind are kept: under PENSTOCK_CACHE, or in the user's cache."""
    given = os.environ.get(CACHE_VARIABLE)
    home = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    return home / kind


def digest(*parts: Any) -> str:
    """A name for values that JSON can hold."""
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=12).hexdigest()


def digest_of_files(paths: Iterable[Path]) -> str:
    """A name for the content of files, wherever they lie."""
    found = hashlib.blake2b(digest_size=12)
    for path in paths:
        try:
            with open(readable_file(path, "input"), "rb") as stream:
                while piece := stream.read(_PIECE_BYTES):
                    found.update(piece)
        except OSError as error:  # some files can be opened only
            raise InputError(f"'{path}' cannot be read: {error.strerror}.") from None
        found.update(b"\0end of file\0")
    return found.hexdigest()


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Lets one process at a time make `path`; the ranks of a job ask for the same things at the same moment, and then find them made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"'{path.parent}' cannot keep anything: {error.strerror}. Set {CACHE_VARIABLE} to a folder that can.") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def made_once(path: Path, make: Callable[[Path], Any]) -> bool:
    """Calls `make(path)`, which must leave nothing at `path` where it fails, unless something is there; whether it was there."""
    if path.exists():
        return True
    with only_one(path):
        if path.exists():
            return True
        make(path)
    return False
