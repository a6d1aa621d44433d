"""The detector tells the right rank, soon and seldom in vain: on figures made by hand, and on the noise of `benchmarks/adapting.py`."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from penstock.adapting.detecting import Cause, Change, Detector, StepFigures

BENCHMARK = load_benchmark("adapting")


def changes(factors: np.ndarray, noise: float = 0.02, seed: int = 0, cause: Cause = Cause.COMPUTE) -> tuple[Detector, list[Change]]:
    """What is told of [steps, ranks] ratios with a little noise; work differs from step to step and rank to rank."""
    generator = np.random.default_rng(seed)
    detector = Detector({cause: [(rank,) for rank in range(factors.shape[1])]})
    found: list[Change] = []
    for step, row in enumerate(factors):
        predicted = generator.uniform(0.5, 2.0, len(row))
        found += detector.add(step, {cause: StepFigures(predicted * row * np.exp(generator.normal(0, noise, len(row))), predicted)})
    return detector, found


def test_a_slow_rank_is_named_and_so_is_its_recovery() -> None:
    factors = np.ones((120, 4))
    factors[40:80, 2] = 1.5
    detector, found = changes(factors)
    slow, well = found
    assert (slow.cause, slow.subject, well.subject) == (Cause.COMPUTE, (2,), (2,))
    assert slow.factor == pytest.approx(1.5, rel=0.05) and slow.before == pytest.approx(1, abs=0.03) and slow.since in range(38, 42)
    assert well.factor == pytest.approx(1.0, abs=0.03) and well.before == pytest.approx(1.5, rel=0.05) and well.since in range(78, 82)
    assert detector.factors(Cause.COMPUTE) == {(rank,): 1.0 for rank in range(4)}


def test_the_factor_gets_better_after_it_was_told() -> None:
    factors = np.ones((90, 4))
    factors[40:, 1] = 2.0
    detector, found = changes(factors, noise=0.05)
    assert [change.subject for change in found] == [(1,)]
    assert detector.factors(Cause.COMPUTE)[1,] == pytest.approx(2.0, rel=0.05)


def test_a_factor_that_changes_from_step_to_step_is_told_a_few_times() -> None:
    """Samples that come late in every other step: the median since then is now the one, now the other."""
    factors = np.ones((80, 2))
    factors[14:, 0] = np.tile([1.2, 2.2], 33)
    _, found = changes(factors, noise=0.0, cause=Cause.DATA)
    assert {change.subject for change in found} == {(0,)} and found[0].noticed == 18 and len(found) <= 4


def test_slow_from_the_first_step_is_told_after_a_few() -> None:
    factors = np.ones((30, 4))
    factors[:, 3] = 1.3
    _, found = changes(factors)
    assert [(change.subject, change.since, change.noticed) for change in found] == [((3,), 0, 4)]
    assert found[0].factor == pytest.approx(1.3, rel=0.03) and found[0].before == 1.0


def test_a_little_slow_from_the_first_step_is_told_when_it_is_sure() -> None:
    """After ten steps, and it never was faster, however slow it was taken to be usually after five."""
    factors = np.ones((12, 4))
    factors[:, 3] = 1.13
    [slow] = changes(factors, noise=0.0)[1]
    assert (slow.subject, slow.since, slow.noticed, slow.before) == ((3,), 0, 9, 1.0) and slow.factor == pytest.approx(1.13)


def test_a_change_without_noise_is_told_with_the_step_in_which_it_began() -> None:
    factors = np.ones((120, 4))
    factors[40:80, 2] = 1.5
    assert [(change.since, change.factor) for change in changes(factors, noise=0.0)[1]] == [
        (40, pytest.approx(1.5)),
        (80, pytest.approx(1.0)),
    ]


def test_a_rank_that_has_become_faster_is_told_once_and_stays_so() -> None:
    factors = np.ones((120, 4))
    factors[40:, 2] = 0.6
    detector, found = changes(factors)
    assert [(change.subject, change.factor) for change in found] == [((2,), pytest.approx(0.6, rel=0.05))]
    assert detector.factors(Cause.COMPUTE)[2,] == pytest.approx(0.6, rel=0.05)


def test_the_clearest_change_is_told_first() -> None:
    detector = Detector({Cause.COMPUTE: [(0,)], Cause.DATA: [(1,)]})
    told = [Change(cause, (rank,), 2.0, 1.0, 3, 9) for rank, cause in enumerate((Cause.COMPUTE, Cause.DATA))]
    for series, change, beyond in zip(detector._series.values(), told, (14.0, 15.0), strict=True):
        series.add = lambda *_, found=(beyond, change): [found]  # type: ignore[method-assign,assignment]
    assert detector.add(9, {cause: StepFigures([1.0], [1.0]) for cause in detector._series}) == told[::-1]


def test_of_two_ranks_the_slower_is_named() -> None:
    factors = np.ones((60, 2))
    factors[30:, 0] = 1.5
    assert [change.subject for change in changes(factors)[1]] == [(0,)]


def test_all_slow_alike_means_that_the_costs_are_off() -> None:
    _, found = changes(np.full((80, 4), 1.4))
    assert [(change.cause, change.subject) for change in found] == [(Cause.COSTS, ())]
    assert found[0].factor == pytest.approx(1.4, rel=0.03)
    assert (found[0].since, found[0].noticed) == (0, 49)


def test_pauses_of_all_ranks_say_nothing_of_the_costs() -> None:
    """Every sixth step takes all of them four times as long: the mean is far off, the usual step is not."""
    factors = np.ones((120, 4))
    factors[::6] = 4.0
    assert changes(factors)[1] == []


def test_a_job_of_one_rank_tells_that_its_costs_are_off_and_blames_nobody() -> None:
    factors = np.ones((120, 1))
    factors[30:] = 1.5
    assert {change.cause for change in changes(factors)[1]} == {Cause.COSTS}


def test_of_one_link_it_is_known_by_itself_how_slow_it_is() -> None:
    factors = np.ones((60, 1))
    factors[30:] = 2.0
    [slow] = changes(factors, cause=Cause.LINK)[1]
    assert (slow.cause, slow.subject) == (Cause.LINK, (0,)) and slow.factor == pytest.approx(2.0, rel=0.05)


def test_work_that_took_no_time_says_nothing() -> None:
    """A clock that did not tick: neither a rank that is infinitely fast, nor an error."""
    ratios = StepFigures([0.0, 1.0, 2.0], [1.0, 1.0, 0.0]).ratios()
    assert np.isnan(ratios).tolist() == [True, False, True] and ratios[1] == 0.0


def test_ranks_without_any_noise_are_taken_to_have_that_of_all() -> None:
    """On timed devices, and where one rank is calm: its every tremble would be a change otherwise."""
    generator = np.random.default_rng(0)
    calm, one = np.ones((100, 4)), np.ones((100, 4))
    one[:, 3] = np.exp(generator.normal(0, 0.05, 100))
    scales = [changes(factors, noise=0.0)[0]._series[Cause.COMPUTE]._scale for factors in (calm, one)]
    assert (scales[0] == 0.01).all() and (scales[1][:3] >= 0.01).all() and scales[1][3] == pytest.approx(0.05, rel=0.3)


def test_errors_of_the_costs_that_differ_a_little_between_ranks_are_usual() -> None:
    factors = np.ones((200, 4)) * np.array([1.0, 1.08, 0.95, 1.04])
    factors[120:, 1] *= 1.5
    _, found = changes(factors)
    assert [change.subject for change in found] == [(1,)] and found[0].factor == pytest.approx(1.5, rel=0.05)


def test_hiccups_are_not_told() -> None:
    factors = np.ones((300, 4))
    factors[::17, 0] = 4.0
    assert changes(factors)[1] == []


def test_changes_too_small_to_matter_are_not_told_until_they_add_up() -> None:
    """One per cent more every twenty steps: told when it is ten."""
    factors = np.ones((400, 4))
    factors[:, 0] = 1.01 ** (np.arange(400) // 20)
    _, found = changes(factors, noise=0.005)
    assert {change.subject for change in found} == {(0,)} and len(found) in (1, 2)
    assert 1.1 <= found[0].factor < 1.15


def test_a_rank_without_work_is_left_out() -> None:
    """Rank 1 has nothing to do for a while: neither it nor the others seem to change."""
    detector = Detector({Cause.COMPUTE: [(rank,) for rank in range(3)]})
    generator = np.random.default_rng(1)
    found: list[Change] = []
    for step in range(100):
        predicted = np.array([1.0, 0.0 if 30 <= step < 60 else 2.0, 1.0])
        factor = np.array([1.0, 1.0, 1.5 if step >= 70 else 1.0]) * np.exp(generator.normal(0, 0.02, 3))
        found += detector.add(step, {Cause.COMPUTE: StepFigures(predicted * factor, predicted)})
    assert [change.subject for change in found] == [(2,)]


def test_a_cause_of_one_subject_is_measured_by_itself() -> None:
    factors = np.ones((60, 1))
    factors[30:] = 1.5
    found = changes(factors, cause=Cause.PLANNING)[1]
    assert [(change.cause, change.factor > 1.4) for change in found] == [(Cause.PLANNING, True)]


def test_every_rank_reaches_the_same_verdict() -> None:
    factors = np.random.default_rng(3).uniform(0.7, 1.6, (150, 5)).repeat(2, axis=0)
    assert changes(factors)[1] == changes(factors)[1]


@pytest.mark.parametrize("noise", ["RAGGED", "SORTED"])
def test_noise_of_real_runs(noise: str) -> None:
    """A short form of the benchmark: the figures to reach, with the margin that few runs need."""
    own = getattr(BENCHMARK, noise)
    assert np.quantile(BENCHMARK.latencies(1.5, own, 24), 0.95) <= 6
    assert np.quantile(BENCHMARK.latencies(1.2, own, 24), 0.95) <= 12
    assert BENCHMARK.false_alarms(own, 1000) == 0
    assert BENCHMARK.named(1.3, own, 12) == 1.0
