"""What watches an executor: several at once, stage times that add up, and a board that outlives its rank."""

from __future__ import annotations

import pytest
import torch

from penstock.programs.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction, Program, ReceiveWait, Step
from penstock.runtime.telemetry.observing import Observers, StageSpans, StageTime, slowest_stages, times_of_ranks
from penstock.runtime.telemetry.parts import RankTimes, StepParts
from penstock.runtime.telemetry.status import Status, StatusBoard

STEPS: tuple[Instruction, ...] = (
    Forward(0, 0, 0, 0), Forward(2, 0, 0, 0), Forward(0, 1, 0, 0), ReceiveWait("activation", 1, 0, 3), ReceiveWait("gradient", 0, 0, 3),
    Backward(2, 0), BackwardInput(0, 0), BackwardWeight(0, 0), Step(),
)  # fmt: skip


def program(iteration: int, training: bool = True) -> Program:
    return Program(0, iteration, 0, 1, 3, 1, 1, (), (), STEPS, training)


def test_times_of_each_stage_add_up() -> None:
    times = StageSpans(first_iteration=1)
    both = Observers(times, StageSpans())
    for one in (program(0), program(1), program(2, training=False)):
        both.begin(one)
        for index in range(len(STEPS)):
            both.at(index)
            both.done(index, 0, (index + 1) * 1_000_000_000)
    assert times.stages[0].forward_s == 1 + 3 and times.stages[0].num_passes == 2
    assert times.stages[0].backward_s == 7 + 8 and times.stages[0].wait_s == 5
    assert (times.stages[2].forward_s, times.stages[2].backward_s, times.stages[2].wait_s) == (2, 6, 4)


def test_the_parts_of_steps_add_up_to_them() -> None:
    times = StageSpans(first_iteration=1)
    for one in (program(0), program(1), program(2), program(3, training=False)):
        times.begin(one)
        for index in range(len(STEPS)):
            times.at(index)
            times.done(index, 0, (index + 1) * 1_000_000_000)
        times.step_done(50.0 if one.training else 99.0, planning_s=1.0, exchanges=[(100.0, 102.0), (103.0, 103.5)])
        times.paused(4.0 if one.iteration < 3 else 0.0)
    assert times.passes_s == 1 + 2 + 3 + 6 + 7 + 8  # of step 2; that of evaluations is not counted
    times.settle()
    found = times.times()
    assert found is not None and (found.issuing_s, found.peak_bytes) == (None, None)
    own = found.parts  # of steps 1 and 2; what the update waited for is no part of it
    assert (own.forward_s, own.backward_s, own.update_s, own.transfers_s) == (1 + 2 + 3, 6 + 7 + 8, 9 - 2.5, 4 + 5 + 2.5)
    assert (own.planning_s, own.pauses_s, own.loading_s) == (1.0, 4.0, 0.0)
    assert own.total_s == 54.0 and own.host_s == 50.0 - 45 - 1
    assert StageSpans().times() is None


def test_on_a_gpu_what_runs_beside_it_counts_as_far_as_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """With moments of a clock of our own in place of events: passes take 2 s on the device, and 3 s each to be issued."""
    device_s = iter(range(0, 10_000, 2))
    monkeypatch.setattr("penstock.runtime.telemetry.observing.moment", lambda device: Settled(next(device_s)))
    times = StageSpans(0, torch.device("cuda"))
    for iteration in range(2):
        times.begin(program(iteration))
        for index in range(len(STEPS)):
            times.at(index)
            times.done(index, 0, 3_000_000_000)
        times.step_done(30.0, planning_s=1.0)
        assert (times.passes_s, times.issued_s) == ((12.0, 18.0) if iteration else (0.0, 0.0))  # of the step before
    times.settle()
    found = times.times(peak_bytes=7.0)
    assert found is not None and (found.issuing_s, found.peak_bytes) == (18.0, 7.0)
    own = found.parts
    assert (own.forward_s, own.backward_s, own.update_s) == (6.0, 6.0, 2.0)
    assert own.host_s == 18 - 12 and own.transfers_s == 30 - 14 - 1 - 6 and own.total_s == 30.0


class Settled(float):
    """A moment that has come."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def test_the_board_says_where_each_rank_is() -> None:
    board = StatusBoard(2)
    ranks = [Status(board.memory, rank) for rank in range(2)]
    assert board.where(0) == board.where(1) == "before its first program"
    ranks[1].begin(program(5))
    expected = {
        1: "at Forward of stage 2, micro-batch 0 (iteration 5, instruction 1 of 9)",
        3: "at ReceiveWait of stage 2, micro-batch 0 (iteration 5, instruction 3 of 9)",
        4: "at ReceiveWait of stage 0, micro-batch 0 (iteration 5, instruction 4 of 9)",
        8: "at Step (iteration 5, instruction 8 of 9)",
    }
    for index, text in expected.items():
        ranks[1].at(index)
        assert board.where(1) == text
    ranks[1].done(7, 0, 1)
    assert board.where(1) == expected[8]
    ranks[1].done(8, 0, 1)
    assert board.where(1) == "after iteration 5" and board.where(0) == "before its first program"
    board.clear()
    assert board.where(1) == "before its first program"


def test_a_stage_is_told_by_the_rank_that_takes_longest_for_it() -> None:
    """By its passes, and not by how long it waits, nor by how many they are."""
    ranks = [{0: StageTime(1.0, 2.0, 9.0, 40)}, {0: StageTime(2.0, 3.0, 0.5, 4), 1: StageTime(1.0, 1.0, 0.25, 7)}]
    told: list[torch.Tensor] = []
    for stages in (*ranks, {}):
        times = StageSpans()
        times.stages = dict(stages)
        found = slowest_stages(2, times, lambda own: told.append(own) or torch.stack(told))  # type: ignore[func-returns-value]
    assert found == {0: ranks[1][0], 1: ranks[1][1]}


def test_what_each_rank_measured_is_known_to_all() -> None:
    parts = StepParts(1.0, 2.0, 3.0, 4.0)
    told: list[torch.Tensor] = []
    for own in (RankTimes(parts, None, 7.0), None, RankTimes(parts, 0.5, None)):
        found = times_of_ranks((3, 5, 8)[: len(told) + 1], own, lambda row: told.append(row) or torch.stack(told))  # type: ignore[func-returns-value]
    assert found == {3: RankTimes(parts, None, 7.0), 8: RankTimes(parts, 0.5, None)}
