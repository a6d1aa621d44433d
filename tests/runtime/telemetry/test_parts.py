"""The largest cause of a difference between predicted and measured steps, from made-up parts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from penstock.cli.compare import cause_sentence
from penstock.runtime.telemetry.parts import RankTimes, StepParts, largest_cause

PREDICTED = StepParts(forward_s=0.4, backward_s=0.8, update_s=0.05, transfers_s=0.06)
SLIGHTLY = {field.name: 0.005 for field in fields(StepParts)}
"""What everything is off by."""


def slower(part: str, by_s: float, start: StepParts = PREDICTED) -> StepParts:
    off = {**SLIGHTLY, part: by_s}
    return StepParts(**{name: getattr(start, name) + time_s for name, time_s in off.items()})


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("forward", "forward passes of stage 0 took 62.0 ms more"),
        ("backward", "backward passes of stage 0 took 62.0 ms more"),
        ("update", "the optimizer's update on rank 3 took 62.0 ms more"),
        ("transfers", "transfers and waiting for other ranks on rank 3 took 62.0 ms more"),
        ("loading", "loading micro-batches on rank 3 took 62.0 ms more"),
        ("host", "the host beside its passes on rank 3 took 62.0 ms more"),
        ("planning", "waiting for plans of micro-batches on rank 3 took 62.0 ms more"),
        ("pauses", "evaluations and checkpoints between steps took 62.0 ms more"),
    ],
)
def test_each_part_can_be_the_cause(part: str, words: str) -> None:
    measured = slower(f"{part}_s", 0.062)
    cause = largest_cause({3: PREDICTED}, {3: RankTimes(measured)})
    assert cause is not None and (cause.part, cause.rank) == (part, 3)
    assert cause.measured_s == pytest.approx(PREDICTED.total_s + 0.062 + 7 * 0.005)
    assert cause_sentence(cause, [0]) == (
        f"A step took 1.41 s, 1.31 s were predicted: {words} than predicted, the largest cause of the 97.0 ms between them."
    )


def test_a_step_that_is_faster_has_a_cause_too() -> None:
    cause = largest_cause({0: PREDICTED}, {0: RankTimes(replace(slower("backward_s", -0.3), host_s=0.2))})
    assert cause is not None and (cause.part, cause.difference_s) == ("backward", pytest.approx(-0.3))
    assert "backward passes of stages 0 and 2 took 300 ms less than predicted" in cause_sentence(cause, [0, 2])


def test_hosts_are_not_what_made_passes_faster() -> None:
    """Though they issue them no faster than they run; passes that take longer are slow by them."""
    for by_s, is_host in ((-0.3, False), (0.3, True)):
        own = RankTimes(slower("backward_s", by_s), issuing_s=2.0)
        cause = largest_cause({0: PREDICTED}, {0: own})
        assert cause is not None and (cause.part, cause.is_host) == ("backward", is_host)


def test_the_direction_is_that_of_the_rank_whose_step_took_longest() -> None:
    """Another one that was done early, and has nothing to wait for, does not make the step a fast one."""
    early = replace(PREDICTED, backward_s=0.3, transfers_s=0.0)
    cause = largest_cause({0: PREDICTED, 1: PREDICTED}, {0: RankTimes(early), 1: RankTimes(replace(PREDICTED, forward_s=0.6))})
    assert cause is not None and (cause.part, cause.rank, cause.difference_s) == ("forward", 1, pytest.approx(0.2))


def test_who_is_waited_for_is_the_cause_and_not_who_waits() -> None:
    """Rank 1 shows the time that rank 0 takes for its samples as waiting, and more of it than anything is off on rank 0."""
    slow = replace(PREDICTED, loading_s=0.3)
    waits = replace(PREDICTED, transfers_s=PREDICTED.transfers_s + 0.31, forward_s=PREDICTED.forward_s - 0.01)
    for measured in ({0: RankTimes(slow), 1: RankTimes(waits)}, {1: RankTimes(waits), 0: RankTimes(slow)}):
        cause = largest_cause({0: PREDICTED, 1: PREDICTED}, measured)
        assert cause is not None and (cause.part, cause.rank) == ("loading", 0)
    links = replace(PREDICTED, transfers_s=0.5)
    cause = largest_cause({0: PREDICTED, 1: PREDICTED}, {0: RankTimes(links), 1: RankTimes(links)})  # all wait: messages are slow
    assert cause is not None and cause.part == "transfers"


def test_passes_that_the_host_issues_no_faster_are_the_hosts() -> None:
    measured = slower("forward_s", 0.062)
    passes_s = measured.forward_s + measured.backward_s
    for share, is_host in ((0.95, True), (0.5, False)):
        cause = largest_cause({0: PREDICTED}, {0: RankTimes(measured, issuing_s=share * passes_s)})
        assert cause is not None and cause.part == "forward" and cause.is_host == is_host
    host = largest_cause({0: PREDICTED}, {0: RankTimes(measured, issuing_s=passes_s)})
    assert host is not None
    told = "the host, which issues work no faster, made forward passes of stage 1 take 62.0 ms more than predicted"
    assert told in cause_sentence(host, [1])


def test_nothing_measured_and_nothing_different() -> None:
    assert largest_cause({0: PREDICTED}, {}) is None
    assert largest_cause({0: PREDICTED}, {0: RankTimes(PREDICTED)}) is None
