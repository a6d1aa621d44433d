"""The same bits from the same run on a GPU: kernels that add in whatever order threads arrive are left out."""

from __future__ import annotations

import os

import torch

__all__ = ["always_the_same"]


def always_the_same() -> None:
    """From here on this process runs deterministic kernels alone; an op that has none fails and says so. Before its first product."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it finds mistakes, at the price of time
    torch.backends.cudnn.benchmark = False
