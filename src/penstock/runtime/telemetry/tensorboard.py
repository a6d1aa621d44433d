"""Steps as TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.runtime.telemetry.steps import StepRecord

__all__ = ["tensorboard_sink"]


def tensorboard_sink(folder: str | Path) -> Callable[[Any], None] | None:
    """A function that writes each step's numbers for TensorBoard; None where it is not installed (`penstock[tensorboard]`).

    It is imported with the first step, which takes the better part of a second, and keeps no first step waiting.
    """
    if find_spec("tensorboard") is None:
        return None
    opened: list[Any] = []

    def write(record: StepRecord) -> None:
        if not opened:
            opened.append(_writer(folder))
        (writer,) = opened
        for name in record.__struct_fields__ if writer is not None else ():
            value = getattr(record, name)
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                writer.add_scalar(f"train/{name}", value, record.step)
        if writer is not None:
            writer.flush()

    return write


def _writer(folder: str | Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # it is there, but something that it needs is not
        return None
    return SummaryWriter(str(folder))
