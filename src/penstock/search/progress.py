"""What a search has found so far, how much time it has left, and what a searcher is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import InfeasibleError
from penstock.search.choice import FORMULA_OFF, Choice
from penstock.search.space.families import Subspace

__all__ = ["GOOD_GAP", "Progress", "ProofLine", "Searcher", "Watch", "unwatched", "weakest"]

GOOD_GAP = 0.022
"""A bound this near to the best plan is not made sharper."""

Watch = Callable[[str, float, float], None]
"""Told what is being done, the best time so far and the bound so far, in seconds."""


def unwatched(text: str, best_s: float, bound_s: float) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class ProofLine:
    """How far one subspace of a family was excluded."""

    replicas: int
    micro_batch: int
    subspace: Subspace
    by_ops_s: float
    """From ops and devices alone."""
    by_stages_s: float | None
    """With whole ops, cuts and memory; None where the first was enough."""

    @property
    def bound_s(self) -> float:
        """The sharper of both."""
        return self.by_ops_s if self.by_stages_s is None else max(self.by_ops_s, self.by_stages_s)


@dataclass
class Progress:
    """The state of one search: plans and bounds so far, the deadline, who watches."""

    watch: Watch
    deadline: float
    """Of `time.monotonic`."""
    known_s: float = math.inf
    """The time of a plan that is known from elsewhere."""
    choices: list[Choice] = field(default_factory=list)
    clocked: list[Choice] = field(default_factory=list)
    """Plans that were looked for by the clock: slower than others by formula, by which nothing else is to be judged beside them."""
    bound_s: float = 0.0
    """What no plan can be below, as far as is known while the search runs."""
    lines: list[ProofLine] = field(default_factory=list)
    """How subspaces were excluded."""
    stopped: str = ""
    """Why the search did not end by itself."""
    reason: InfeasibleError | None = None
    """Why no uniform plan fits, if that is known."""

    @property
    def best_s(self) -> float:
        """The time of the fastest plan so far, or of that known from elsewhere: only faster ones are looked for."""
        return min([self.known_s, *(choice.estimate.time_s for choice in self.choices)])

    @property
    def limit_s(self) -> float:
        """Plans that are slower by formula are not looked for. The clock finds pipelines faster than the formula does, since it hides their
        messages, but not plans of one stage, beside which a pipeline may therefore be slower by formula."""
        stages = ((choice.estimate.time_s, choice.plan.num_stages) for choice in self.choices)
        return min([self.known_s, *(time_s if number > 1 else time_s * (1 + FORMULA_OFF) for time_s, number in stages)])

    @property
    def enough_s(self) -> float:
        """No line of the proof needs to be better than this: it is near the best plan, or no better than the weakest line there is."""
        return min([self.best_s / (1 + GOOD_GAP), *(line.bound_s for line in self.lines)])

    def fastest(self, number: int) -> list[Choice]:
        """The fastest `number` of the plans found."""
        return sorted(self.choices, key=lambda choice: choice.estimate.time_s)[:number]

    def add(self, choice: Choice | None) -> None:
        """Adds a plan to those found, if there is one."""
        if choice is not None:
            self.choices.append(choice)

    def tell(self, text: str) -> None:
        """Says what is being done."""
        self.watch(text, self.best_s, min(self.bound_s, self.best_s))

    def out_of_time(self) -> bool:
        """Whether to end with what there is."""
        if time.monotonic() > self.deadline:
            self.stopped = "time budget"
        return bool(self.stopped)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C ends what runs inside, if there is an answer already."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.choices:
                raise
            self.stopped = "interrupted"


class Searcher(Protocol):
    """One part of the space of plans.

    A searcher divides its part into subspaces and takes them one by one, the most promising first, so that the engine may stop anywhere.
    """

    def bound(self) -> float:
        """What no plan of this part can be below, as far as is known: from ops alone at first, sharper after `best` and `prove`.

        Infinite where nothing is known yet: parts that only make sense beside plans of others are bounded while they are searched.
        """

    def best(self, progress: Progress) -> None:
        """Adds the best plans that are faster than `progress.limit_s`."""

    def prove(self, progress: Progress) -> None:
        """Sharpens the bound where it is below `progress.enough_s`, and adds a line to the proof for each subspace that may hold plans
        faster than the best."""


def weakest(lines: Sequence[ProofLine]) -> float:
    """The bound that some lines give together."""
    return min((line.bound_s for line in lines), default=math.inf)
