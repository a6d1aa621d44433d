"""Memory without a name that a process shares with those it starts: it is gone with the last of them, however they end."""

from __future__ import annotations

import mmap
import os
import weakref
from multiprocessing import reduction
from typing import Any

__all__ = ["SharedMemory"]


class SharedMemory:
    """A file that is only in memory and in no folder. It is handed to a process by descriptor, as an argument of `start_process`; pages
    that nobody has written take no room."""

    def __init__(self, size: int, handle: int | None = None) -> None:
        self.handle = os.memfd_create("penstock", os.MFD_CLOEXEC) if handle is None else handle
        self.size = size
        if handle is None:
            os.truncate(self.handle, size)
        self.close = weakref.finalize(self, os.close, self.handle)
        """Lets go of it here; called by itself when nobody here holds this object any more."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self.size, reduction.DupFd(self.handle))

    def mapped(self, offset: int = 0, size: int | None = None) -> mmap.mmap:
        """A part of it as memory; `offset` is a multiple of the system's pages."""
        return mmap.mmap(self.handle, self.size - offset if size is None else size, offset=offset)

    def read(self, offset: int, size: int) -> bytes:
        """Some bytes of it."""
        return os.pread(self.handle, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Puts some bytes there."""
        os.pwrite(self.handle, data, offset)


def _received(size: int, descriptor: Any) -> SharedMemory:
    return SharedMemory(size, descriptor.detach())
