"""What slows devices, links and data loading down while a run goes on: factors as a function of the step, the same in every run.

    step      ▁▁▁▁████████████      from step `first` on
    ramp      ▁▁▁▂▃▄▅▆▇███████      rises over `steps`, then stays
    pulse     ▁▁▁▁██████▁▁▁▁▁▁      for `steps`
    square    ▁▁▁▁███▁▁▁███▁▁▁      `steps` on, `steps` off, for good
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from penstock.errors import InputError, near_misses, plural

__all__ = ["SHAPES", "Disturbance", "DisturbanceChange", "DisturbanceStrike"]

Shape = Literal["step", "ramp", "pulse", "square"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


@dataclass(frozen=True)
class DisturbanceChange:
    """One thing that takes `factor` times as long for some steps."""

    ranks: tuple[int, ...]
    """A rank, whose computing it is; the two ends of a link, in both directions; or none: data loading."""
    factor: float
    shape: Shape = "step"
    first: int = 0
    """The first step that it touches."""
    steps: int = 0
    """How long it lasts, rises, or is on and off; of no use to a step, which lasts for good."""

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise InputError(f"{self.subject} is to take {self.factor:g} times as long; a number above 0, such as 1.5, was expected.")
        if self.shape not in SHAPES:
            raise InputError(f"{self.subject}: shape '{self.shape}' is not known. {near_misses(self.shape, SHAPES)}")
        if self.first < 0:
            raise InputError(f"{self.subject} is to be slower from step {self.first} on; 0 or more was expected.")
        if self.shape != "step" and self.steps < 1:
            raise InputError(f"{self.subject}: a {self.shape} of {plural(self.steps, 'step')} is none. Give `steps`, 1 or more.")
        if len(self.ranks) == 2 and self.ranks[0] == self.ranks[1]:
            raise InputError(f"{self.subject} joins rank {self.ranks[0]} to itself. Name two ranks.")

    @property
    def subject(self) -> str:
        """What is slowed, in words."""
        if not self.ranks:
            return "data loading"
        return f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"link {self.ranks[0]}-{self.ranks[1]}"

    def at(self, step: int) -> float:
        """The factor in a step.

        >>> [DisturbanceChange((0,), 3.0, "ramp", first=2, steps=2).at(step) for step in range(6)]
        [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]
        >>> [DisturbanceChange((0,), 2.0, "square", first=1, steps=2).at(step) for step in range(7)]
        [1.0, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0]
        """
        since = step - self.first
        if since < 0:
            return 1.0
        if self.shape == "ramp":
            return 1.0 + (self.factor - 1.0) * min(1.0, (since + 1) / self.steps)
        on = self.shape == "step" or since < self.steps or (self.shape == "square" and since // self.steps % 2 == 0)
        return self.factor if on else 1.0


@dataclass(frozen=True)
class DisturbanceStrike:
    """A rank whose process is killed or frozen, or fails; or a node's supervisor; or that of whichever node serves the stores by then."""

    kind: Literal["kill", "freeze", "fail"]
    rank: int | None
    phase: str
    """Of the step: `backward`, `saving` …"""
    first: int = 0
    """At the first chance from this step on."""
    node: int | None = None
    """In place of a rank; neither: who serves the stores."""

    @property
    def subject(self) -> str:
        """What is struck, in words."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return "the store" if self.node is None else f"node {self.node}"


@dataclass(frozen=True)
class Disturbance:
    """All that is slowed; what several changes touch takes the product of their factors."""

    changes: tuple[DisturbanceChange, ...] = ()
    strikes: tuple[DisturbanceStrike, ...] = ()

    @classmethod
    def of_ranks(cls, factors: Mapping[int, float]) -> Disturbance:
        """Ranks that are slower from the first step to the last."""
        return cls(tuple(DisturbanceChange((rank,), factor) for rank, factor in factors.items()))

    def compute(self, rank: int, step: int) -> float:
        """How many times as long the ops of a rank take."""
        return self._factor((rank,), step)

    def link(self, one: int, other: int, step: int) -> float:
        """How many times as long a transfer between two ranks takes."""
        return self._factor((min(one, other), max(one, other)), step)

    def data(self, step: int) -> float | None:
        """Loading the samples of a step takes so many times as long as computing with them (1: it just keeps up); None: it is not
        disturbed, and never waited for."""
        loading = [change for change in self.changes if not change.ranks]
        return math.prod(change.at(step) for change in loading) if any(change.first <= step for change in loading) else None

    def _factor(self, ranks: tuple[int, ...], step: int) -> float:
        return math.prod(change.at(step) for change in self.changes if tuple(sorted(change.ranks)) == ranks)

    def require_ranks(self, ranks: Sequence[int]) -> None:
        """Refuses changes of ranks that a plan does not have."""
        for change in self.changes:
            if not set(change.ranks) <= set(ranks):
                raise InputError(f"{change.subject} is to be slower, but the plan has ranks {min(ranks)} to {max(ranks)}.")
        for strike in self.strikes:
            if strike.rank is not None and strike.rank not in ranks:
                raise InputError(f"rank {strike.rank} is to be struck, but the plan has ranks {min(ranks)} to {max(ranks)}.")
