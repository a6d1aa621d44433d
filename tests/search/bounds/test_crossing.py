"""Bounds of pipelines over several kinds of devices: below every plan, and sharper where the network between them is slow."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun
from penstock.search import Request
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.bounds.crossing import crossing_bound_s
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.space.families import families


def request_on(*nodes: tuple[str, int], gigabit: float, model: str = "bert-large", batch: int = 64) -> Request:
    runs = []
    for name, count in nodes:
        device = DEVICES[name]
        runs.append(NodeRun(Node(f"{count}x{name}", device, count, device.intra, Link("ethernet", gigabit * 1.25e8, 3e-5))))
    schedules = ("1f1b", "zero-bubble")
    return Request.of(model, "1xa100-40gb", batch, "roofline", None, (), math.inf, schedules).on(Cluster("test", tuple(runs)))


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
        if found is None:
            continue
        known_s = found.estimate.time_s * (1 + 1e-6)
        bounds = [crossing_bound_s(family, part, known_s) for part in family.subspaces]
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
        sharper.append(crossing_bound_s(family, part, math.inf) / subspace_bound(family, part, math.inf).time_s)
    assert sharper[0] > 1.15 and sharper[1] == pytest.approx(1.0, abs=0.02)


def test_one_kind_has_the_plain_bound() -> None:
    request = request_on(("a100-40gb", 4), gigabit=10.0)
    for family in families(request):
        for part in family.subspaces:
            assert crossing_bound_s(family, part, math.inf) == subspace_bound(family, part, math.inf).time_s


def test_a_pass_of_one_stage_uses_one_kind() -> None:
    request = request_on(("a100-40gb", 2), ("v100-32gb", 2), gigabit=10.0)
    family = next(iter(families(request)))
    part = replace(family.subspaces[0], max_stages=1)
    alone = [replace(part, options=tuple(option for option in part.options if option.pool == pool)) for pool in (0, 1)]
    plain_s = subspace_bound(family, part, math.inf).time_s
    assert crossing_bound_s(family, part, math.inf) == max(plain_s, min(subspace_bound(family, one, math.inf).time_s for one in alone))
