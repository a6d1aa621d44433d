"""Bounds that know memory, sequence parallelism and ZeRO levels, against every uniform plan of small problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InfeasibleError
from penstock.files import write_json
from penstock.models import resolve_model
from penstock.models.kept import kept_parts
from penstock.plans.build import uniform_stages
from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan
from penstock.search import Request, search
from penstock.search.bounds.by_ops import family_bound, promise_s, subspace_bound
from penstock.search.space.families import PlanFamily, families
from penstock.search.space.recovery import Recovery
from penstock.search.space.request import micro_batch_sizes

CASES = (("gpt-tiny", "4xa10g", 8), ("llama-tiny", "4xa10g", 8), ("t5-tiny", "2xa10g", 4), ("resnet-tiny", "2xa10g", 4))


def uniform(request: Request) -> Iterator[Plan]:
    """Every uniform plan with every level of ZeRO, with and without sequence parallelism, with and without recomputation."""
    model, count = request.model, request.cluster.num_devices
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            replicas, rest = divmod(count, tp * pp)
            if rest or not replicas or tp > model.max_tp():
                continue
            for samples in micro_batch_sizes(request.frame.global_batch, replicas, ()):
                batching = replace(request.frame.micro_batching, samples=samples)
                for zero in (0, 1, 2, 3) if pp == 1 else (0, 1):
                    for rows in (False, True) if tp > 1 else (False,):
                        for again in (False, True):
                            stages = uniform_stages(
                                model, pp=pp, tp=tp, replicas=replicas, recompute=again, zero=zero, sequence_parallel=rows
                            )
                            plan = replace(request.frame, stages=stages, num_replicas=replicas, micro_batching=batching)
                            if not check_plan(plan, model, request.cluster):
                                yield plan


@cache
def problem(model: str, cluster: str, batch: int, limit: float) -> tuple[Request, tuple[tuple[Plan, float], ...]]:
    """A request, and its uniform plans that fit with their times."""
    request = Request.of(model, cluster, batch, "roofline", None, (), limit)
    estimates = ((plan, request.estimator.estimate(plan)) for plan in uniform(request))
    return request, tuple((plan, found.time_s) for plan, found in estimates if found.fits)


@cache
def least_bytes(model: str, cluster: str, batch: int) -> list[float]:
    """Peaks of all uniform plans, so that limits can be set where some fit and others do not."""
    request = Request.of(model, cluster, batch, "roofline", None, (), math.inf)
    return sorted({request.estimator.estimate(plan).peak_bytes for plan in uniform(request)})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [0.02, 0.3, 1.0])
def test_no_family_bound_is_above_a_plan_that_fits(case: tuple[str, str, int], place: float) -> None:
    peaks = least_bytes(*case)
    request, plans = problem(*case, peaks[round(place * (len(peaks) - 1))] * (1 + 1e-9))
    bounds = {(family.replicas, family.samples): family_bound(family).time_s for family in families(request)}
    assert plans
    for plan, time_s in plans:
        assert bounds[plan.num_replicas, plan.micro_batching.samples or 0] <= time_s * (1 + 1e-9)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [0.0, 0.6])
def test_the_search_beats_every_uniform_plan(case: tuple[str, str, int], place: float) -> None:
    peaks = least_bytes(*case)
    request, plans = problem(*case, peaks[round(place * (len(peaks) - 1))] * (1 + 1e-9))
    outcome = search(request, top=1)
    fastest = min(time_s for _, time_s in plans)
    assert outcome.choices[0].estimate.time_s <= fastest * (1 + 1e-3)
    assert outcome.bound_s <= fastest * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(CASES), st.floats(0.01, 1.0), st.integers(0, 100))
def test_less_memory_never_lowers_a_bound(case: tuple[str, str, int], share: float, number: int) -> None:
    peaks = least_bytes(*case)
    low, high = peaks[0] * 0.5, peaks[-1]
    limits = (low + share * (high - low), high)
    tight, free = (list(families(Request.of(*case, "roofline", None, (), limit))) for limit in limits)
    family, other = tight[number % len(tight)], free[number % len(free)]
    assert (family.replicas, family.samples) == (other.replicas, other.samples)
    assert family_bound(family).time_s >= family_bound(other).time_s * (1 - 2e-3)


def test_a_model_that_cannot_fit_has_no_finite_bound() -> None:
    request = Request.of("llama-70b", "2xa10g", 4, "roofline", None, (), math.inf)
    assert all(family_bound(family).time_s == math.inf == promise_s(family) for family in families(request))
    with pytest.raises(InfeasibleError):
        search(request, top=1)


def family_of(request: Request, replicas: int, samples: int) -> PlanFamily:
    return next(family for family in families(request) if (family.replicas, family.samples) == (replicas, samples))


def test_a_schedule_that_recomputes_nothing_has_the_higher_bound_where_memory_is_short() -> None:
    request = Request.of("llama-8b", "8xa10g", 64, "roofline", 2048, (), math.inf)
    family = family_of(request, 1, 4)
    part = family.subspaces[0]
    plain, zero_bubble = (subspace_bound(family, part, schedule=name, in_flight=2).time_s for name in ("1f1b", "zero-bubble"))
    assert zero_bubble > plain
    assert subspace_bound(family, part).time_s <= plain * (1 + 2e-3)


def test_what_brings_back_what_a_layer_keeps() -> None:
    model = resolve_model("gpt-1.3b")
    names = [place.op.name for place in model.ops[1:9]]
    layer = zip(names, kept_parts(model)[9:17], strict=True)
    kept = {name: [(model.ops[part.maker].op.name, part.inside) for part in parts] for name, parts in layer}
    assert kept == {
        "norm1": [("norm1", True), ("down", False)], "qkv": [("norm1", True)], "attention": [("attention", True), ("qkv", True),
        ("attention", True)], "out": [], "norm2": [("norm2", True), ("out", True)], "up": [("norm2", True)], "act": [("up", True)],
        "down": [("act", True)],
    }  # fmt: skip
    recovery, shape = Recovery.of(model), model.usual_shape(2)
    number = {op.signature: index for index, op in enumerate(model.distinct_ops)}
    chain = [number[place.op.signature] for place in model.ops]
    total = sum(part.size_bytes.at(shape) for parts in kept_parts(model) for part in parts)
    by_keeper = recovery.bytes_at(shape, 1).sum(axis=1)[chain].sum()
    by_maker = np.array([size.at(shape) for size in recovery.made])[chain].sum()
    assert by_keeper == pytest.approx(total) == pytest.approx(by_maker)
    # A cut after `up` leaves its result, and the hidden state that the residual is, to the next stage.
    up, out = number[model.ops[6].op.signature], number[model.ops[4].op.signature]
    tokens = shape.tokens
    assert recovery.passed[up].at(shape) == tokens * 8192 * 2 and recovery.passed[out].at(shape) == tokens * 2048 * 2


def test_weights_are_divided_where_that_is_the_best_plan(tmp_path: Path) -> None:
    """A long chain of small layers with little memory: replicas of the whole chain that divide its weights beat every pipeline."""
    path = tmp_path / "model.yaml"
    write_json(path, {"base": "gpt-1.3b", "layers": 128, "hidden": 1024, "heads": 16})
    request = Request.of(str(path), "8xh100", 64, "roofline", None, (), 12.1e9, gradients="bf16")
    found = search(request, top=1, prove=False).choices[0]  # without uniform plans
    assert found.plan.num_stages == 1 and found.plan.stages[0].zero > 1
    same = replace(found.plan, stages=(replace(found.plan.stages[0], zero=1),))
    assert not request.estimator.estimate(same).fits


def test_long_micro_batches_divide_their_tokens() -> None:
    request = Request.of("llama-8b", "8xa10g", 64, "roofline", 2048, (), math.inf)
    found = search(request, top=1).choices[0]
    assert all(stage.sequence_parallel for stage in found.plan.stages if stage.degrees.tp > 1)
    off = replace(found.plan, stages=tuple(replace(stage, sequence_parallel=False) for stage in found.plan.stages))
    assert not request.estimator.estimate(off).fits or request.estimator.estimate(off).time_s > found.estimate.time_s


def test_only_plans_faster_than_a_known_one_are_looked_for() -> None:
    request = Request.of("gpt-tiny", "4xa10g", 8, "roofline", None, (), math.inf)
    best_s = search(request, top=1, prove=False).formula_s
    with pytest.raises(InfeasibleError):
        search(request, top=1, prove=False, known_s=best_s * (1 - 1e-6))
    with pytest.raises(InfeasibleError, match="good enough"):
        search(request, top=1, prove=False, worth=lambda bound_s: False)
    assert search(request, top=1, prove=False, known_s=best_s * 1.01).formula_s == pytest.approx(best_s)
