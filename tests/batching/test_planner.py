"""Whole plans: samples exactly once, memory as promised, near the best of all plans on tiny batches, the same for a seed."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import batching as plain

from penstock.batching.bounds.lower_bound import lower_bound_s
from penstock.batching.costs import PipelineCosts
from penstock.batching.example import small_costs
from penstock.batching.fitting import fit_samples, positions
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planner import costs_for, plan_batch
from penstock.errors import InfeasibleError, InputError
from penstock.models.shapes import Layout
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.timing.simulator import simulate

LAYOUTS: tuple[tuple[Layout, ...], ...] = (("padded",), ("packed",), ("padded", "packed"))


def random_case(seed: int) -> tuple[PipelineCosts, list[SampleLengths]]:
    source = random.Random(seed)
    decoder = source.random() < 0.4
    layouts = ("padded",) if decoder else source.choice(LAYOUTS)
    costs = small_costs(source.randint(1, 4), source.randint(1, 3), source.choice([600.0, 1500.0, 1e5]), layouts, decoder)
    if costs.num_replicas > 1 and source.random() < 0.5:  # a replica of its own kind
        limits = costs.limit_bytes.copy()
        limits[0] *= 1.5
        costs = dataclasses.replace(costs, stage_class=costs.stage_class[::-1].copy(), limit_bytes=limits)
    count = source.randint(1, 40)
    ids = source.sample(range(1000), count)
    return costs, [SampleLengths(i, source.randint(1, 30), source.randint(1, 20) if decoder else 0) for i in ids]


def recheck(plan: BatchPlan, costs: PipelineCosts, samples: list[SampleLengths]) -> None:
    """Replays a plan with nothing but its micro-batches and schedules."""
    placed = [i for replica in plan.replicas for one in replica.micro_batches for i in one.samples]
    assert sorted(placed) == sorted(sample.id for sample in samples)
    by_id = {sample.id: pair for sample, pair in zip(samples, zip(*positions(samples, costs), strict=True), strict=True)}
    times = []
    for r, replica in enumerate(plan.replicas):
        count = len(replica.micro_batches)
        durations, transfers = np.zeros((2, costs.num_stages, count)), np.zeros((2, costs.num_stages - 1, count))
        for m, one in enumerate(replica.micro_batches):
            assert list(one.lengths) == [by_id[i][0] for i in one.samples]
            cost = plain.price(costs, [tuple(map(int, by_id[i])) for i in one.samples], one.layout)
            for s in range(costs.num_stages):
                durations[:, s, m] = cost[costs.stage_class[r, s], one.recompute[s], :2]
            tokens = np.array([1.0, one.shape().tokens, one.shape().dec_tokens])
            transfers[:, :, m] = costs.hops[r] @ tokens
        for s in range(costs.num_stages):
            chosen = []
            for one in replica.micro_batches:
                cost = plain.price(costs, [tuple(map(int, by_id[i])) for i in one.samples], one.layout)
                chosen.append(cost[costs.stage_class[r, s], one.recompute[s]])
            order = [(action.kind, action.micro_batch) for action in replica.schedule[s]]
            peak = plain.memory_peak(order, chosen) + costs.state_bytes[r, s]
            assert replica.peak_bytes[s] == pytest.approx(peak)
            assert peak <= costs.limit_bytes[r, s] * (1 + 1e-9)
        if count:
            timeline = simulate(replica.schedule, durations, transfers)
            # the planner has one sending channel per device, the simulator as many as there are messages
            assert timeline.makespan_s <= replica.predicted_s * (1 + 1e-9)
            forward, backward = durations[0].T, durations[1].T
            assert replica.predicted_s == pytest.approx(plain.makespan(replica.warm_up, forward, backward, transfers.transpose(2, 0, 1)))
        times.append(replica.predicted_s)
    assert plan.predicted_s == pytest.approx(max(times) + costs.fixed_s)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 50, 600]))
@example(2191145, 0)  # more tokens than the grid of costs has
@settings(max_examples=60)
def test_every_plan_holds_what_it_promises(seed: int, steps: int) -> None:
    costs, samples = random_case(seed)
    try:
        fit_samples(samples, costs)
    except InfeasibleError:
        with pytest.raises(InfeasibleError, match="fit"):
            plan_batch(samples, costs)
        return
    plan = plan_batch(samples, costs, steps=steps, seed=seed % 7, bound=True)
    recheck(plan, costs, samples)
    assert plan.bound_s <= plan.predicted_s * (1 + 1e-9)
    assert dataclasses.replace(plan, bound_s=0.0) == plan_batch(samples, costs, steps=steps, seed=seed % 7)
    if steps:
        assert plan.predicted_s <= plan_batch(samples, costs).predicted_s * (1 + 1e-9)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 2), st.floats(4, 300),
    st.sampled_from(LAYOUTS), st.sampled_from([1, 8]), st.sampled_from([0, 60]),
)  # fmt: skip
@example([25, 3, 3, 3], 2, 1, 110.0, ("padded", "packed"), 8, 60)  # 25 tokens fit packed, but not in a row of 32
@settings(max_examples=60)
def test_what_fits_alone_is_planned(
    lengths: list[int], stages: int, replicas: int, limit: float, layouts: tuple[Layout, ...], unit: int, steps: int
) -> None:
    costs = dataclasses.replace(small_costs(stages, replicas, limit, layouts, has_decoder=False), round_to=unit)
    samples = [SampleLengths(index, length) for index, length in enumerate(lengths)]
    kept = list(fit_samples(samples, costs, "drop").samples)
    if kept:
        plan = plan_batch(kept, costs, steps=steps, bound=True)
        recheck(plan, costs, kept)
        assert plan.bound_s <= plan.predicted_s * (1 + 1e-9)
        if "padded" in layouts:
            recheck(plan_batch(kept, costs, order="sorted"), costs, kept)


def best_of_all(costs: PipelineCosts, samples: list[SampleLengths]) -> float:
    """The fastest of all partitions, orders, depths and modes of one replica of a pipeline that has room for everything."""
    pairs = [tuple(map(int, pair)) for pair in zip(*positions(samples, costs), strict=True)]
    best = np.inf
    for groups in plain.partitions(range(len(samples))):
        tables = [plain.price(costs, [pairs[i] for i in group]) for group in groups]
        for order in itertools.permutations(range(len(groups))):
            chosen = np.array([[tables[g][costs.stage_class[0, s], 0] for s in range(costs.num_stages)] for g in order])
            rows = [-(-max(pairs[i][0] for i in groups[g]) // costs.round_to) * costs.round_to * len(groups[g]) for g in order]
            hop = np.array([costs.hops[0, :, :, 0] + costs.hops[0, :, :, 1] * row for row in rows])
            for ahead in range(1, len(groups) + 1):
                depths = [ahead, *[1] * (costs.num_stages - 1)]
                best = min(best, plain.makespan(depths, chosen[..., 0], chosen[..., 1], hop))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_search_finds_the_best_of_all_tiny_plans(seed: int) -> None:
    source = random.Random(seed)
    costs = small_costs(num_stages=2, limit_bytes=1e9, has_decoder=False)
    samples = [SampleLengths(i, source.choice([1, 2, 30, 60])) for i in range(5)]
    best = best_of_all(costs, samples)
    found = plan_batch(samples, costs, steps=4000).predicted_s
    assert best * (1 - 1e-9) <= found <= best * 1.005
    assert lower_bound_s(costs, *positions(samples, costs), exact=True) <= best * (1 + 1e-9)


def test_long_samples_are_refused_dropped_or_truncated() -> None:
    costs = small_costs(num_stages=1, limit_bytes=100.0, has_decoder=False)  # room for 25 tokens: 2 kept and 2 more at the peak
    samples = [SampleLengths(5, 10), SampleLengths(6, 60), SampleLengths(7, 20)]
    with pytest.raises(InfeasibleError, match=r"sample 6 \(60 tokens\) does not fit in the memory of every device"):
        plan_batch(samples, costs)
    small = dataclasses.replace(small_costs(num_stages=1, has_decoder=False), max_tokens=24)
    with pytest.raises(InfeasibleError, match=r"sample 6 \(60 tokens\) does not fit in the plan's micro-batches of up to 24 tokens"):
        plan_batch(samples, small)
    dropped = plan_batch(samples, costs, too_long="drop")
    assert dropped.dropped == (SampleLengths(6, 60),)
    recheck(dropped, costs, [samples[0], samples[2]])
    cut = plan_batch(samples, costs, too_long="truncate")
    assert cut.truncated == (SampleLengths(6, 60),)
    recheck(cut, costs, [samples[0], SampleLengths(6, 25), samples[2]])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "no samples"),
        ([SampleLengths(1, 5), SampleLengths(1, 6)], "twice"),
        ([SampleLengths(1, 0)], "at least one"),
        ([SampleLengths(1, 5, 5)], "no decoder"),
    ],
)
def test_wrong_batches_are_refused(samples: list[SampleLengths], message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan_batch(samples, small_costs(has_decoder=False))


def test_samples_longer_than_the_model_takes_are_cut_to_it() -> None:
    costs = dataclasses.replace(small_costs(has_decoder=False), max_length=20)
    with pytest.raises(InfeasibleError, match="The model takes 20 positions"):
        plan_batch([SampleLengths(0, 21), SampleLengths(1, 20)], costs)
    cut = plan_batch([SampleLengths(0, 21), SampleLengths(1, 20)], costs, too_long="truncate")
    recheck(cut, costs, [SampleLengths(0, 20), SampleLengths(1, 20)])


def test_a_batch_of_only_long_samples_leaves_nothing() -> None:
    with pytest.raises(InputError, match="nothing is left"):
        plan_batch([SampleLengths(0, 60)], small_costs(1, 1, 100.0, has_decoder=False), too_long="drop")


def test_recomputation_is_chosen_where_memory_binds_only() -> None:
    """The first stage holds two in flight and is not the slowest; the last holds one and never recomputes."""
    costs = dataclasses.replace(small_costs(num_stages=2, limit_bytes=500.0, has_decoder=False), max_samples=1)
    plan = plan_batch([SampleLengths(i, 30) for i in range(24)], costs, steps=2000)
    used = np.array([one.recompute for replica in plan.replicas for one in replica.micro_batches])
    assert used[:, 0].any()
    assert not used[:, 1].any()


def test_replicas_share_by_makespan() -> None:
    """One long sample and many short ones: the replica with the long one gets fewer of the rest."""
    costs = small_costs(num_stages=3, num_replicas=2, has_decoder=False)
    plan = plan_batch([SampleLengths(0, 64), *(SampleLengths(i, 4) for i in range(1, 60))], costs, steps=4000)
    times = [replica.predicted_s for replica in plan.replicas]
    assert max(times) / min(times) < 1.1


def test_sizes_are_capped() -> None:
    costs = dataclasses.replace(small_costs(has_decoder=False), max_samples=3, max_tokens=40)
    plan = plan_batch([SampleLengths(i, 12) for i in range(20)], costs, steps=500)
    batches = [one for replica in plan.replicas for one in replica.micro_batches]
    assert max(len(one.samples) for one in batches) <= 3
    assert max(one.num_positions for one in batches) <= 40


def test_of_splits_that_take_the_same_time_one_stage_takes_the_one_that_holds_least() -> None:
    """Beyond 16k tokens a GPU is no faster for having more of them at once, and memory is all that is left to tell splits apart."""
    plan = dataclasses.replace(
        uniform_plan("gpt-1.3b", "1xh200", global_batch=64, micro_batch=8), micro_batching=MicroBatching("packed", "dynamic")
    )
    found = plan_batch([SampleLengths(n, 512) for n in range(128)], costs_for(plan, 512, costs="profile:h200-141gb"))
    assert found.num_micro_batches >= 4 and found.peak_bytes < 0.5 * found.limit_bytes[0][0]


@pytest.mark.parametrize("seed", range(4))
def test_what_comes_once_after_the_pipeline_is_in_the_plan_and_in_its_bound(seed: int) -> None:
    costs, samples = random_case(seed)
    later = dataclasses.replace(costs, fixed_s=7.0)
    plain, found = (plan_batch(samples, one, too_long="drop", bound=True) for one in (costs, later))
    assert found.predicted_s == pytest.approx(plain.predicted_s + 7.0) and found.bound_s == pytest.approx(plain.bound_s + 7.0)
    assert 7.0 < found.bound_s <= found.predicted_s
