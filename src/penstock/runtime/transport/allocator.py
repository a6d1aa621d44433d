"""How a GPU's memory is cut: shapes change with every micro-batch, and segments that grow leave no holes too small for the next one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["plain_segments", "reserve", "use_expandable_segments"]


def use_expandable_segments() -> None:
    """For all that is allocated from now on, unless the environment says otherwise."""
    _set("True")


@contextmanager
def plain_segments() -> Iterator[None]:
    """What is allocated inside can be lent to other processes, which growing segments cannot."""
    _set("False")
    try:
        yield
    finally:
        _set("True")


def reserve(device: torch.device, share: float, sharers: int = 1) -> int:
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
