"""Rows of FASOP's results, scored by the repaired rules: equal to the plain twin, infinite where they cannot run."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from oracles.fasop import step_s
from small_tables import fasop_tables

from penstock.errors import InputError
from penstock.systems.fasop.rows import FasopRow
from penstock.systems.fasop.rules import FasopProblem, Option
from penstock.systems.fasop.scoring import row_time_s
from penstock.systems.fasop.tables import FasopTables


def test_rows_are_scored_as_the_twin_does(tmp_path: Path) -> None:
    problem = FasopProblem.of(FasopTables.open(fasop_tables(tmp_path)), "gpt2XL-het")
    nodes = [problem.kinds[kind].instance for kind in ("B", "A", "B", "B")]
    row = FasopRow(mbs=2, tp=1, dp=2, pp=3, node_placement=tuple(nodes), partition=(4, 5, 5))
    stages = [(4, Option((1,), 1, 2), (1, 1)), (5, Option((1,), 1, 2), (1, 1)), (5, Option((0,), 1, 2), (0, 0))]  # B's nodes follow A's
    assert row_time_s(problem, row) == pytest.approx(step_s(problem, 4, stages))
    wide = FasopRow(mbs=1, tp=2, dp=4, pp=2, node_placement=tuple(nodes), partition=(6, 8))
    mixed = [(6, Option((0, 1), 2, 4), (1, 1, 0, 0)), (8, Option((1,), 2, 4), (2, 2, 3, 3))]
    assert row_time_s(problem, wide) == pytest.approx(step_s(problem, 4, mixed))
    for changed in ({"partition": (0, 9, 5)}, {"mbs": 3}, {"pp": 9, "partition": (1,) * 8 + (6,)}, {"partition": (4, 5, 6)}):
        assert row_time_s(problem, replace(row, **changed)) == math.inf
    with pytest.raises(InputError, match="'x9'"):
        row_time_s(problem, replace(row, node_placement=("x9",) * 4))
