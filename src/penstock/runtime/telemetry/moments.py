"""Moments on the clock of whoever computes: the processor's own, or that of a GPU's stream, to which the host only hands work."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["Moment", "moment", "seconds"]

Moment = Any
"""Seconds of the processor's clock, or an event of a GPU's stream."""


def moment(device: torch.device) -> Moment:
    """Now; on a GPU, when all that was issued so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Moment, end: Moment) -> float:
    """From one moment to a later one, which must have come."""
    found: float = end - start if isinstance(end, float) else start.elapsed_time(end) * 1e-3
    return found
