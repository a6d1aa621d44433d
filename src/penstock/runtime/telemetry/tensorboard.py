"""Steps as TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.runtime.telemetry.steps import StepRecord

__all__ = ["tensorboard_sink"]


def tensorboard_sink(folder: str | Path) -> Callable[[Any], None] | None:
    """A function that writes each step's numbers for TensorBoard; None where it is not installed (`penstock[tensorboard]`)."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(folder))

    def write(record: StepRecord) -> None:
        for name in record.__struct_fields__:
            value = getattr(record, name)
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                writer.add_scalar(f"train/{name}", value, record.step)
        writer.flush()

    return write
