"""Adapting by simulation: how soon slow ranks are noticed, how seldom in vain, and how well the right one is named.

    python benchmarks/adapting.py                 all figures beside what they have to reach; status 1 if one does not
    python benchmarks/adapting.py noticing        one part of them

Measured times are predictions × disturbance × noise: 5 % of each rank's own, hiccups of 1.5 to 4 times in one step of fifty, and errors of
the prediction that follow the lengths of samples. Those are common to all ranks but for a small part, and last for long where
samples are sorted by length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.adapting.detecting import Cause, Change, Detector, StepFigures

__all__ = ["PARTS", "Noise", "Row", "false_alarms", "latencies", "named"]

NUM_RANKS = 8
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """A figure, and what it has to reach."""

    name: str
    value: float
    limit: float
    at_most: bool = True

    @property
    def reached(self) -> bool:
        """Whether it is good enough."""
        return self.value <= self.limit if self.at_most else self.value >= self.limit


@dataclass(frozen=True)
class Noise:
    """What measured times differ from predicted ones by."""

    own: float = 0.05
    """Of each rank in each step."""
    hiccups: float = 0.02
    """Steps of a rank that take 1.5 to 4 times as long."""
    common: float = 0.08
    """Error of the prediction that follows the lengths of samples, for all ranks alike."""
    apart: float = 0.01
    """The part of it that differs between ranks."""
    memory: float = 0.0
    """How much of these errors is the same in the next step: near 1 where samples are sorted by length."""

    def draw(self, generator: np.random.Generator, num_steps: int, count: int) -> Floats:
        """[steps, count] logarithms."""
        found = generator.normal(0, self.own, (num_steps, count))
        found += (generator.random((num_steps, count)) < self.hiccups) * np.log(generator.uniform(1.5, 4, (num_steps, count)))
        return found + self._following(generator, num_steps, 1, self.common) + self._following(generator, num_steps, count, self.apart)

    def _following(self, generator: np.random.Generator, num_steps: int, count: int, size: float) -> Floats:
        drawn = generator.normal(0, size, (num_steps, count))
        for step in range(1, num_steps):
            drawn[step] = self.memory * drawn[step - 1] + np.sqrt(1 - self.memory**2) * drawn[step]
        return drawn


RAGGED, SORTED = Noise(), Noise(memory=0.95)
SUBJECTS: dict[Cause, list[tuple[int, ...]]] = {
    Cause.COMPUTE: [(rank,) for rank in range(NUM_RANKS)],
    Cause.HOST: [(rank,) for rank in range(NUM_RANKS)],
    Cause.LINK: [(rank, rank + 1) for rank in range(NUM_RANKS - 1)],
    Cause.DATA: [(rank,) for rank in range(NUM_RANKS)],
    Cause.PLANNING: [()],
}


def run(ratios: Mapping[Cause, Floats], stop: Callable[[list[Change]], bool] = lambda _: False) -> list[Change]:
    """Feeds a detector with [steps, subjects] logarithms of ratios, until `stop` says that enough was found."""
    detector = Detector({cause: SUBJECTS[cause] for cause in ratios})
    found: list[Change] = []
    for step in range(len(next(iter(ratios.values())))):
        new = detector.add(step, {cause: StepFigures(np.exp(own[step]), np.ones(own.shape[1])) for cause, own in ratios.items()})
        found += [change for change in new if change.cause is not Cause.COSTS]
        if stop(found):
            break
    return found


def _disturbed(
    seed: int, factor: float, noise: Noise, start: int, length: int, causes: Sequence[Cause]
) -> tuple[dict[Cause, Floats], Cause, int]:
    """Ratios of a run in which one subject of one cause is slower from step `start` on; which cause and which of its subjects."""
    generator = np.random.default_rng(seed)
    cause = causes[int(generator.integers(len(causes)))]
    ratios = {one: noise.draw(generator, start + length, len(SUBJECTS[one])) for one in causes}
    index = int(generator.integers(len(SUBJECTS[cause])))
    ratios[cause][start:, index] += np.log(factor)
    return ratios, cause, index


def latencies(factor: float, noise: Noise, runs: int, start: int = 60) -> list[int]:
    """Steps from the first slow one to the verdict, both counted, in some runs; 100 where there was none."""
    found = []
    for seed in range(runs):
        first = 0 if seed % 5 == 0 else start  # one run in five is slow from its first step on
        ratios, _, index = _disturbed(seed, factor, noise, first, 40, [Cause.COMPUTE])
        rank = SUBJECTS[Cause.COMPUTE][index]
        told = [one.noticed for one in run(ratios) if one.subject == rank and one.noticed >= first]
        found.append(told[0] - first + 1 if told else 100)
    return found


def named(factor: float, noise: Noise, runs: int, start: int = 60) -> float:
    """Share of runs in which the first verdict after the slow-down names the right cause, the right rank or link, and slower."""
    right = 0
    for seed in range(runs):
        ratios, cause, index = _disturbed(seed, factor, noise, start, 60, list(SUBJECTS)[:4])
        changes = run(ratios, lambda found: any(one.noticed >= start for one in found))
        first = next((one for one in changes if one.noticed >= start), None)
        right += first is not None and (first.cause, first.subject) == (cause, SUBJECTS[cause][index]) and first.factor > 1
    return right / runs


def false_alarms(noise: Noise, num_steps: int, seed: int = 0) -> int:
    """Verdicts in an undisturbed run."""
    return len(run({Cause.COMPUTE: noise.draw(np.random.default_rng(seed), num_steps, NUM_RANKS)}))


def noticing() -> list[Row]:
    """Latency, false alarms, and whether the right one is named."""
    rows = []
    for kind, noise in (("ragged", RAGGED), ("sorted by length", SORTED)):
        for factor, limit in ((1.5, 6), (1.2, 12)):
            late = float(np.quantile(latencies(factor, noise, 400), 0.95))
            rows.append(Row(f"steps to notice {factor}x, {kind}, 95th percentile", late, limit))
        rows.append(Row(f"false alarms in 10,000 steps, {kind}", sum(false_alarms(noise, 10_000, seed) for seed in range(3)) / 3, 1))
        for factor in (1.2, 1.5):
            rows.append(Row(f"right rank and cause at {factor}x, {kind}", named(factor, noise, 400), 0.995, at_most=False))
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {"noticing": noticing}


def main() -> int:
    """Prints the figures; 1 if one is not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=[], help="which figures; all unless given")
    rows = [row for part in parser.parse_args().parts or PARTS for row in PARTS[part]()]
    for row in rows:
        bound = "at most" if row.at_most else "at least"
        print(f"{row.name:60} {row.value:9.4g}   {bound} {row.limit:<6g} {'' if row.reached else 'MISSED'}")
    return 0 if all(row.reached for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
