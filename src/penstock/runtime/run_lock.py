"""One run in a folder at a time: a lock that the system lets go when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from penstock.errors import InputError

__all__ = ["LOCK", "is_held", "run_lock"]

LOCK = "lock"
"""The file that is locked; it stays, and says who had the folder last."""


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Holds a folder that exists; refused, with the holder's name, while another process does."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"'{folder}' cannot hold a run: '{path}': {error.strerror}.") from None
    try:
        _take(handle, folder)
        yield
    finally:
        os.close(handle)  # which lets go of the lock: children are started with `exec` and never get the handle


def is_held(folder: Path) -> bool:
    """Whether a process of this machine trains into a folder now."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 1000, 0).decode(errors="replace").strip() or "another process"
        raise InputError(
            f"'{folder}' is in use: {holder} trains into it. Wait for it, end it, or train into another folder with --out."
        ) from None
    except OSError:
        return  # a file system without locks (some mounts of Lustre) can hold a run all the same, as it could hold files
    started = datetime.now().astimezone().isoformat(" ", "seconds")
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}, started {started}\n".encode(), 0)
