"""How long a run goes without a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["SaveInterval"]

_USUAL_S = 600.0
_MOST_LOST = 0.01
"""The share of a run's time in which training may stand still for checkpoints."""


@dataclass
class SaveInterval:
    """Ten minutes, or longer where training stood still for so long at the last checkpoint that more than a hundredth would be lost."""

    _last_s: float = field(default_factory=time.monotonic)
    _stood_s: float = 0.0

    def saved(self, start_s: float, end_s: float) -> None:
        """A checkpoint was begun; training stood still from `start_s` to `end_s`."""
        self._last_s, self._stood_s = end_s, end_s - start_s

    def is_over(self, now_s: float) -> bool:
        """Whether it is time for the next."""
        return now_s - self._last_s >= max(_USUAL_S, self._stood_s / _MOST_LOST)
