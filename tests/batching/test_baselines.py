"""How batches are usually cut, and equal groups: samples once, rows no longer than allowed, never better than planning."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.baselines import Attention, baseline_rows, fixed_batches, packed_rows, run_baseline, token_budget
from penstock.batching.costs import LayoutCosts
from penstock.batching.example import small_costs
from penstock.batching.packing import equal_groups, packed_splits
from penstock.batching.plan import SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.split import FILL
from penstock.batching.workloads import batch_workload
from penstock.errors import InfeasibleError, InputError
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Layout

COSTS = small_costs(2, 2, layouts=("padded", "packed"), has_decoder=False)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def ids(batches: list[MicroBatch]) -> list[int]:
    return sorted(i for batch in batches for i in batch.samples)


@given(LENGTHS, st.integers(1, 5), st.sampled_from(["inside", "across"]))
@settings(max_examples=40)
def test_every_baseline_places_each_sample_once(lengths: list[int], rows: int, attention: Attention) -> None:
    samples = [SampleLengths(3 * i, n) for i, n in enumerate(lengths)]
    everything = [sample.id for sample in samples]
    fixed = fixed_batches(samples, COSTS, rows)
    assert ids(fixed) == everything
    assert {batch.row_length for batch in fixed} == {max(lengths)}
    budget = token_budget(samples, COSTS, 100)
    assert ids(budget) == everything
    assert all(batch.num_positions <= 100 for batch in budget)
    packed = packed_rows(samples, COSTS, rows, attention=attention)
    assert ids(packed) == everything
    if attention == "across":
        for batch in packed:
            parts = np.split(np.array(batch.lengths), np.cumsum(batch.row_sizes)[:-1])
            assert max(part.sum() for part in parts) <= batch.row_length
            assert batch.num_rows <= rows
    for batches in (fixed, budget, packed):
        plan = run_baseline(batches, COSTS, "baseline")
        assert plan.method == "baseline"
        assert ids([one for replica in plan.replicas for one in replica.micro_batches]) == everything


def test_each_usual_way_is_taken_at_its_best_size() -> None:
    samples = [SampleLengths(i, int(n)) for i, n in enumerate(np.random.default_rng(0).integers(1, 60, 80))]
    rows = baseline_rows(samples, COSTS)
    assert len(rows) == len({row.method for row in rows}) == 4
    for size in (1, 2, 4, 8):
        assert rows[0].predicted_s <= run_baseline(fixed_batches(samples, COSTS, size), COSTS, "").predicted_s
    padded = dataclasses.replace(COSTS, layouts={"padded": COSTS.layouts["padded"]})
    assert len(baseline_rows(samples, padded)) == 3


def test_usual_ways_keep_to_the_micro_batches_that_a_plan_allows() -> None:
    samples = [SampleLengths(i, 8 + i % 3) for i in range(24)]
    free = {plan.method: plan for plan in baseline_rows(samples, COSTS)}
    few, small = dataclasses.replace(COSTS, max_samples=2), dataclasses.replace(COSTS, max_tokens=30)
    for costs, size in ((few, lambda micro: len(micro.samples) - 2), (small, lambda micro: micro.num_positions - 30)):
        kept = baseline_rows(samples, costs)
        micros = [micro for plan in kept for replica in plan.replicas for micro in replica.micro_batches]
        assert len(kept) >= 3 and max(map(size, micros)) <= 0
        assert min(plan.predicted_s for plan in kept) > min(plan.predicted_s for plan in free.values())


def test_planning_beats_them_all() -> None:
    numbers = np.random.default_rng(0)
    samples = [SampleLengths(i, int(n)) for i, n in enumerate(numbers.integers(1, 60, 80))]
    planned = plan_batch(samples, COSTS, steps=4000).predicted_s
    for batches in (fixed_batches(samples, COSTS, 4), token_budget(samples, COSTS, 200), packed_rows(samples, COSTS, 4)):
        assert planned < run_baseline(batches, COSTS, "baseline").predicted_s


def test_pairs_are_packed_within_both_lengths() -> None:
    costs = small_costs()
    samples = [SampleLengths(i, 10, 4) for i in range(6)] + [SampleLengths(6, 20, 8)]
    batches = packed_rows(samples, costs, 2, attention="across")
    assert [batch.row_sizes for batch in batches] == [(1, 2), (2, 2)]
    assert {(batch.row_length, batch.dec_row_length) for batch in batches} == {(20, 8)}
    longer = packed_rows(samples, costs, 8, 40, "across")
    assert {(batch.row_length, batch.dec_row_length) for batch in longer} == {(40, 40)}
    assert [batch.row_sizes for batch in longer] == [(3, 4)]
    with pytest.raises(InputError, match="packed layout"):
        packed_rows(samples, costs, 2)


@pytest.mark.parametrize(("offset", "separator", "rows"), [(0, 0, (3,)), (0, 1, (2, 1)), (-1, 0, (3, 1)), (-1, 1, (2, 1))])
def test_a_separator_makes_one_text_of_a_row(offset: int, separator: int, rows: tuple[int, ...]) -> None:
    """Rows of 15 positions: three samples of 5 tokens fill one; with a token between them they have 17, of which the last is no input."""
    costs = dataclasses.replace(COSTS, length_offset=offset)
    samples = [SampleLengths(i, 5) for i in range(sum(rows))]
    assert [batch.row_sizes for batch in packed_rows(samples, costs, 8, 15, "across", separator)] == [rows]
    assert [batch.row_sizes for batch in packed_rows(samples[:3], costs, 8, 16, "across", 1)] == [(3,) if offset else (2, 1)]


def test_micro_batches_of_a_layout_without_a_price_are_refused() -> None:
    samples = [SampleLengths(i, 5 + i) for i in range(8)]
    for held, other in (("packed", "padded"), ("padded", "packed")):
        layouts: tuple[Layout, ...] = (held,)  # type: ignore[assignment]
        costs = small_costs(layouts=layouts, has_decoder=False)
        batches = [msgspec.structs.replace(one, layout=other) for one in fixed_batches(samples, costs, 4)]
        message = f"a {other} micro-batch has no price: costs 'example' are of {held} ones"
        with pytest.raises(InputError, match=message):
            run_baseline(batches, costs, "fixed")
        with pytest.raises(InputError, match=message):
            batch_workload(costs, batches, 0)


def test_the_mode_that_fits_is_used_or_none() -> None:
    samples = [SampleLengths(i, 20) for i in range(8)]
    roomy = run_baseline(fixed_batches(samples, COSTS, 2), COSTS, "fixed")
    assert {one.recompute for replica in roomy.replicas for one in replica.micro_batches} == {(0, 0)}
    tight = dataclasses.replace(COSTS, limit_bytes=np.full((2, 2), 500.0))
    assert {one.recompute for one in run_baseline(fixed_batches(samples, tight, 2), tight, "fixed").replicas[0].micro_batches} == {(1, 1)}
    with pytest.raises(InfeasibleError, match="fixed: no recomputation mode has room for 1 micro-batch"):
        run_baseline(fixed_batches(samples, tight, 8), tight, "fixed")


@given(LENGTHS, st.integers(1, 50), st.integers(0, 9))
def test_groups_are_of_equal_weight(weights: list[int], count: int, small: int) -> None:
    order, cuts = equal_groups(np.array(weights, dtype=float), count, min(small, count // 2))
    assert sorted(order.tolist()) == list(range(len(weights)))
    sums = np.add.reduceat(np.array(weights)[order], cuts[:-1])
    assert len(sums) <= count
    if not small:
        assert sums.max() <= sum(weights) / count + max(weights)


def test_groups_of_every_number_are_priced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners share cores with ranks that compute on processors: a look-up for each number took longer than all else they do."""
    looked_up: list[int] = []
    plain = LayoutCosts.at
    monkeypatch.setattr(LayoutCosts, "at", lambda grid, x, y, z: looked_up.append(np.size(x)) or plain(grid, x, y, z))
    enc = np.random.default_rng(0).integers(1, 60, 80)
    splits = packed_splits(COSTS, enc)
    assert len(looked_up) == 2, "the samples, and the groups of all splits"
    monkeypatch.undo()
    assert len(splits) == 8 and [one.objective_s for one in splits] == sorted(one.objective_s for one in splits)
    for one in splits:
        groups = [enc[own] for own in np.split(one.order, one.cuts[1:-1])]
        times_s = [COSTS.layouts["packed"].at(own.sum(), (own**2).sum() / own.sum(), 0)[..., :2].sum(-1).min(-1).max() for own in groups]
        assert one.objective_s == pytest.approx(FILL * (COSTS.num_stages - 1) * max(times_s) + sum(times_s) / COSTS.num_replicas)


def test_the_heaviest_samples_are_dealt_first() -> None:
    """Six light ones fill up what a heavy one leaves; dealt before it, they would lie on both sides, and it on top of three."""
    order, cuts = equal_groups(np.array([1.0] * 6 + [6.0]), 2)
    assert sorted(map(sorted, np.split(order, cuts[1:-1]))) == [[0, 1, 2, 3, 4, 5], [6]]
