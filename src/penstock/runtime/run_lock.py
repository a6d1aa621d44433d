"""One run in a folder at a time: a lock that the system lets go when its process ends, however it ends. A process that stands still keeps
it; whoever sees that it shows no life any more may take the folder away from it."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from penstock.errors import InputError

__all__ = ["LOCK", "RunLock", "is_held", "lock_word", "run_lock", "take_away"]

LOCK = "lock"
"""The file that is locked; it stays, and says who had the folder last."""
_TAKEN, _TAKING = "lock.taken", "lock.taking"


class RunLock:
    """A folder that this process holds."""

    def __init__(self, handle: int, path: Path) -> None:
        self._handle, self._path, self._beats, self._end = handle, path, 0, os.fstat(handle).st_size

    @property
    def is_held(self) -> bool:
        """Whether it still does: a process that stood still may have lost it."""
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):  # the folder may be gone too, and something else there
            return False
        own = os.fstat(self._handle)
        return (found.st_ino, found.st_dev) == (own.st_ino, own.st_dev)

    @property
    def is_gone(self) -> bool:
        """Whether it lost the folder to nobody: the folder itself was removed, or the lock in it."""
        return not self._path.exists() and not self._path.with_name(_TAKEN).exists()

    def beat(self) -> None:
        """Shows whoever looks at `lock_word` that this process goes on, from another machine too: NFS keeps what is written back until a
        file is closed or synchronised."""
        self._beats += 1
        os.pwrite(self._handle, f"beat {self._beats}\n".encode(), self._end)
        os.fdatasync(self._handle)


def lock_word(folder: Path) -> bytes:
    """The last word of the process that holds a folder; the same for long: it stands still."""
    try:
        return (folder / LOCK).read_bytes()
    except FileNotFoundError:
        return b""


def take_away(folder: Path, word: bytes) -> None:
    """Takes the lock of a folder away from a holder that has said nothing since `word`; it may then be taken as any that is free."""
    handle = os.open(folder / _TAKING, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # several may want to
        if lock_word(folder) == word:
            os.replace(folder / LOCK, folder / _TAKEN)
    finally:
        os.close(handle)


@contextmanager
def run_lock(folder: Path) -> Iterator[RunLock]:
    """Holds a folder that exists; refused, with the holder's name, while another process does."""
    path = folder / LOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(f"'{folder}' cannot hold a run: '{path}': {error.strerror}.") from None
    try:
        _take(handle, folder)
        yield RunLock(handle, path)
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
