"""Between measured points: exact where it must be, sane beyond the ends, and never negative or undefined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.interpolation import MeasuredCurves, fit_optimizer
from penstock.costs.profile import COLUMNS, Series, SeriesKey, coordinates
from penstock.models import Shape, resolve_model

ATTENTION = next(op for op in resolve_model("gpt-1.3b").distinct_ops if op.kind == "attention")


def series(points: Sequence[tuple[float, float, float]], spreads: Sequence[float] = (), name: str = "forward_s") -> Series:
    """A series of (size, length, value) points; the other columns are one."""
    made = Series(SeriesKey("op", "bf16"), "linear")
    for index, (size, length, value) in enumerate(points):
        values = {**dict.fromkeys(COLUMNS, 1.0), "size": size, "length": length, name: value}
        made.add(**{**values, "spread": spreads[index] if spreads else 0.0})
    return made


def at(curves: MeasuredCurves, size: float, length: float = 0.0, name: str = "forward_s", log: bool = True) -> float:
    return float(curves(name, np.array([size]), np.array([length]), log)[0])


GRID = (256, 512, 1024, 4096, 65536)
TIMES = st.lists(st.floats(1e-7, 10.0), min_size=len(GRID), max_size=len(GRID))


@settings(deadline=None)
@given(TIMES)
def test_exact_at_measured_points(times: list[float]) -> None:
    for log in (True, False):
        curves = MeasuredCurves(series([(size, 0, time) for size, time in zip(GRID, times, strict=True)]))
        assert [at(curves, size, log=log) for size in GRID] == pytest.approx(times)


@settings(deadline=None)
@given(st.floats(1, 1e7), st.floats(1e-7, 1e-2), st.sampled_from([0.0, 0.3, 1.0]))
def test_exact_for_constant_and_proportional_times_even_beyond_the_ends(size: float, scale: float, power: float) -> None:
    curves = MeasuredCurves(series([(known, 0, scale * known**power) for known in GRID]))
    assert at(curves, size) == pytest.approx(scale * size**power)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=40), st.floats(1e-9, 1e-6), st.floats(1e-12, 1e-9))
def test_packed_mixed_lengths_cost_what_tokens_and_squares_say(lengths: list[int], per_token: float, per_square: float) -> None:
    pairs = [(size, length) for size in GRID for length in (64, 96, 256, 1024) if length <= size]
    grid = [(size, length, per_token * size + per_square * size * length) for size, length in pairs]
    shape = Shape.packed(lengths)
    size, length = coordinates(ATTENTION, shape)
    expected = per_token * shape.tokens + per_square * shape.squares
    found = at(MeasuredCurves(series(grid)), size, length)
    if length >= 64:
        assert found == pytest.approx(expected)
    else:  # Shorter than any that was measured: as slow as the shortest.
        assert found == pytest.approx(shape.tokens * (per_token + per_square * 64))


@settings(deadline=None)
@given(TIMES, st.lists(st.floats(1, 1e6), min_size=2, max_size=20))
def test_rising_times_stay_rising(times: list[float], sizes: list[float]) -> None:
    curves = MeasuredCurves(series([(size, 0, time) for size, time in zip(GRID, sorted(times), strict=True)]))
    found = curves("forward_s", np.array(sorted(sizes)), np.zeros(len(sizes)), True)
    assert (np.diff(found) >= -1e-12 * found[1:]).all()


POINTS = st.lists(
    st.tuples(st.sampled_from([2.0, 64.0, 100.0, 4096.0]), st.sampled_from([0.0, 64.0, 96.0, 8192.0]), st.floats(0, 10.0)),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(deadline=None)
@given(POINTS, st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e5)), min_size=1, max_size=8), st.booleans())
def test_never_negative_nor_undefined(points: list[tuple[float, float, float]], asked: list[tuple[float, float]], log: bool) -> None:
    name = "forward_s" if log else "growth_bytes"
    where = np.array(asked)
    found = MeasuredCurves(series(points, name=name))(name, where[:, 0], where[:, 1], log)
    assert np.isfinite(found).all() and (found >= 0).all()
    assert (found[where[:, 0] == 0] == 0).all()


@settings(deadline=None)
@given(TIMES, st.floats(1.0, 100.0))
def test_beyond_the_ends_time_neither_falls_nor_grows_faster_than_the_work(times: list[float], factor: float) -> None:
    curves = MeasuredCurves(series([(size, 0, time) for size, time in zip(GRID, times, strict=True)]))
    above, below = at(curves, GRID[-1] * factor), at(curves, GRID[0] / factor)
    assert times[-1] * 0.999 <= above <= times[-1] * factor * 1.001
    assert times[0] / factor * 0.999 <= below <= times[0] * 1.001


def test_a_single_point_scales_up_with_the_work_and_stays_below() -> None:
    curves = MeasuredCurves(series([(1024, 0, 2e-3)]))
    assert [at(curves, size) for size in (1, 1024, 4096)] == pytest.approx([2e-3, 2e-3, 8e-3])
    curves = MeasuredCurves(series([(1024, 0, 2048.0)], name="growth_bytes"))
    assert at(curves, 512, name="growth_bytes", log=False) == pytest.approx(1024)


def test_the_rate_is_linear_in_the_length_and_goes_on_beyond_the_longest() -> None:
    points = [(size, length, size * (1e-6 + 1e-9 * length)) for size in GRID for length in (64, 128, 512) if length <= size]
    curves = MeasuredCurves(series(points))
    for length in (64, 100, 128, 300, 512, 5000):
        assert at(curves, 8192, length) == pytest.approx(8192 * (1e-6 + 1e-9 * length))


@settings(deadline=None)
@given(st.lists(st.floats(1e-9, 1e-6), min_size=3, max_size=3), st.sampled_from([True, False]))
def test_beyond_the_longest_length_work_never_takes_less(rates: list[float], log: bool) -> None:
    """Whatever was measured, such as other kernels at the longest length."""
    name = "forward_s" if log else "growth_bytes"
    curves = MeasuredCurves(series([(4096, length, 4096 * rate) for length, rate in zip((64, 512, 1024), rates, strict=True)], name=name))
    found = [at(curves, 4096, length, name, log) for length in (1024, 1500, 2048, 4096)]
    assert found[0] == pytest.approx(4096 * rates[2])
    assert all(longer >= shorter * (1 - 1e-12) for shorter, longer in pairwise(found))


def test_a_last_length_of_faster_kernels_does_not_hide_the_squares() -> None:
    points = [(65536, length, 65536 * rate) for length, rate in ((64, 1e-8), (512, 5e-8), (1024, 4e-8))]
    slope = (4e-8 - 1e-8) / (1024 - 64)
    assert at(MeasuredCurves(series(points)), 65536, 4096) == pytest.approx(65536 * (4e-8 + slope * (4096 - 1024)))


@pytest.mark.parametrize(
    ("spreads", "expected"),
    [((0.0, 0.0, 0.0), 2.0), ((0.2, 0.01, 0.01), 2.5), ((0.5, 0.01, 0.4), 2.0), ((0.3, 0.3, 0.3), 2.0), ((0.0, 0.2, 0.3), 1.0)],
)
def test_of_repeated_measurements_the_steady_ones_count(spreads: tuple[float, ...], expected: float) -> None:
    assert at(MeasuredCurves(series([(64, 0, 1.0), (64, 0, 2.0), (64, 0, 3.0)], spreads)), 64) == pytest.approx(expected)


def test_the_order_of_points_does_not_matter() -> None:
    points = [(size, length, size * 1e-6 + length * 1e-7) for size in GRID for length in (64.0, 128.0)]
    ask: Callable[[MeasuredCurves], float] = lambda curves: at(curves, 3000, 90)  # noqa: E731
    assert ask(MeasuredCurves(series(points))) == ask(MeasuredCurves(series(points[::-1])))


@settings(deadline=None)
@given(st.floats(1e-13, 1e-9), st.floats(0, 1e-4))
def test_optimizer_rates_are_found_again(per_weight: float, per_tensor: float) -> None:
    weights, tensors = np.array([1e6, 1e8, 3e8, 5e8]), np.array([10.0, 2.0, 200.0, 40.0])
    found = fit_optimizer(weights, tensors, per_weight * weights + per_tensor * tensors)
    assert found == (pytest.approx(per_weight, rel=1e-6), pytest.approx(per_tensor, rel=1e-6, abs=1e-12))


def test_optimizer_rates_are_off_by_the_same_share_everywhere() -> None:
    """Small steps that take 1 ns a weight and large ones that take 2: 1.2 has the least relative error, not what suits the large ones."""
    weights = np.array([1e6, 1e9])
    assert fit_optimizer(weights, np.zeros(2), np.array([1e-3, 2.0])) == (pytest.approx(1.2e-9), 0)


def test_host_times_are_of_the_size_and_of_no_length() -> None:
    points = [(64, 64, 1.0), (1024, 64, 3.0), (1024, 512, 5.0), (65536, 64, 900.0)]
    curves = MeasuredCurves(series(points, name="forward_host_s"))
    sizes = np.array([8.0, 64, 256, 1024, 30000])
    # Halfway between 64 and 1,024 on a log axis; a host that waited behind a busy device is not believed.
    assert curves.host_s("forward_host_s", sizes).tolist() == pytest.approx([1, 1, 2.5, 4, 4])
