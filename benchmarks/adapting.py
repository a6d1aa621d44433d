"""Adapting by simulation: how soon slow ranks are noticed, how seldom in vain, and what is lost against somebody who knew it all.

    python benchmarks/adapting.py                 all figures beside what they have to reach; status 1 if one does not
    python benchmarks/adapting.py noticing        one part of them: noticing, predicting, replanning, deciding, watching, pausing

Measured times are predictions × disturbance × noise: 5 % of each rank's own, hiccups of 1.5 to 4 times in one step of fifty, and errors of
the prediction that follow the lengths of samples. Those are common to all ranks but for a small part, and last for long where
samples are sorted by length.

*Deciding* runs detector and decider against disturbances of one rank of eight. A step takes what the clock says of the plan in force at the
true speeds, a move its pause. The clairvoyant knows all speeds beforehand and pays the same pauses: the cheapest way through all steps and
all plans that either of them found.

*Predicting* is scored by `interference.py`; *watching* and *pausing* are measured on this machine (`live_moves.py`), over what was measured
beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.adapting.adapter import Adapter
from penstock.adapting.detecting import Cause, Change, Detector, StepFigures
from penstock.adapting.ladder import PAUSE_LINK, PAUSE_STEPS, Ladder, Remedy
from penstock.adapting.moves import moves
from penstock.adapting.split_moves import split_moves
from penstock.costs.sources import open_costs
from penstock.costs.speeds import SlowedCosts, Speeds
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.search.present_cuts import with_present_cuts
from penstock.timing.estimate import Estimator
from penstock.timing.planned import clocked

__all__ = ["PARTS", "Noise", "Row", "Story", "false_alarms", "latencies", "named", "pipeline", "square_wave", "told"]

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
    unpredicted = replace(noise, common=0.0)  # a wait is measured beside the step: no prediction of it could be off
    noises = {one: unpredicted if one is Cause.DATA else noise for one in causes}
    ratios = {one: noises[one].draw(generator, start + length, len(SUBJECTS[one])) for one in causes}
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


MODEL = {"family": "gpt", "layers": 8, "hidden": 2048, "heads": 16, "seq_length": 1024, "vocab": 2048}


class _Remembering(Ladder):
    """Runs of one benchmark ask for the same again and again."""

    def options(self, plan: Plan, speeds: Speeds, known: Iterable[Plan] = ()) -> tuple[Remedy, ...]:
        key = _number(plan), repr(speeds), tuple(sorted(map(_number, known)))
        if key not in _FOUND:
            _FOUND[key] = super().options(plan, speeds, known)
        return _FOUND[key]

    def time_s(self, plan: Plan, speeds: Speeds) -> float:
        key = _number(plan), repr(speeds)
        if key not in _TIMES:
            _TIMES[key] = super().time_s(plan, speeds)
        return _TIMES[key]


_FOUND: dict[tuple[int, str, tuple[int, ...]], tuple[Remedy, ...]] = {}
_TIMES: dict[tuple[int, str], float] = {}


@cache
def pipeline() -> tuple[Plan, Ladder]:
    """68 ops in 8 stages on 8 devices with the best cuts, and who knows what could be done about it."""
    plan = Plan(MODEL, "8xa100-80gb", 64, (), MicroBatching("padded", samples=1), seq_length=1024)
    model, cluster = model_of(plan), cluster_of(plan)
    cuts = [model.num_ops * at // NUM_RANKS for at in range(NUM_RANKS + 1)]
    plan = replace(plan, stages=tuple(Stage(cuts[at], cuts[at + 1], ((at,),)) for at in range(NUM_RANKS)))
    ladder = _Remembering(model, cluster, open_costs("roofline", cluster))
    found = with_present_cuts(plan, ladder.estimator(Speeds()).estimate(plan), ladder.estimator(Speeds()))
    return min(found, key=lambda one: ladder.time_s(one, Speeds())), ladder


def replanning() -> list[Row]:
    """Seconds of a core to find other cuts, and to look at all kinds of steps, the best of some tries: others use the machine too."""
    plan, ladder = pipeline()
    cuts_s, ladder_s = [], []
    for number in range(5):
        speeds = Speeds.of({number: 1.5 + number / 10})
        estimator = Estimator(ladder.model, ladder.cluster, SlowedCosts(ladder.source, speeds))
        start = time.process_time()
        found = with_present_cuts(plan, estimator.estimate(plan), estimator)
        min(clocked(one, estimator.estimate(one)).time_s for one in found)
        cuts_s.append(time.process_time() - start)
        start = time.process_time()
        fresh = Ladder(ladder.model, ladder.cluster, ladder.source)
        fresh.layouts = ladder.layouts
        fresh.options(plan, speeds)
        ladder_s.append(time.process_time() - start)
    name = f"re-planning, {ladder.model.num_ops} ops, 8 stages"
    return [Row(f"{name}: cuts, s", min(cuts_s), 0.1), Row(f"{name}: ladder, s", min(ladder_s), 1.0)]


@dataclass
class Story:
    """What a disturbed run took, step by step, pauses included: as it is told by several who decide."""

    factors: Floats
    """[steps, ranks] true slow-downs."""
    ours_s: Floats
    static_s: Floats
    clairvoyant_s: Floats
    num_moves: int


@cache
def _true_s(number: int, factors: tuple[float, ...]) -> float:
    return pipeline()[1].time_s(_PLANS[number], Speeds.of(dict(enumerate(factors))))


_PLANS: list[Plan] = []
"""All plans that anybody found, in the order in which they were found."""


def _number(plan: Plan) -> int:
    if plan not in _PLANS:
        _PLANS.append(plan)
    return _PLANS.index(plan)


def told(factors: Floats, seed: int = 0, noise: Noise = RAGGED) -> Story:
    """Runs detector and decider over a disturbance, and the clairvoyant beside them."""
    plan, ladder = pipeline()
    home = _number(plan)
    keys = [tuple(row.tolist()) for row in factors]
    adapter = Adapter(ladder, plan, {Cause.COMPUTE: SUBJECTS[Cause.COMPUTE]})
    ratios = np.log(factors) + noise.draw(np.random.default_rng(seed), len(factors), NUM_RANKS)
    ours, count, known = [], 0, {home}
    for step, key in enumerate(keys):
        ours.append(_true_s(_number(adapter.decider.plan), key))
        decision = adapter.add(step, {Cause.COMPUTE: StepFigures(np.exp(ratios[step]), np.ones(NUM_RANKS))}).decision
        if decision.moves:
            ours[-1] += decision.chosen.pause_s
            adapter.adopted(decision)
            known.add(_number(decision.chosen.plan))
            count += 1
    for key in set(keys):
        options = ladder.options(plan, Speeds.of(dict(enumerate(key))))
        known.add(_number(min((option for option in options if not option.refused), key=lambda option: option.time_s).plan))
    static = [_true_s(home, key) for key in keys]
    return Story(factors, np.array(ours), np.array(static), _clairvoyant(keys, sorted(known), home), count)


def _clairvoyant(keys: Sequence[tuple[float, ...]], plans: Sequence[int], home: int) -> Floats:
    """The cheapest way through steps and plans from the plan that the run begins with."""
    times = np.array([[_true_s(plan, key) for plan in plans] for key in keys])
    pauses = np.array([[_pause_s(a, b) for b in plans] for a in plans])
    cost = np.where(np.array(plans) == home, 0.0, pauses[plans.index(home)]) + times[0]
    came = []
    for row in times[1:]:
        through = cost[:, None] + pauses
        came.append(through.argmin(axis=0))
        cost = through.min(axis=0) + row
    at, way = int(cost.argmin()), []
    for step in range(len(keys) - 1, 0, -1):
        before = int(came[step - 1][at])
        way.append(times[step, at] + pauses[before, at])
        at = before
    return np.array([times[0, at] + pauses[plans.index(home), at], *way[::-1]])


@cache
def _pause_s(one: int, other: int) -> float:
    """As the ladder has it, for devices that nothing slows."""
    if one == other:
        return 0.0
    ladder = pipeline()[1]
    made = moves(_PLANS[one], _PLANS[other], layouts=ladder.layouts, cluster=ladder.cluster)
    cluster = ladder.estimator(Speeds()).cluster
    standing_s = min(made.time_s(cluster), split_moves(_PLANS[one], _PLANS[other], made, ladder.layouts).pause_s(made, cluster))
    return PAUSE_STEPS * ladder.time_s(_PLANS[0], Speeds()) + PAUSE_LINK * standing_s


def slowed(factor: float, rank: int, start: int = 60, length: int = 300) -> Floats:
    """One rank is slower from a step on."""
    factors = np.ones((start + length, NUM_RANKS))
    factors[start:, rank] = factor
    return factors


def square_wave(factor: float, rank: int, period: int, num_steps: int = 1200, share: float = 0.5) -> Floats:
    """One rank is slower in a part of each period."""
    factors = np.ones((num_steps, NUM_RANKS))
    factors[np.arange(num_steps) % period >= round((1 - share) * period), rank] = factor
    return factors


def deciding() -> list[Row]:
    """Throughput beside that of somebody who knew it all."""
    steady: list[float] = []
    first: list[float] = []
    waves: list[float] = []
    long_waves: list[float] = []
    over_static: list[float] = []
    for number, factor in enumerate((1.5, 2.0, 3.0)):
        for rank in (0, 3, 7):
            story = told(slowed(factor, rank), seed=10 * number + rank)
            steady.append(story.clairvoyant_s[-100:].sum() / story.ours_s[-100:].sum())
            first.append(story.clairvoyant_s[60:160].sum() / story.ours_s[60:160].sum())
            over_static.append(story.ours_s.sum() / story.static_s.sum())
    for period in (8, 14, 20, 30, 40, 60, 100, 200, 400, 600):
        for factor, share in ((1.2, 0.5), (1.5, 0.5), (3.0, 0.5), (1.5, 0.25), (3.0, 0.25)):
            story = told(square_wave(factor, 3, period, share=share), seed=period)
            ratio = story.ours_s.sum() / story.clairvoyant_s.sum()
            (long_waves if period >= 400 else waves).append(ratio)
            over_static.append(story.ours_s.sum() / story.static_s.sum())
            print(f"  period {period:3}, {factor}x for {share:.0%} of it: {story.num_moves:2} moves, {ratio:.3f} of clairvoyant, "
                  f"{over_static[-1]:.3f} of static", file=sys.stderr)  # fmt: skip
    return [
        Row("throughput over clairvoyant, 1.5 to 3x, steady", min(steady), 0.97, at_most=False),
        Row("throughput over clairvoyant, first 100 steps", min(first), 0.90, at_most=False),
        Row("square waves, time over clairvoyant, worst period", max(*waves, *long_waves), 1.4),
        Row("square waves, time over clairvoyant, 400 steps and more", max(long_waves), 1.05),
        Row("time over static, worst", max(over_static), 1.05),
    ]


def predicting() -> list[Row]:
    """How well the slow-down of ops that a rank does not have yet is known."""
    from interference import simulated_errors

    found = simulated_errors()
    covered = "90 % intervals hold the truth"
    return [
        Row("predictor error over scalar's, unseen model", found["classes"] / found["scalar"], 0.7),
        Row(f"{covered}, no less", found["covered"], 0.85, at_most=False),
        Row(f"{covered}, no more", found["covered"], 0.95),
    ]


def watching() -> list[Row]:
    """What noticing costs while nothing happens, over a step of eight devices."""
    from live_moves import watching_s

    plan, ladder = pipeline()
    step_s, (looking_s, predicting_s) = ladder.time_s(plan, Speeds()), watching_s(plan)
    print(f"  predicting a step, while its device is busy: {predicting_s / step_s:.4f} of it", file=sys.stderr)
    return [Row("cost of noticing while nothing happens, over a step", looking_s / step_s, 0.01)]


def pausing() -> list[Row]:
    """How long live moves stop a job of two processes: over one step and 1.5 times what their bytes take, or over one step alone where
    state travels beside it."""
    from live_moves import pauses

    rows = []
    for overlapped, title in ((False, "blocking move over 1 step + 1.5x bytes/link"), (True, "move beside a step over 1 step")):
        found = list(pauses(overlapped=overlapped))
        for pause_s, most_s in found:
            print(f"  a move stopped training for {pause_s:.2f} s, {most_s:.2f} s to reach", file=sys.stderr)
        rows.append(Row(f"pause of a {title}, median", float(np.median([a / b for a, b in found])), 1.0))
    return rows


PARTS: dict[str, Callable[[], list[Row]]] = {
    "noticing": noticing, "predicting": predicting, "replanning": replanning, "deciding": deciding, "watching": watching, "pausing": pausing
}  # fmt: skip


def main() -> int:
    """Prints the figures; 1 if one is not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all unless given")
    given = parser.parse_args().parts or list(PARTS)
    if unknown := set(given) - set(PARTS):
        parser.error(f"unknown part {sorted(unknown)[0]}; there are {', '.join(PARTS)}")
    missed = False
    for row in (row for part in given for row in PARTS[part]()):
        bound = "at most" if row.at_most else "at least"
        print(f"{row.name:64} {row.value:9.4g}   {bound} {row.limit:<6g} {'' if row.reached else 'MISSED'}", flush=True)
        missed = missed or not row.reached
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
