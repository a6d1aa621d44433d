"""Backward passes on the thread that asks for them.

Torch hands what runs on a GPU to a thread of its own. Waking that for every pass, on a core that has gone to sleep, takes the host longer
than issuing a small pass: where the host is the limit, passes are a sixth faster without (`benchmarks/host_pace.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

__all__ = ["run_backward"]


def run_backward(roots: Sequence[torch.Tensor | GradientEdge], gradients: Sequence[torch.Tensor] | None = None) -> None:
    """Adds the gradients of what the roots were made of, given those of the roots: none for a loss."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(list(roots), gradients)
