"""Plans whose ops have degrees of their own: found, valid, as fast as every way tried one by one, and never below the bound."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.memory import CUDA_CONTEXT_BYTES, NCCL_BYTES
from penstock.plans.build import join_ranges
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Degrees, OpRun, Plan, Stage
from penstock.plans.validity import check_plan
from penstock.search import Request, search
from penstock.search.op_degrees.mixed_kernels import mixing_gain
from penstock.search.op_degrees.mixed_plans import LEAST_GAIN, free_bound_s, mixed_plans
from penstock.search.space.families import families


def request_of(folder: Path, cluster: str, batch: int, limit: float = math.inf, **sizes: object) -> Request:
    """A small VGG: its matrix products have nearly all of the weights, its convolutions most of the work."""
    fields = {"family": "vgg", "convs": [1], "widths": [8], "classifier_width": 2048, "num_classes": 8, "image_size": 32, **sizes}
    path = folder / "model.yaml"
    path.write_text(json.dumps(fields))
    return Request.of(str(path), cluster, batch, "roofline", None, (), limit, ("1f1b",))


def every_way(request: Request, first: int, last: int, num_devices: int) -> Iterator[list[OpRun]]:
    """Each op of a stage with each of its degrees and splits on some devices."""
    degrees = [(tp, num_devices // tp) for tp in (1, 2, 4) if num_devices % tp == 0]
    ways = []
    for place in request.model.ops[first:last]:
        splits = {tp: len(place.op.splits) if tp > 1 else 1 for tp, _ in degrees}
        ways.append([
            OpRun(place.index, place.index + 1, tp, dp, algo) for tp, dp in degrees
            if not place.op.tp_limit or place.op.tp_limit % tp == 0 for algo in range(splits[tp])
        ])  # fmt: skip
    return (list(runs) for runs in itertools.product(*ways))


def plan_of(request: Request, samples: int, stages: list[tuple[list[OpRun], int, tuple[int, ...]]]) -> Plan:
    """A plan of stages, each with its ops' degrees, number of devices and recomputed ops."""
    found, rank = [], 0
    for runs, size, again in stages:
        pattern = join_ranges((op, op + 1) for op in again)
        devices = (tuple(range(rank, rank + size)),)
        found.append(Stage(runs[0].first, runs[-1].last, devices, Degrees(runs[0].tp, runs[0].dp), tuple(runs),
                           (pattern,) if pattern else (), zero=1))  # fmt: skip
        rank += size
    return replace(request.frame, stages=tuple(found), micro_batching=replace(request.frame.micro_batching, samples=samples))


@pytest.mark.parametrize(
    ("cluster", "width", "image", "batch"), [("2xt4", 2048, 32, 64), ("2xa10g", 4096, 64, 32), ("2xv100-16gb", 1024, 16, 16)]
)
def test_no_plan_of_one_replica_is_faster(tmp_path: Path, cluster: str, width: int, image: int, batch: int) -> None:
    request = request_of(tmp_path, cluster, batch, classifier_width=width, image_size=image)
    ops = request.model.num_ops
    outcome = search(request, top=1)
    tried = []
    for samples in (batch // 2, batch):
        tried += [plan_of(request, samples, [(runs, 2, ())]) for runs in every_way(request, 0, ops, 2)]
        for cut in range(1, ops):
            sides = [next(every_way(request, *edge, 1)) for edge in ((0, cut), (cut, ops))]
            tried.append(plan_of(request, samples, [(side, 1, ()) for side in sides]))
    assert len(tried) > 1000
    least = min(request.estimator.estimate(plan).time_s for plan in tried)
    assert outcome.bound_s <= least * (1 + 1e-9)
    assert outcome.choices[0].estimate.time_s <= least * (1 + LEAST_GAIN)
    assert min(free_bound_s(family) for family in families(request) if family.replicas == 1) <= least


@pytest.mark.parametrize("limit_mb", [80, 160, 360])
def test_no_plan_that_fits_little_memory_is_below_the_bound(tmp_path: Path, limit_mb: int) -> None:
    """Plans of random degrees, cuts and recomputation."""
    limit = CUDA_CONTEXT_BYTES + NCCL_BYTES + 1e6 * limit_mb
    request = request_of(tmp_path, "4xt4", 32, limit, classifier_width=256, image_size=128, convs=[2], widths=[32])
    outcome = search(request, top=1)
    assert outcome.choices[0].estimate.peak_bytes <= limit
    draw, ops, fitting = random.Random(3), request.model.num_ops, 0
    for _ in range(500):
        sizes = draw.choice([(4,), (2, 2), (1, 1, 2), (2, 1, 1)])
        edges = [0, *sorted(draw.sample(range(1, ops), len(sizes) - 1)), ops]
        stages = []
        for size, (first, last) in zip(sizes, itertools.pairwise(edges), strict=True):
            ways = [[runs[0] for runs in every_way(request, op, op + 1, size)] for op in range(first, last)]
            runs = [draw.choice(way) for way in ways]
            for at in range(1, len(runs)):  # mostly long runs, as good plans have them
                same = [run for run in ways[at] if (run.tp, run.dp) == (runs[at - 1].tp, runs[at - 1].dp)]
                runs[at] = draw.choice(same) if same and draw.random() < 0.8 else runs[at]
            stages.append((runs, size, tuple(op for op in range(first, last) if draw.random() < draw.choice((0.0, 0.3, 0.9)))))
        plan = plan_of(request, draw.choice((4, 8, 16, 32)), stages)
        if check_plan(plan, request.model, request.cluster):
            continue
        estimate = request.estimator.estimate(plan)
        fitting += estimate.fits
        assert not estimate.fits or estimate.time_s >= outcome.bound_s * (1 - 1e-9)
    assert fitting > 30


def test_large_weights_are_divided_and_early_ops_are_not(tmp_path: Path) -> None:
    outcome = search(Request.of("vgg16", "8xa10g", 256, "roofline", None, (), math.inf), top=3)
    best, other = outcome.choices[0], next(choice for choice in outcome.choices if choice.kind != "mixed")
    assert best.kind == "mixed" and best.estimate.time_s < 0.92 * other.estimate.time_s
    assert best.tp == "1-8" and best.dp == "1-8"
    assert outcome.bound_s <= best.estimate.time_s and outcome.gap < 0.05
    assert any(line.subspace.per_op for line in outcome.proof)
    model = Request.of("vgg16", "8xa10g", 256, "roofline", None, (), math.inf).model
    assert not check_plan(best.plan, model) and not unsupported(best.plan, model)
    (stage,) = best.plan.stages
    assert stage.run_of(0).dp == 8 and stage.run_of(next(p.index for p in model.ops if p.op.name == "fc1")).tp == 8


@pytest.mark.parametrize("model", ["gpt-1.3b", "llama-1b"])
def test_transformers_are_left_alone(model: str) -> None:
    request = Request.of(model, "8xa100-40gb", 64, "roofline", None, (), math.inf)
    assert all(not list(mixed_plans(family, math.inf)) for family in families(request) if family.replicas == 1)


@given(seed=st.integers(0, 2**32 - 1), ops=st.integers(2, 5))
@settings(max_examples=60, deadline=None)
def test_gain_is_that_of_the_best_run_of_ops(seed: int, ops: int) -> None:
    numbers = np.random.default_rng(seed)
    time, reshard = numbers.random((3, ops)), 0.3 * numbers.random((3, 3, ops))
    reshard[np.arange(3), np.arange(3)] = 0.0
    expected = 0.0

    def time_of(way: tuple[int, ...], first: int) -> float:
        moves = sum(reshard[a, b, first + at + 1] for at, (a, b) in enumerate(itertools.pairwise(way)))
        return moves + sum(time[q, first + at] for at, q in enumerate(way))

    for first, last in itertools.combinations(range(ops + 1), 2):
        alone = min(time[q, first:last].sum() for q in (0, 1))
        mixed = min(time_of(way, first) for way in itertools.product(range(3), repeat=last - first))
        expected = max(expected, 1 - mixed / alone) if last - first > 1 else expected
    assert mixing_gain(time, reshard, np.array([True, True, False]), np.arange(ops)) == pytest.approx(expected)
