"""Which process runs each rank, or supervises each node: a small file in the run's folder, so that others find it and no other instead."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.files import readable_bytes, write_text
from penstock.processes.states import started_ticks

__all__ = ["NODE", "RankProcess", "forget_processes", "forget_this_process", "named_process", "read_process"]

_FILES = "*.process.json"
RANK, NODE = "rank", "node"
_NAMED: set[Path] = set()
"""Files that name this process."""


class RankProcess(msgspec.Struct, frozen=True):
    """The process of one rank, or the supervisor of a node."""

    pid: int
    started: int
    """When, in ticks since the machine was started: with it, no later process of the same number is mistaken for this one."""
    host: str
    device: str
    """`cpu`, `cuda:0`, `timed` or `paced`."""

    @property
    def is_here(self) -> bool:
        """Whether it runs, on this machine."""
        return self.host == socket.gethostname() and started_ticks(self.pid) == self.started

    @property
    def user(self) -> int:
        """Whose it is; only of one that is here."""
        return os.stat(f"/proc/{self.pid}").st_uid


@contextmanager
def named_process(folder: str | Path, number: int, device: str, kind: str = RANK) -> Iterator[None]:
    """Names this process in the folder of its run while entered: a rank's, or a node's supervisor."""
    pid = os.getpid()
    path = _path(folder, number, kind)
    _NAMED.add(path)
    write_text(path, msgspec.json.encode(RankProcess(pid, started_ticks(pid) or 0, socket.gethostname(), device)).decode() + "\n")
    try:
        yield
    finally:
        _NAMED.discard(path)
        with suppress(OSError):  # as in a folder that is read-only now: what ended the process is of more account
            path.unlink(missing_ok=True)


def forget_this_process() -> None:
    """Before an end at once: nobody names this process any more."""
    for path in _NAMED:
        path.unlink(missing_ok=True)


def forget_processes(folder: str | Path) -> None:
    """All processes of a run have ended, however they did."""
    for path in Path(folder).glob(_FILES):
        path.unlink(missing_ok=True)


def read_process(folder: str | Path, number: int, kind: str = RANK) -> RankProcess | None:
    """The process of a rank, or of a node; None if the run has none for it now."""
    path = _path(folder, number, kind)
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(readable_bytes(path, "process"), type=RankProcess)
    except msgspec.DecodeError as error:
        raise InputError(f"process '{path}': {error}.") from None


def _path(folder: str | Path, number: int, kind: str) -> Path:
    return Path(folder) / f"{kind}-{number:05d}.process.json"
