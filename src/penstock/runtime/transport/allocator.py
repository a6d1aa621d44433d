"""How memory is kept while shapes change with every micro-batch: segments of a GPU that grow leave no holes too small for the next one, and
what a processor's pass frees stays with the process."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["keep_freed_memory", "plain_segments", "reserve", "use_expandable_segments"]

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""What glibc's `mallopt` calls them."""
_KEPT_BYTES, _AHEAD_BYTES, _MAPPED_BYTES = 2**31 - 1, 2**26, 2**25
"""Freed memory at the end of the heap that is kept; by how much the heap grows; larger blocks are mapped alone, whatever is asked."""


def keep_freed_memory() -> None:
    """Memory of a processor that a pass has freed is the next one's: given back and asked for again, each page of it is cleared by the
    system, which took a tenth of all steps of a small model. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, size in ((_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _AHEAD_BYTES), (_MMAP_THRESHOLD, _MAPPED_BYTES)):
            mallopt(option, size)


def use_expandable_segments() -> None:
    """Lets segments of GPU memory grow, for all that is allocated from now on, unless the environment says otherwise."""
    _set("True")


@contextmanager
def plain_segments() -> Iterator[None]:
    """Allocates inside in plain segments, which can be lent to other processes; growing ones cannot."""
    _set("False")
    try:
        yield
    finally:
        _set("True")


def reserve(device: torch.device, share: float, sharers: int) -> int:
    """Takes this share of the device's memory (of its part, where several ranks share the device) now, and returns its bytes.

    Taken bit by bit, as the shapes of the first iterations grow, it costs time in each of them.
    """
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    size = max(0, int(min(share * total / sharers - held, 0.95 * free)))
    torch.empty(size, dtype=torch.uint8, device=device)  # given back to the allocator, which keeps it
    return size


def _set(expandable: str) -> None:
    if "PYTORCH_ALLOC_CONF" not in os.environ and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # A call, not the variable: workers have torch from the process that they are forked from.
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")
