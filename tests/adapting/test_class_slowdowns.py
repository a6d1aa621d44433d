"""Slow-downs of classes of ops are fitted to passes that mix them, and their intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from penstock.costs.speeds import OpClass

fit_slowdowns = load_benchmark("class_slowdowns").fit_slowdowns
CLASSES = tuple(OpClass)


def passes(generator: np.random.Generator, count: int, fixed: bool = False) -> dict[OpClass, np.ndarray]:
    """Predicted seconds of each class in passes of ragged samples: attention grows with the square of the length; backward takes twice."""
    lengths = np.full(count, 1.0) if fixed else generator.uniform(0.2, 2.0, count)
    backward = np.where(np.arange(count) % 2, 2.0, 1.0)
    memory = np.where(np.arange(count) % 2, 1.4, 1.0)  # norms and activations take less of a backward pass
    attention = 0.25 * lengths**2 * backward
    return {OpClass.MATMUL: 0.6 * lengths * backward, OpClass.ATTENTION: attention, OpClass.MEMORY: 0.3 * lengths * memory}


def measured(generator: np.random.Generator, predicted: dict[OpClass, np.ndarray], factors: np.ndarray, noise: float = 0.05) -> np.ndarray:
    """With noise, and hiccups of 1.5 to 4 times in one pass of fifty."""
    own = sum(predicted[one] * factor for one, factor in zip(CLASSES, factors, strict=True))
    hiccups = np.where(generator.random(len(own)) < 0.02, generator.uniform(1.5, 4, len(own)), 1.0)
    return np.asarray(own * np.exp(generator.normal(0, noise, len(own))) * hiccups)


def test_classes_are_told_apart() -> None:
    generator = np.random.default_rng(0)
    predicted = passes(generator, 400)
    found = fit_slowdowns(predicted, measured(generator, predicted, np.array([1.2, 1.5, 2.5]), noise=0.02))
    for one, factor in zip(CLASSES, (1.2, 1.5, 2.5), strict=True):
        assert found.of(one).factor == pytest.approx(factor, rel=0.08)


def test_an_exact_fit_is_exact() -> None:
    predicted = passes(np.random.default_rng(1), 60)
    own = sum(predicted[one] * factor for one, factor in zip(CLASSES, (1.0, 3.0, 2.0), strict=True))
    found = fit_slowdowns(predicted, np.asarray(own))
    assert [found.of(one).factor for one in CLASSES] == pytest.approx([1.0, 3.0, 2.0], rel=1e-3)


def test_nothing_runs_in_less_than_no_time() -> None:
    generator = np.random.default_rng(2)
    predicted = passes(generator, 30)
    found = fit_slowdowns(predicted, measured(generator, predicted, np.array([1.0, 0.0, 0.0]), noise=0.3))
    assert (found.factors >= 0).all() and all(found.of(one).low >= 0 for one in CLASSES)


def test_passes_that_are_all_alike_give_one_slow_down_and_a_wide_interval() -> None:
    """One kind of pass cannot tell classes apart: the stage itself is predicted well, a stage of one class hardly."""
    alike = {one: np.full(50, seconds) for one, seconds in zip(CLASSES, (0.6, 0.2, 0.2), strict=True)}
    found = fit_slowdowns(alike, np.full(50, 1.8) * np.exp(np.random.default_rng(3).normal(0, 0.02, 50)))
    assert [found.of(one).factor for one in CLASSES] == pytest.approx([1.8] * 3, rel=0.02)
    stage = found.of_stage({one: float(alike[one][0]) for one in CLASSES}, spread=0.0)
    assert stage.high - stage.low < 0.1 < 0.5 < found.of(OpClass.MEMORY).high - found.of(OpClass.MEMORY).low


def test_a_class_that_the_rank_does_not_run_is_taken_as_slow_as_the_rest() -> None:
    predicted = {OpClass.MATMUL: np.ones(20), OpClass.ATTENTION: np.zeros(20), OpClass.MEMORY: np.zeros(20)}
    found = fit_slowdowns(predicted, np.full(20, 1.5))
    assert found.of(OpClass.ATTENTION).factor == pytest.approx(1.5)


def coverage(fixed: bool, runs: int = 300, count: int = 64) -> tuple[float, float]:
    """How often the intervals of classes, and of a stage with another mix of them, hold the truth."""
    inside, stages = [], []
    for seed in range(runs):
        generator = np.random.default_rng(seed)
        factors = np.maximum(0.3, generator.uniform(1.1, 3.0) * (1 + generator.normal(0, 0.3, len(CLASSES))))
        predicted = passes(generator, count, fixed)
        found = fit_slowdowns(predicted, measured(generator, predicted, factors))
        inside += [found.of(one).low <= factor <= found.of(one).high for one, factor in zip(CLASSES, factors, strict=True)]
        mix = generator.dirichlet(np.ones(len(CLASSES)))
        stage = found.of_stage(dict(zip(CLASSES, mix.tolist(), strict=True)))
        truth = float(mix @ factors) * np.exp(generator.normal(0, 0.03))
        stages.append(stage.low <= truth <= stage.high)
    return float(np.mean(inside)), float(np.mean(stages))


@pytest.mark.parametrize("fixed", [False, True])
def test_intervals_hold_the_truth_in_nine_cases_of_ten(fixed: bool) -> None:
    classes, stages = coverage(fixed)
    assert 0.85 <= classes <= 0.95 and 0.85 <= stages <= 0.95, (classes, stages)


def test_passes_without_predicted_time_are_left_out() -> None:
    predicted = {OpClass.MATMUL: np.array([1.0, 0.0, 1.0]), OpClass.MEMORY: np.array([0.5, 0.0, 0.5])}
    assert fit_slowdowns(predicted, np.array([3.0, 1.0, 3.0])).of(OpClass.MATMUL).factor == pytest.approx(2.0)
