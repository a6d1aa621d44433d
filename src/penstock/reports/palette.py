"""Colours of passes, waits and transfers, alike in figures, notebooks and the report: those of Okabe and Ito, told apart by most eyes."""

from __future__ import annotations

__all__ = ["KIND_COLOURS", "KIND_NAMES", "STAGE_COLOURS"]

KIND_COLOURS = ("#0072b2", "#009e73", "#56b4e9", "#e69f00")
"""Of F, B, I and W, as in `schedules.actions`."""
KIND_NAMES = ("forward", "backward", "input gradient", "weight gradient")
STAGE_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#707070")
"""Of stages, in turn."""
