"""Noticing that a rank, a link or a host has become slower or faster: two-sided CUSUM tests over what took how much longer than predicted.

    x = log(measured / predicted) − what is common to all       prediction errors that follow the lengths of samples are alike everywhere
    z = clip((x − level) / scale)                               a hiccup counts no more than `CLIP` steps of usual noise
    up   = max(0, up   + z − DRIFT)     beyond `LIMIT`: slower since the step at which `up` was last 0
    down = max(0, down − z − DRIFT)     beyond `LIMIT`: faster

The level after a change is the median since it began. Levels are ratios to a prediction for the work that was really done, so they stay
valid when a plan is changed. All of it is a function of the figures that ranks gather after each step: every rank reaches the same verdict.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

__all__ = ["REMEDIED", "Cause", "Change", "Detector", "StepFigures", "Subject"]

Floats = NDArray[np.float64]
Subject = tuple[int, ...]
"""A rank, the two ranks of a link, or nobody (planning)."""

DRIFT, LIMIT, CLIP = 1.0, 14.0, 4.0
WARM_UP = {5: math.log(1.15), 10: math.log(1.12)}
"""After so many steps levels are known so well that what is slow from the first step on can be told: a ratio that is nearer to the others'
than this is taken for an error of the costs."""
WINDOW = 64
"""Steps from which the noise is estimated."""
SCALE_STEPS = 4
"""Steps after which it is estimated again."""
LEAST_SCALE = 0.01
LEAST_CHANGE = math.log(1.1)
"""A smaller change is not worth telling; the level follows it."""
SETTLING = 24
"""Steps from which a level is estimated after a change."""
COMMON_STEPS, COMMON_LEAST = 50, math.log(1.2)
"""All ranks slower than predicted by so much for so long: the costs are off."""


class Cause(StrEnum):
    """What has become slower or faster."""

    COMPUTE = "compute"
    """A rank's passes, without waits and without collectives."""
    HOST = "host"
    """A rank's process issues work late."""
    LINK = "link"
    """Messages between two ranks."""
    DATA = "data"
    """Samples come late to a rank."""
    PLANNING = "planning"
    """Programs come late."""
    COSTS = "costs"
    """All ranks alike are slower, or faster, than the costs say: nobody is to blame, and no plan would help."""


REMEDIED = (Cause.COMPUTE, Cause.HOST, Cause.LINK)
"""Another plan may help."""
_WAITS = (Cause.DATA, Cause.PLANNING)
"""Nothing is predicted for them that could be wrong for all alike: who waits is told, also if all do."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What one kind of work took in a step, for all subjects in one order; a subject that had none of it has 0 predicted.

    For data and planning, `predicted_s` is the step, and `measured_s` the step and the wait.
    """

    measured_s: Sequence[float] | Floats
    predicted_s: Sequence[float] | Floats

    def ratios(self) -> Floats:
        """Logarithms of measured over predicted; not a number where there was no work."""
        measured, predicted = np.asarray(self.measured_s, dtype=np.float64), np.asarray(self.predicted_s, dtype=np.float64)
        known = (measured > 0) & (predicted > 0)
        return np.log(np.divide(measured, predicted, out=np.full_like(measured, np.nan), where=known))


@dataclass(frozen=True, slots=True)
class Change:
    """A subject takes `factor` times what is predicted (over what is usual among its peers), and took `before` times as much."""

    cause: Cause
    subject: Subject
    factor: float
    before: float
    since: int
    """The step at which it seems to have begun."""
    noticed: int
    """The step after which it was told."""


class _Series:
    """One cause: the tests of all its subjects."""

    def __init__(self, cause: Cause, subjects: Sequence[Subject]) -> None:
        self.cause, self.subjects = cause, list(subjects)
        count = len(self.subjects)
        self.level, self.told, self.usual = np.zeros(count), np.zeros(count), np.zeros(count)
        """Where each subject's ratio is, where it was told to be, and where it is when nothing slows it (an error of the costs)."""
        self._up, self._down = np.zeros(count), np.zeros(count)
        self._since = np.zeros((2, count), dtype=np.int64)
        """The step after the last at which `up` and `down` were 0."""
        self._settling = np.zeros(count, dtype=np.int64)
        """How many steps have come before those that the level is being estimated from; -1: it is settled."""
        self._corrected = np.zeros(count, dtype=np.bool_)
        """Whether it was told again where a level is while that settles."""
        self._slow_first = np.zeros(count, dtype=np.bool_)
        self._past, self._rest = np.full((WINDOW, count), np.nan), np.full((WINDOW, count), np.nan)
        """Ratios, and what of them the levels do not explain: rings of the last steps."""
        self._scale = np.full(count, LEAST_SCALE)
        self.num_steps = 0

    def add(self, ratios: Floats, step: int) -> list[tuple[float, Change]]:
        """The changes that a step shows, each with how far its test went."""
        at = self.num_steps % WINDOW
        self._past[at], self._rest[at] = ratios, ratios - self.level
        self.num_steps += 1
        if self.num_steps <= max(WARM_UP):
            return self._first_levels(step, WARM_UP[self.num_steps]) if self.num_steps in WARM_UP else []
        found = self._settle(step)
        if self.num_steps % SCALE_STEPS == 0:
            self._scale = self._noise()
        z = np.nan_to_num(np.clip((ratios - self.level) / self._scale, -CLIP, CLIP))
        self._up, self._down = np.maximum(0.0, self._up + z - DRIFT), np.maximum(0.0, self._down - z - DRIFT)
        for side, total in enumerate((self._up, self._down)):
            self._since[side, total == 0.0] = step + 1
        beyond = np.maximum(self._up, self._down)
        for index in np.flatnonzero(beyond > LIMIT).tolist():
            since = self._relevel(index, step)
            if self._is_far(index):
                found.append((float(beyond[index]), self._tell(index, since, step)))
        return found

    def _first_levels(self, step: int, least: float) -> list[tuple[float, Change]]:
        """What ratios are at the beginning: an error of the costs, or a subject that is slow from the start."""
        self.level = np.array([_median(column) for column in self._past.T])
        self._rest = self._past - self.level
        self._scale = self._noise()
        self._since[:] = step + 1
        new = np.flatnonzero((np.abs(self.level) >= least) & ~self._slow_first).tolist()
        self._slow_first[new] = True
        self.usual = np.where(self._slow_first, 0.0, self.level)
        self.told[~self._slow_first] = self.level[~self._slow_first]
        return [(LIMIT, self._tell(index, step - self.num_steps + 1, step)) for index in new]

    def _settle(self, step: int) -> list[tuple[float, Change]]:
        """Levels after a change, and at the beginning, are medians of all that came since, up to a point; those that went far are told
        once on the way there and once then: of what changes from step to step the median does too."""
        found = []
        for index in np.flatnonzero(self._settling >= 0).tolist():
            before = int(self._settling[index])
            steps = self.num_steps - before
            self.level[index] = _median(self._recent(index, steps))
            if steps >= SETTLING:
                self._settling[index] = -1
            is_due = steps >= SETTLING or (steps >= SETTLING // 2 and not self._corrected[index])
            if is_due and self._is_far(index):
                self._corrected[index] = True
                found.append((LIMIT, self._tell(index, step - steps + 1, step)))
        return found

    def _relevel(self, index: int, step: int) -> int:
        """Estimates the level anew from the steps in which the test went up; the first of them."""
        side = 0 if self._up[index] >= self._down[index] else 1
        since = int(self._since[side, index])
        self.level[index] = _median(self._recent(index, step - since + 1))
        self._settling[index] = max(0, self.num_steps - (step - since + 1))
        self._up[index] = self._down[index] = 0.0
        self._corrected[index] = False
        self._since[:, index] = step + 1
        return since

    def _is_far(self, index: int) -> bool:
        return bool(abs(self.level[index] - self.told[index]) >= LEAST_CHANGE)

    def _tell(self, index: int, since: int, step: int) -> Change:
        usual = self.usual[index]
        before = 1.0 if self.num_steps in WARM_UP else math.exp(self.told[index] - usual)
        self.told[index] = self.level[index]
        return Change(self.cause, self.subjects[index], math.exp(self.level[index] - usual), before, since, step)

    def _noise(self) -> Floats:
        """Usual noise of each subject: 1.48 × its median distance from its level, and no less than that of all subjects together.

        Where a level lags behind a slow drift, the distance is that from the median of the window.
        """
        rest = np.abs(self._rest[: self.num_steps])
        pooled = max(1.4826 * _median(rest.ravel()), LEAST_SCALE)
        if self.num_steps < WINDOW:  # a few steps say little about one subject, but much about all together
            return np.full(len(self.subjects), pooled)
        drifted = np.abs(self._past - np.array([_median(column) for column in self._past.T]))
        own = [min(_median(column), _median(other)) for column, other in zip(rest.T, drifted.T, strict=True)]
        return np.asarray(np.maximum(1.4826 * np.array(own), pooled))

    def _recent(self, index: int, steps: int) -> Floats:
        """The ratios of a subject in the last steps."""
        last = self.num_steps - 1
        return self._past[np.arange(last - min(steps, WINDOW, self.num_steps) + 1, last + 1) % WINDOW, index]


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else 0.0


def _common(ratios: Floats) -> float:
    """What all subjects share: the lower median, so that of two ranks the faster is the measure of the other."""
    known = np.sort(ratios[~np.isnan(ratios)])
    return float(known[(len(known) - 1) // 2]) if len(known) else 0.0


class Detector:
    """Follows a run step by step; `subjects` are the ranks and links that each cause can have."""

    def __init__(self, subjects: Mapping[Cause, Sequence[Subject]]) -> None:
        self._series = {cause: _Series(cause, own) for cause, own in subjects.items()}
        self._commons: deque[float] = deque(maxlen=COMMON_STEPS)
        self._common_told = 0.0

    def add(self, step: int, figures: Mapping[Cause, StepFigures]) -> list[Change]:
        """The changes that step `step` shows, the clearest first; figures are those of all ranks."""
        found: list[tuple[float, Change]] = []
        for cause, own in figures.items():
            ratios = own.ratios()
            alone = cause is Cause.LINK and np.count_nonzero(~np.isnan(ratios)) == 1
            common = 0.0 if cause in _WAITS or alone else _common(ratios)
            found += self._series[cause].add(ratios - common, step)
            if cause is Cause.COMPUTE:
                found += self._costs_off(_common(ratios), step)
        return [change for _, change in sorted(found, key=lambda one: -one[0])]

    def _costs_off(self, common: float, step: int) -> list[tuple[float, Change]]:
        self._commons.append(common)
        level = float(np.median(self._commons))
        if len(self._commons) < COMMON_STEPS or abs(level - self._common_told) < COMMON_LEAST:
            return []
        before, self._common_told = math.exp(self._common_told), level
        return [(0.0, Change(Cause.COSTS, (), math.exp(level), before, step - COMMON_STEPS + 1, step))]

    def factors(self, cause: Cause) -> dict[Subject, float]:
        """How many times the predicted each subject takes now, over what is usual; 1 where no change was told, or its end was."""
        own = self._series[cause]
        changed = np.where(np.abs(own.told - own.usual) < LEAST_CHANGE, 0.0, own.level - own.usual)
        return {subject: math.exp(level) for subject, level in zip(own.subjects, changed, strict=True)}
