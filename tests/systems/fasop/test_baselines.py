"""AMP's choice over FASOP's tables: its ranking by average speeds, its layers, and the first that fits."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from small_tables import fasop_tables

from penstock.systems.fasop import baselines
from penstock.systems.fasop.baselines import _amp_rows, _least_slowest, amp_choice_s
from penstock.systems.fasop.rows import FasopRow
from penstock.systems.fasop.rules import FasopProblem
from penstock.systems.fasop.scoring import row_time_s
from penstock.systems.fasop.tables import FasopTables


@pytest.mark.parametrize(("pp", "cuts"), [(1, (3,)), (2, ()), (3, ()), (3, (3,)), (4, (2, 3)), (2, (2, 4))])
def test_the_slowest_stage_takes_least(pp: int, cuts: tuple[int, ...]) -> None:
    layer_s = np.random.default_rng(pp).uniform(1, 3, 6)
    best = math.inf
    for places in itertools.combinations(range(1, 6), pp - 1):
        if pp == 1 or set(cuts) <= set(places):
            best = min(best, max(part.sum() for part in np.split(layer_s, places)))
    found = _least_slowest(layer_s, pp, cuts)
    assert (not found and best == math.inf) or max(part.sum() for part in np.split(layer_s, np.cumsum(found)[:-1])) == pytest.approx(best)


def test_amp_sees_one_speed_and_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FasopProblem.of(FasopTables.open(fasop_tables(tmp_path, 4, ("BB", "AB"))), "gpt2XL-het")
    ranked = sorted(_amp_rows(problem), key=lambda one: one[0])
    assert len(ranked) > 10 and all(row.tp * row.dp * row.pp == 8 and sum(row.partition) == 6 for _, row in ranked)
    pure = {row.mbs: said for said, row in ranked if (row.tp, row.pp) == (1, 1)}
    share = (problem.times_s["a100-40gb", 1, 2] + problem.times_s["a10g", 1, 2]).sum() / 2
    gradients_s = 2 * 7 / 8 * 16 * sum(map(problem.model.parameters, problem.model.layer_types)) / 25e9
    assert pure[2] == pytest.approx(4 * share + gradients_s), "four micro-batches at the mean of both speeds, then one ring between nodes"
    assert amp_choice_s(problem) == pytest.approx(row_time_s(problem, ranked[0][1]))
    first: FasopRow = ranked[0][1]
    monkeypatch.setattr(baselines, "row_time_s", lambda p, row: math.inf if row == first else row_time_s(p, row))
    assert amp_choice_s(problem) == pytest.approx(row_time_s(problem, ranked[1][1])), "what does not fit is passed over"
