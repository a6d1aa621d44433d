"""Predicted beside measured: passes of one micro-batch, the fullest rank of each stage, and differences with their sign."""

from __future__ import annotations

import pytest

from penstock.cli.compare import _times, comparison
from penstock.plans.build import uniform_plan
from penstock.runtime.request import TrainResult
from penstock.runtime.telemetry.observing import StageTime
from penstock.runtime.telemetry.parts import RankTimes, StepParts
from penstock.runtime.telemetry.predicting import PredictedSteps

PLAN = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=1, pp=2, replicas=2)
"""Ranks 0 and 1 have the first stage, 2 and 3 the second."""


def test_numbers_by_hand() -> None:
    parts = {rank: StepParts(forward_s=1.0, backward_s=2.0) for rank in range(4)}
    predicted = PredictedSteps(3.0, (0.1, 0.2), (0.3, 0.4), "roofline", parts, {0: 100.0, 1: 130.0, 2: 50.0, 3: 40.0})
    ranks = {
        rank: RankTimes(StepParts(forward_s=1.5 if rank == 2 else 1.0, backward_s=2.0, transfers_s=0.0 if rank == 2 else 0.5), None, held)
        for rank, held in enumerate((110.0, 90.0, 60.0, 70.0))
    }
    stages = {0: StageTime(0.8, 2.4, num_passes=8), 1: StageTime(1.2, 3.2, num_passes=4)}
    found = comparison(PLAN, TrainResult(0, 4, (), (), 3.5, 0.0, stages, None, ranks=ranks), predicted)
    assert found["stages"] == [
        {"stage": 0, "forward_predicted_s": 0.1, "forward_measured_s": pytest.approx(0.1), "backward_predicted_s": 0.3,
         "backward_measured_s": pytest.approx(0.3), "memory_predicted_bytes": 130.0, "memory_measured_bytes": 110.0},
        {"stage": 1, "forward_predicted_s": 0.2, "forward_measured_s": pytest.approx(0.3), "backward_predicted_s": 0.4,
         "backward_measured_s": pytest.approx(0.8), "memory_predicted_bytes": 50.0, "memory_measured_bytes": 70.0},
    ]  # fmt: skip
    assert [(own["rank"], own["stages"], own["measured_bytes"]) for own in found["ranks"]] == [
        (0, [0], 110),
        (1, [0], 90),
        (2, [1], 60),
        (3, [1], 70),
    ]
    cause = found["cause"]
    assert (cause["part"], cause["rank"], cause["difference_s"]) == ("forward", 2, 0.5)
    assert cause["sentence"].startswith("A step took 3.50 s, 3.00 s were predicted: forward passes of stage 1 took 500 ms more")


def test_what_took_longer_has_a_difference_above_zero() -> None:
    assert _times(1.0, 1.5) == ["1.00 s", "1.50 s", "500 ms"] and _times(1.5, 1.0) == ["1.50 s", "1.00 s", "-500 ms"]
