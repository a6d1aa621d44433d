"""Slow-downs of classes of ops follow what a profile measured beside loads."""

from __future__ import annotations

import pytest

from penstock.adapting.adapter import measured_speeds
from penstock.adapting.slowdowns import usual_slowdowns
from penstock.costs.profile import BesidePoint
from penstock.costs.speeds import OpClass


def test_what_was_measured_beside_loads_tells_classes_apart() -> None:
    points = [BesidePoint("gpt", "matmul", 1.0, 2.0, 3.0), BesidePoint("gpt", "memory", 1.0, 2.0, 5.0),
              BesidePoint("gpt", "matmul", 2.0, 2.0, 4.0), BesidePoint("gpt", "memory", 2.0, 2.0, 8.0)]  # fmt: skip
    first = usual_slowdowns(points, 2.0)  # as all together beside the first load
    assert first == pytest.approx({OpClass.MATMUL: 1.5, OpClass.MEMORY: 2.5, OpClass.ATTENTION: 2.0})
    assert usual_slowdowns(points, 6.0) == pytest.approx({OpClass.MATMUL: 4.0, OpClass.MEMORY: 8.0, OpClass.ATTENTION: 6.0})
    assert usual_slowdowns(points, 1.0) == pytest.approx(dict.fromkeys(OpClass, 1.0))
    between = usual_slowdowns(points, 1.5)
    assert 1.0 < between[OpClass.MATMUL] < 1.5 < between[OpClass.MEMORY] < 2.5


def test_a_heavier_load_that_slowed_less_is_taken_for_what_it_did() -> None:
    points = [BesidePoint("gpt", "matmul", 1.0, 1.0, 3.0), BesidePoint("gpt", "memory", 1.0, 1.0, 5.0),
              BesidePoint("gpt", "matmul", 2.0, 1.0, 2.0), BesidePoint("gpt", "memory", 2.0, 1.0, 2.0)]  # fmt: skip
    assert usual_slowdowns(points, 2.0) == pytest.approx(dict.fromkeys(OpClass, 2.0))
    assert usual_slowdowns(points, 4.0)[OpClass.MEMORY] == pytest.approx(5.0)


def test_speeds_of_a_slow_rank_follow_what_was_measured_beside_loads() -> None:
    points = [BesidePoint("gpt", "matmul", 1.0, 2.0, 3.0), BesidePoint("gpt", "memory", 1.0, 2.0, 5.0)]
    own = measured_speeds({(3,): 2.0}, {}, points).ranks[3]
    assert own[OpClass.MATMUL] == pytest.approx(1.5, rel=0.026) and own[OpClass.MEMORY] == pytest.approx(2.5, rel=0.026)
    assert len(set(measured_speeds({(3,): 2.0}, {}).ranks[3].values())) == 1
