"""Bounds of pipelines over several kinds of devices: below every plan, and sharper where the network between them is slow."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun
from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan
from penstock.search import Request
from penstock.search.assemble import assembled, stage_of
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.partition.annealed import AnnealedPipelines
from penstock.search.partition.by_neighbours import NeighbourBound
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.space.families import PlanFamily, Subspace, families


def request_on(*nodes: tuple[str, int], gigabit: float, model: str = "bert-large", batch: int = 64) -> Request:
    runs = []
    for name, count in nodes:
        device = DEVICES[name]
        runs.append(NodeRun(Node(f"{count}x{name}", device, count, device.intra, Link("ethernet", gigabit * 1.25e8, 3e-5))))
    schedules = ("1f1b", "zero-bubble")
    return Request.of(model, "1xa100-40gb", batch, "roofline", None, (), math.inf, schedules).on(Cluster("test", tuple(runs)))


def neighbours_bound_s(family: PlanFamily, subspace: Subspace, known_s: float, good_s: float, divisions: int = 10) -> float:
    """What no plan of a subspace over several kinds that is faster than `known_s` can be below; `good_s` is enough."""
    bound = NeighbourBound(family, subspace, subspace_bound(family, subspace, known_s), known_s, good_s)
    for _ in range(divisions):
        if bound.time_s >= good_s or not bound.sharpen():
            break
    return bound.time_s


@pytest.mark.parametrize("gigabit", [1.0, 10.0, 400.0])
@pytest.mark.parametrize(
    "nodes",
    [(("a100-40gb", 2), ("v100-32gb", 2)), (("a100-40gb", 1), ("t4", 3)), (("h100-80gb", 1), ("a100-40gb", 1), ("a10g", 2))],
    ids=lambda nodes: "+".join(f"{count}{name}" for name, count in nodes),
)
def test_the_bound_is_below_every_plan_of_its_family(nodes: tuple[tuple[str, int], ...], gigabit: float) -> None:
    request = request_on(*nodes, gigabit=gigabit)
    for family in families(request):
        found = best_pipeline(family, math.inf)
        if found is None or len(found.plan.ranks) == 1:  # one device alone, which waits for no other, is bounded by itself
            continue
        known_s = found.estimate.time_s * (1 + 1e-6)
        bounds = [neighbours_bound_s(family, part, known_s, known_s, 5) for part in family.subspaces]
        assert min(bounds) <= found.estimate.time_s
        plain = [subspace_bound(family, part, known_s).time_s for part in family.subspaces]
        assert all(sharper >= bound for sharper, bound in zip(bounds, plain, strict=True))


def test_a_slow_network_is_seen() -> None:
    """One device of each kind in a replica: both spend on messages what they do not spend on ops, or one of them stays idle."""
    slow, fast = (request_on(("a100-40gb", 4), ("v100-32gb", 4), gigabit=gigabit, batch=512) for gigabit in (10.0, 3200.0))
    sharper = []
    for request in (slow, fast):
        family = next(family for family in families(request) if family.replicas == 4 and family.samples == 4)
        (part,) = [part for part in family.subspaces if part.max_stages > 1]
        sharper.append(neighbours_bound_s(family, part, math.inf, math.inf) / subspace_bound(family, part, math.inf).time_s)
    assert sharper[0] > 1.1 * sharper[1] and sharper[1] < 1.15  # on a fast network only whole ops and stages count


def test_one_kind_has_the_plain_bound() -> None:
    request = request_on(("a100-40gb", 4), gigabit=10.0)
    for family in families(request):
        for part in family.subspaces:
            assert neighbours_bound_s(family, part, math.inf, math.inf) == subspace_bound(family, part, math.inf).time_s


def test_a_pass_of_one_stage_uses_one_kind() -> None:
    request = request_on(("a100-40gb", 2), ("v100-32gb", 2), gigabit=10.0)
    family = next(iter(families(request)))
    part = replace(family.subspaces[0], max_stages=1)
    alone = [replace(part, options=tuple(option for option in part.options if option.pool == pool)) for pool in (0, 1)]
    plain_s = subspace_bound(family, part, math.inf).time_s
    least_s = min(subspace_bound(family, one, math.inf).time_s for one in alone)
    assert neighbours_bound_s(family, part, math.inf, math.inf) == max(plain_s, least_s)


def request_of_nodes(kinds: dict[str, tuple[int, int]], gigabits: list[float], model: str) -> Request:
    """So many nodes of so many devices of each kind, each kind with a network of its own."""
    runs = []
    for (name, (count, size)), gigabit in zip(kinds.items(), gigabits, strict=True):
        device = DEVICES[name]
        link = Link("ethernet", gigabit * 1.25e8, 3e-5)
        runs.append(NodeRun(Node(f"{size}x{name}", device, size, device.intra, link, num_rails=2), count))
    schedules = ("1f1b", "zero-bubble")
    return Request.of(model, "1xa100-40gb", 32, "roofline", None, (), math.inf, schedules).on(Cluster("test", tuple(runs)))


def drawn_plan(data: st.DataObject, family: PlanFamily) -> Plan | None:
    """Any plan of a family: stages of any options, in one of both orders of ranks; None where devices are left too few for the next one."""
    taken, found, num_ops = [0] * len(family.pools), [], family.request.model.num_ops
    together, schedule = data.draw(st.booleans()), data.draw(st.sampled_from(["1f1b", "zero-bubble"]))
    cuts = sorted({0, num_ops, *data.draw(st.lists(st.integers(1, num_ops - 1), max_size=5))})
    for first, last in pairwise(cuts):
        fitting = []
        for option in family.subspaces[0].options:
            start, node = taken[option.pool], family.pools[option.pool].per_node
            end = start + option.num_devices
            inside = start // node == (end - 1) // node or (start % node == 0 and end % node == 0)
            fitting += [option] if inside and end <= family.pools[option.pool].num_devices else []
        if not fitting:
            return None
        option = data.draw(st.sampled_from(fitting))
        found.append(stage_of(first, last, option, family.ranks(option, taken[option.pool], together)))
        taken[option.pool] += option.num_devices
    return assembled(family.request.frame, found, family.samples, schedule)


@given(
    data=st.data(), networks=st.lists(st.sampled_from([1.0, 10.0, 100.0]), min_size=2, max_size=2),
    model=st.sampled_from(["gpt-350m", "bert-large"]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_no_plan_is_below_the_bound(data: st.DataObject, networks: list[float], model: str) -> None:
    """Whatever its stages, their order, the order of ranks and the schedule: not even such as nobody would look for."""
    sizes = [(data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 4]))) for _ in range(2)]
    request = request_of_nodes(dict(zip(["a100-40gb", "v100-32gb"], sizes, strict=True)), networks, model)
    family = data.draw(st.sampled_from([family for family in families(request) if family.subspaces]))
    plan = drawn_plan(data, family)
    if plan is None or len(plan.ranks) == 1 or check_plan(plan, request.model, request.cluster):
        return  # one device alone is bounded by itself
    estimate, divisions = request.estimator.estimate(plan), data.draw(st.sampled_from([2, 15]))  # devices are counted in narrow boxes
    time_s = estimate.formula_s
    if not estimate.fits:
        return
    assert neighbours_bound_s(family, family.subspaces[0], time_s * (1 + 1e-6), math.inf, divisions) <= time_s * (1 + 1e-9)


@given(
    data=st.data(), networks=st.lists(st.sampled_from([1.0, 10.0, 100.0]), min_size=2, max_size=2),
    model=st.sampled_from(["gpt-350m", "bert-large"]),
)  # fmt: skip
@settings(max_examples=8, deadline=None)
def test_no_annealed_pipeline_is_below_the_bound(data: st.DataObject, networks: list[float], model: str) -> None:
    """The best pipelines there are, in nodes that they fill and with stages of all sizes."""
    sizes = [(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([2, 4]))) for _ in range(2)]
    request = request_of_nodes(dict(zip(["a100-40gb", "v100-32gb"], sizes, strict=True)), networks, model)
    family = data.draw(st.sampled_from([family for family in families(request) if family.subspaces and family.mixed]))
    found = AnnealedPipelines(family).best(10_000, 2)
    if found is not None:
        time_s = found.estimate.formula_s
        assert neighbours_bound_s(family, family.subspaces[0], time_s * (1 + 1e-6), math.inf, 8) <= time_s * (1 + 1e-9)


def test_dividing_plans_by_their_slowest_stage_makes_the_bound_sharper() -> None:
    """Stages of few devices wait at a slow network, and weights behind it are slow to sum: parts of stages would do both for nothing."""
    request = request_of_nodes({"a100-40gb": (2, 4), "v100-32gb": (4, 4)}, [100.0, 25.0], "gpt-350m")
    family = next(family for family in families(request) if (family.replicas, family.samples) == (2, 2))
    known_s = best_pipeline(family, math.inf).estimate.formula_s
    whole, divided = (neighbours_bound_s(family, family.subspaces[0], known_s, known_s, divisions) for divisions in (1, 10))
    assert subspace_bound(family, family.subspaces[0], known_s).time_s < whole < 0.99 * divided
