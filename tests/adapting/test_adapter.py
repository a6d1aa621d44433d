"""Figures in, decisions out: the same on every rank, by ranks, links and classes of ops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from slow_pipelines import FOUR, ladder_of

from penstock.adapting.adapter import Adapter, measured_speeds
from penstock.adapting.detecting import Cause, Change, Detector, StepFigures
from penstock.adapting.ladder import Rung
from penstock.costs.speeds import OpClass, Speeds

SUBJECTS = {Cause.COMPUTE: [(rank,) for rank in range(4)], Cause.LINK: [(rank, rank + 1) for rank in range(3)], Cause.DATA: [(0,)]}


def run(adapter: Adapter, factors: dict[Cause, np.ndarray], seed: int = 0) -> list[tuple[int, Rung]]:
    """(step, kind) of every move; decisions are carried out at once."""
    generator = np.random.default_rng(seed)
    found = []
    for step in range(len(next(iter(factors.values())))):
        figures = {
            cause: StepFigures(own[step] * np.exp(generator.normal(0, 0.02, own.shape[1])), np.ones(own.shape[1]))
            for cause, own in factors.items()
        }
        decision = adapter.add(step, figures).decision
        if decision.moves:
            adapter.adopted(decision)
            found.append((step, decision.chosen.rung))
    return found


def disturbed(cause: Cause, index: int, factor: float) -> dict[Cause, np.ndarray]:
    """Nothing for forty steps, then one subject is slower for eighty."""
    factors = {one: np.ones((120, len(subjects))) for one, subjects in SUBJECTS.items()}
    factors[cause][40:, index] = factor
    return factors


def test_a_slow_rank_brings_a_move_and_every_rank_decides_alike() -> None:
    adapters = [Adapter(ladder_of("4xa100-80gb"), FOUR, SUBJECTS) for _ in range(2)]
    found = [run(adapter, disturbed(Cause.COMPUTE, 1, 2.5)) for adapter in adapters]
    assert found[0] == found[1] and adapters[0].decider.plan == adapters[1].decider.plan != FOUR
    assert found[0][0][0] in range(44, 60)


@pytest.mark.parametrize(("cause", "index"), [(Cause.DATA, 0), (Cause.LINK, 1)])
def test_what_no_plan_would_help_brings_no_move(cause: Cause, index: int) -> None:
    """Samples that come late; a link that is half as fast and still faster than anybody needs."""
    ladder = ladder_of("4xa100-80gb")
    best = min((own for own in ladder.options(FOUR, Speeds()) if not own.refused), key=lambda own: own.time_s).plan
    adapter = Adapter(ladder, best, SUBJECTS)
    assert run(adapter, disturbed(cause, index, 2.0)) == []
    assert set(adapter.decider.speeds.links) == ({(1, 2)} if cause is Cause.LINK else set())


def test_speeds_that_are_known_better_are_decided_by() -> None:
    """Though no change is told any more; of several changes at once the phase begins with the first."""

    class Told(Detector):
        factor = 1.5

        def factors(self, cause: Cause) -> dict[tuple[int, ...], float]:
            return {(rank,): self.factor if rank == 1 else 1.0 for rank in range(4)} if cause is Cause.COMPUTE else {}

    told = Told(SUBJECTS)
    adapter = Adapter(ladder_of("4xa100-80gb"), FOUR, SUBJECTS, told)
    adapter.decide(20, [Change(Cause.COMPUTE, (1,), 1.5, 1.0, since, 20) for since in (17, 12, 15)])
    assert adapter.decider._since == 12 and adapter.decider.speeds.factor(1, OpClass.MATMUL) == pytest.approx(1.5, rel=0.03)
    told.factor = 2.2
    adapter.decide(21, [])
    assert adapter.decider._since == 12 and adapter.decider.speeds.factor(1, OpClass.MATMUL) == pytest.approx(2.2, rel=0.03)


def test_speeds_follow_ranks_and_links() -> None:
    speeds = measured_speeds({(0,): 1.0, (1,): 1.6}, {(0, 1): 1.01, (2, 1): 4.0})
    assert set(speeds.ranks) == {1} and set(speeds.links) == {(1, 2)}
    assert set(speeds.ranks[1].values()) == {speeds.factor(1)} and speeds.factor(1) == pytest.approx(1.6, rel=0.026)
    assert math.log(speeds.link_factor(2, 1)) == pytest.approx(math.log(4.0), abs=0.025)
