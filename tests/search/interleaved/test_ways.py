"""Interleaved plans with cuts of their own: valid, balanced as well as trying everything, faster where pipelines are deep, and bounded."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.memory import CUDA_CONTEXT_BYTES, NCCL_BYTES
from penstock.plans.build import join_ranges
from penstock.plans.validity import check_plan
from penstock.schedules.rules import SCHEDULES
from penstock.search import Outcome, Request, search
from penstock.search.interleaved.balanced_cuts import balanced_cuts, cut_windows
from penstock.search.interleaved.chunked_plans import _least_s, _plan, best_interleaved, simulated_pipeline_s
from penstock.search.interleaved.cuts_bound import cuts_bound_s
from penstock.search.interleaved.group_links import GroupLinks
from penstock.search.interleaved.ways import Interleaving, interleavings
from penstock.search.space.families import families


def request_of(model: str, cluster: str, batch: int, limit: float = math.inf) -> Request:
    return Request.of(model, cluster, batch, "roofline", None, (), limit)


@cache
def deep() -> tuple[Request, Outcome]:
    """Slow links, which make gradients dear, and too little memory for large micro-batches."""
    request = request_of("gpt-2.6b", "8xa10g", 64)
    return request, search(request, top=4)


@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(2, 3), chunks=st.integers(2, 2), count=st.integers(3, 12))
@settings(max_examples=40, deadline=None)
def test_cuts_are_nearly_as_good_as_all_that_are_allowed(seed: int, groups: int, chunks: int, count: int) -> None:
    numbers = np.random.default_rng(seed)
    time = numbers.random(groups * chunks * 2 + 1) + 0.2
    enter, leave = 0.1 * numbers.random((2, groups, len(time) + 1))
    enter[:, 0], leave[:, -1] = 0.0, 0.0
    weights, after, tied = np.cumsum([0.0, *numbers.random(len(time))]), *0.1 * numbers.random((2, groups))
    links = GroupLinks(enter, leave, weights, after, tied)
    cuts, found = balanced_cuts(time, links, np.array([0, len(time)]), count, chunks)
    low, high = cut_windows(np.concatenate([[0.0], np.cumsum(time)]), groups * chunks)

    def time_of(edges: tuple[int, ...]) -> float:
        sums, ends = [0.0] * groups, links.tied_s.tolist()
        for number, (first, last) in enumerate(itertools.pairwise(edges)):
            group = number % groups
            sums[group] += float(time[first:last].sum() + enter[group, first] + leave[group, last])
            ends[group] += float(links.after_s[group] * (links.weights[last] - links.weights[first]))
        return SCHEDULES["interleaved"].pipeline_s(sums, count, chunks) + max(ends)

    assert (cuts >= low).all() and (cuts <= high).all() and (np.diff(cuts) > 0).all()
    assert time_of(tuple(cuts.tolist())) == pytest.approx(found)
    inner = itertools.product(*(range(a, b + 1) for a, b in zip(low[1:-1].tolist(), high[1:-1].tolist(), strict=True)))
    every = ((0, *edges, len(time)) for edges in inner)
    least = min(time_of(edges) for edges in every if all(a < b for a, b in itertools.pairwise(edges)))
    assert least - 1e-9 <= found <= 1.02 * least
    before, average_s = np.concatenate([[0.0], np.cumsum(time)]), float(time.sum()) / groups
    assert cuts_bound_s(before, links, low, high, count, chunks) <= least * (1 + 1e-9)
    free = replace(links, after_s=np.zeros(groups), tied_s=np.zeros(groups))
    bound_s = cuts_bound_s(before, free, low, high, count, chunks)
    assert bound_s >= SCHEDULES["interleaved"].pipeline_s([average_s] * groups, count, chunks) * (1 - 1e-9)


def test_interleaved_plans_are_found() -> None:
    request, outcome = deep()
    chunked = [choice for choice in outcome.choices if choice.plan.schedule == "interleaved"]
    assert chunked and outcome.bound_s <= outcome.choices[0].estimate.time_s
    for choice in chunked:
        assert not check_plan(choice.plan, request.model, request.cluster) and choice.estimate.fits
        assert choice.plan.num_chunks in (2, 3, 4)
    sizes = {stage.last - stage.first for choice in chunked for stage in choice.plan.stages}
    assert len(sizes) > 1  # cuts of its own


def ways_of(request: Request, known_s: float) -> list[Interleaving]:
    return sorted((way for family in families(request) for way in interleavings(family) if way.bound_s < known_s), key=lambda w: w.bound_s)


def test_no_way_is_below_its_bounds() -> None:
    request, outcome = deep()
    tried = 0
    for way in ways_of(request, 1.5 * outcome.choices[0].estimate.time_s)[:12]:
        found = best_interleaved(way, math.inf)
        if found is not None:
            tried += 1
            assert way.bound_s <= found.estimate.time_s * (1 + 1e-9)
            assert way.sharper_bound_s() <= found.estimate.time_s * (1 + 1e-9)
            assert found.estimate.time_s >= outcome.bound_s
    assert tried >= 5


def small(folder: Path, limit: float = math.inf) -> Request:
    fields = {"base": "gpt-350m", "layers": 4, "hidden": 256, "heads": 4, "vocab": 2048, "seq_length": 512}
    (folder / "model.yaml").write_text(json.dumps(fields))
    return Request.of(str(folder / "model.yaml"), "2xt4", 64, "roofline", None, (16,), limit)


def only_way(request: Request) -> Interleaving:
    """Two groups of one device, two chunks each."""
    (way,) = [way for way in ways_of(request, math.inf) if way.chunks == 2 and way.family.replicas == 1 and way.option.num_devices == 1]
    return way


@pytest.mark.parametrize("share", [1.0, 0.9, 0.75])
def test_no_cuts_of_a_small_chain_are_below_the_bound(tmp_path: Path, share: float) -> None:
    """All cuts within the windows, with nothing, with everything and with some ops recomputed."""
    roomy = best_interleaved(only_way(small(tmp_path)), math.inf)
    assert roomy is not None
    context = CUDA_CONTEXT_BYTES + NCCL_BYTES
    request = small(tmp_path, context + share * (roomy.estimate.peak_bytes - context))
    way, blocks, checked = only_way(request), request.blocks, 0
    low, high = way.windows
    bound_s = max(way.bound_s, way.sharper_bound_s())
    for inner in itertools.product(*(range(int(low[k]), int(high[k]) + 1) for k in (1, 2, 3))):
        edges = (0, *inner, request.model.num_ops)
        if any(a >= b for a, b in itertools.pairwise(edges)):
            continue
        for again in (0, 3, 5, 100):  # so many ops of each block from its first on
            patterns = []
            for first, last in itertools.pairwise(edges):
                ops = [op for op in range(first, last) if op - blocks.start[blocks.of_op[op]] < again]
                patterns.append(join_ranges((op, op + 1) for op in ops))
            stages = tuple(
                replace(stage, first=first, last=last, recompute=(pattern,) if pattern else ())
                for stage, (first, last), pattern in zip(roomy.plan.stages, itertools.pairwise(edges), patterns, strict=True)
            )
            estimate = request.estimator.estimate(replace(roomy.plan, stages=stages))
            checked += estimate.fits
            assert not estimate.fits or estimate.time_s >= bound_s * (1 - 1e-9)
    assert checked >= 20


def test_every_order_of_ranks_is_above_the_bound_and_some_cuts_are_near_it(tmp_path: Path) -> None:
    """Replicas on several nodes, with tied weights: all cuts of both orders, and what is known of each before it is estimated."""
    path = tmp_path / "model.yaml"
    path.write_text(json.dumps({"base": "gpt-350m", "layers": 4, "hidden": 256, "heads": 4, "vocab": 2048, "seq_length": 512}))
    request = Request.of(str(path), "2xg5.12xlarge", 256, "roofline", None, (16,), math.inf, gradients="bf16")
    (way,) = [w for w in ways_of(request, math.inf) if w.chunks == 2 and w.groups == 2 and w.family.replicas == 4]
    assert len(way.orders) == 2
    low, high = way.windows
    times = []
    for inner in itertools.product(*(range(int(low[k]), int(high[k]) + 1) for k in (1, 2, 3))):
        cuts = np.array([0, *inner, request.model.num_ops])
        for together, links in way.orders if (np.diff(cuts) > 0).all() else ():
            time_s = request.estimator.estimate(_plan(way, cuts, together)).time_s
            assert 0.98 * time_s <= _least_s(way, links, cuts) <= time_s * (1 + 1e-9)
            times.append(time_s)
    assert len(times) >= 50
    assert way.bound_s <= way.sharper_bound_s() <= min(times)
    assert way.sharper_bound_s() >= 0.95 * min(times)
    found = best_interleaved(way, math.inf)
    assert found is not None and found.estimate.time_s <= 1.02 * min(times)


def test_found_plans_take_what_the_formula_says_under_the_simulator() -> None:
    """Chunks are near enough to equal for the pipeline to fill as fast as the formula has it."""
    _, outcome = deep()
    chunked = [choice for choice in outcome.choices if choice.plan.schedule == "interleaved"]
    assert chunked
    for choice in chunked:
        assert simulated_pipeline_s(choice.plan, choice.estimate) == pytest.approx(choice.estimate.pipeline_s, rel=0.03)


def test_only_devices_of_one_kind_and_whole_rounds() -> None:
    for family in families(request_of("gpt-350m", "4xa100-40gb+4xa10g", 32)):
        assert not list(interleavings(family))
    for family in families(request_of("gpt-350m", "4xa100-40gb", 24)):
        assert all(family.count % way.groups == 0 for way in interleavings(family))
