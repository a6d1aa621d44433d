"""A disk that is full too soon, without one: files of this process end at a size."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["small_files"]


@contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """No file grows beyond so many bytes inside; writing more fails as it does on a full disk, in the middle."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
