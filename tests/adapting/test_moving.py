"""A live move is, to the bit, a stop, a checkpoint and a restart under the new plan; one that fails has not been."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_jobs import train_part
from moving_jobs import Pair, differences, drawn_pairs, train_moving

from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool

NUM_PROCESSES = 4
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
PAIRS = list(drawn_pairs(16, 1, NUM_PROCESSES))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(NUM_PROCESSES, timeout_s=200) as workers:
        yield workers


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_a_move_is_a_stop_and_a_restart(pair: Pair, pool: WorkerPool, tmp_path: Path) -> None:
    (old, before), (new, after) = pair.parts
    first = pool.run(train_part, old, before, ADAMW, None, tmp_path / "saved")
    second = pool.run(train_part, new, after, ADAMW, tmp_path / "saved", tmp_path / "resumed")
    moved = pool.run(train_moving, pair.parts, ADAMW, tmp_path / "moved")
    for rank, (found, said) in enumerate(moved):
        assert found.losses == (*first[rank].losses, *second[rank].losses) and not said
    assert differences(tmp_path / "moved", tmp_path / "resumed") == []
