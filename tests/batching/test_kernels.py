"""Every compiled loop against its plain twin on random pipelines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import batching as plain

from penstock.batching import kernels
from penstock.batching.costs import QUANTITIES, LayoutCosts, PipelineCosts
from penstock.batching.ordering import by_length, curves, hilbert
from penstock.batching.split import SPREAD, Windows, window_sizes
from penstock.models.shapes import Form, Quantity, Shape
from penstock.schedules.orders import with_depths
from penstock.timing.recorded import FewShapes

SEEDS = st.integers(0, 2**32 - 1)


def random_costs(
    numbers: np.random.Generator, two_sided: bool, packed: bool = False, stages: int = 0, missing: bool = True
) -> PipelineCosts:
    """Times and bytes that grow with size, with noise and holes; limits that bind for some micro-batches."""
    stages, replicas = stages or int(numbers.integers(1, 5)), int(numbers.integers(1, 4))
    classes, modes = int(numbers.integers(1, 3)), int(numbers.integers(1, 4))
    axes = [np.array([1.0, 2, 4, 8, 16]), np.array([8.0, 16, 32, 64]), np.array([8.0, 24, 64]) if two_sided else np.zeros(1)]
    grids = {}
    for layout in ("padded", *(["packed"] if packed else [])):
        x, y, z = axes if layout == "padded" else (axes[0] * 16, axes[1], np.zeros(1))
        length, dec, rows = np.meshgrid(y, z, x, indexing="ij")
        size = (rows * (length + dec) if layout == "padded" else rows)[..., None, None, None]
        values = (1 + size) * numbers.uniform(0.5, 1.5, (*length.shape, classes, modes, len(QUANTITIES)))
        values[..., 3:] += values[..., 2:3]
        if missing:
            values[numbers.random(values.shape[:3]) < 0.05] = np.inf
        grids[layout] = LayoutCosts((x, y, z), values)
    shape = replicas, stages
    few_shapes = None
    if packed and numbers.random() < 0.5:  # up to about 100 tokens of each rank are filled up
        few_shapes = FewShapes(Quantity(Form.of(tokens=4e8, squares=4e6)), 1, numbers.random(), int(numbers.integers(1, 4)))
    return PipelineCosts(
        "random", grids, numbers.integers(0, classes, shape), numbers.uniform(0, 10, shape), numbers.uniform(3000, 9000, shape),
        numbers.uniform(0, 1, (replicas, 2, stages - 1, 3)), tuple("abc"[:modes]), round_to=8, has_decoder=two_sided,
        few_shapes=few_shapes,
    )  # fmt: skip


def random_lengths(numbers: np.random.Generator, count: int, two_sided: bool) -> tuple[np.ndarray, np.ndarray]:
    enc, dec = numbers.integers(1, 64, (2, count))
    return enc, dec if two_sided else 0 * dec


@given(SEEDS, st.booleans(), st.booleans())
@settings(max_examples=60)
def test_prices_are_those_of_the_twin(seed: int, two_sided: bool, packed: bool) -> None:
    numbers = np.random.default_rng(seed)
    costs = random_costs(numbers, two_sided, packed and not two_sided)
    count = int(numbers.integers(1, 9))
    enc, dec = random_lengths(numbers, count, two_sided)
    cost, shape = np.empty((*costs.layouts["padded"].values.shape[3:5], 5)), np.empty(5, dtype=np.int64)
    raw = np.empty(costs.tables.values0.shape[3])
    found = kernels.price_set(costs.tables, enc, dec, np.arange(count), count, raw, np.empty_like(cost), cost, shape)
    pairs = list(zip(enc.tolist(), dec.tolist(), strict=True))
    twins = {layout: plain.price(costs, pairs, layout) for layout in costs.layouts}
    charges = {layout: plain.charge(costs, twin, count) for layout, twin in twins.items()}
    assert found == pytest.approx(min(charges.values()))
    if np.isfinite(found):
        layout = ("padded", "packed")[shape[0]]
        assert charges[layout] == pytest.approx(found)
        assert np.allclose(cost, twins[layout])
        assert shape[3] == (count * shape[1] if layout == "padded" else enc.sum())


@given(st.integers(1, 5000), st.floats(1, 2000), st.integers(1, 8), st.floats(0, 1))
def test_packed_micro_batches_are_filled_up_as_training_fills_them(tokens: int, keys: float, dp: int, recomputed: float) -> None:
    few = FewShapes(Quantity(Form.of(tokens=1e7, squares=1e4)), 1, recomputed, dp)
    shape = Shape(1, tokens, round(tokens * keys), layout="packed")
    assert kernels.filled.py_func(np.array(few.packed), float(tokens), shape.squares / tokens) == few.num_tokens(shape)


@given(SEEDS)
@settings(max_examples=40)
def test_interpolation_of_whole_grids_is_that_of_the_twin(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    grid = random_costs(numbers, True).layouts["padded"]
    points = (
        [numbers.choice([1.0, 1.5, 3, 8, 15.5, 16]) for _ in range(5)],
        numbers.uniform(1, 64, 5),
        numbers.choice([1.0, 8, 24, 30, 64], 5),
    )
    found = grid.at(*points)
    for at, point in enumerate(zip(*points, strict=True)):
        assert np.allclose(found[at], plain.interpolate(grid.axes, grid.values, point))


@given(SEEDS, st.booleans())
@settings(max_examples=40)
def test_splitting_finds_the_best_of_all_splits(seed: int, two_sided: bool) -> None:
    numbers = np.random.default_rng(seed)
    costs = random_costs(numbers, two_sided, missing=False)
    count = int(numbers.integers(1, 8))
    enc, dec = random_lengths(numbers, count, two_sided)
    order = curves(enc, dec)[0]
    pairs = [(int(enc[i]), int(dec[i])) for i in order]
    charges = {}
    for i, j in itertools.combinations(range(count + 1), 2):
        charges[i, j] = plain.charge(costs, plain.price(costs, pairs[i:j]), j - i)
    if any(charges[i, i + 1] == np.inf for i in range(count)):
        return
    windows = Windows(costs, enc, dec, order, fine=100)
    assert windows.least == pytest.approx(max(charges[i, i + 1] for i in range(count)))
    cap = np.inf if costs.num_stages == 1 else SPREAD * windows.least
    # A window grows until it does not fit or costs too much; what noise makes cheaper beyond that is not looked at.
    reached = {(i, j) for i, j in charges if all(charges[i, k] <= cap and charges[i, k] < np.inf for k in range(i + 1, j + 1))}
    for bound in (np.inf, windows.least * 1.5, windows.least * (1 + 1e-9)):
        allowed = {window for window in reached if charges[window] <= bound}
        best = min((sum(charges[w] for w in one) for one in plain.splits(count) if allowed.issuperset(one)), default=np.inf)
        value, cuts = windows.split(bound)
        assert value == pytest.approx(best)
        if np.isfinite(value):
            assert value == pytest.approx(sum(charges[int(i), int(j)] for i, j in itertools.pairwise(cuts)))
            assert (cuts[0], cuts[-1]) == (0, count)


@given(SEEDS)
@settings(max_examples=150)
def test_a_fitted_stage_fits(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    count, modes, ahead = int(numbers.integers(1, 9)), int(numbers.integers(1, 4)), int(numbers.integers(1, 6))
    cost = numbers.uniform(1, 10, (count, 1, modes, 5))
    cost[..., 3:] += cost[..., 2:3]
    room = float(numbers.uniform(5, 60))
    mode = np.empty(count, dtype=np.int64)
    fits = kernels.fit_stage(np.arange(count), count, cost, 0, room, min(ahead, count), mode)
    order = plain.warm_up_order(ahead, count)
    peaks = {
        modes_: plain.memory_peak(order, [cost[m, 0, modes_[m]] for m in range(count)])
        for modes_ in itertools.product(range(modes), repeat=count)
    } if modes**count <= 300 else {}  # fmt: skip
    if fits:
        assert plain.memory_peak(order, [cost[m, 0, mode[m]] for m in range(count)]) <= room + 1e-9
    fastest = [int(np.argmin(cost[m, 0, :, :2].sum(axis=1))) for m in range(count)]
    if plain.memory_peak(order, [cost[m, 0, fastest[m]] for m in range(count)]) <= room:
        assert fits
        assert mode.tolist() == fastest
    if peaks and min(peaks.values()) > room:
        assert not fits


def test_recomputation_goes_where_it_costs_least() -> None:
    """Two in flight, room for one and a half: the one whose recomputation is cheap gives way."""
    kept, small = [1.0, 2.0, 10.0, 10.0, 10.0], [1.0, 3.0, 5.0, 5.0, 5.0]
    dear = [1.0, 9.0, 5.0, 5.0, 5.0]
    cost = np.array([[[kept, dear]], [[kept, small]], [[kept, dear]]])
    mode = np.empty(3, dtype=np.int64)
    assert kernels.fit_stage(np.arange(3), 3, cost, 0, 15.0, 2, mode)
    assert mode.tolist() == [0, 1, 0]


@given(SEEDS)
@settings(max_examples=50)
def test_the_order_of_a_stage_is_that_of_a_schedule(seed: int) -> None:
    numbers = np.random.default_rng(seed)
    count, stages = int(numbers.integers(1, 9)), int(numbers.integers(1, 6))
    ahead = np.sort(numbers.integers(1, 8, stages))[::-1]
    order = with_depths(ahead.tolist(), count)
    for s in range(stages):
        assert [(a.kind, a.micro_batch) for a in order[s]] == plain.warm_up_order(int(ahead[s]), count)


def test_hilbert_visits_neighbours() -> None:
    x, y = (part.ravel() for part in np.meshgrid(np.arange(8), np.arange(8)))
    places = kernels.hilbert_distances(x, y, 3)
    order = np.argsort(places)
    assert sorted(places.tolist()) == list(range(64))
    assert (np.abs(np.diff(x[order])) + np.abs(np.diff(y[order])) == 1).all()


@given(SEEDS, st.integers(1, 200))
@settings(max_examples=30)
def test_orders_are_permutations(seed: int, count: int) -> None:
    enc, dec = random_lengths(np.random.default_rng(seed), count, True)
    for order in (by_length(enc, dec), *(hilbert(enc, dec, 8, turn) for turn in range(4))):
        assert sorted(order.tolist()) == list(range(count))
    assert (np.diff(enc[by_length(enc, dec)]) <= 0).all()


def test_window_sizes_grow_by_steps() -> None:
    assert window_sizes(6, 100).tolist() == [1, 2, 3, 4, 5, 6]
    sizes = window_sizes(4096, 24)
    assert sizes[-1] <= 4096
    assert len(sizes) < 24 * 9
    assert (np.diff(sizes) <= np.maximum(1, sizes[:-1] // 24)).all()
