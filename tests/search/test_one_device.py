"""Plans for one device of several are those of a cluster that has no other."""

from __future__ import annotations

import math

import pytest

from penstock.batching.planned import planned_costs
from penstock.search.engine import search
from penstock.search.one_device import OneDevice
from penstock.search.space.request import Request


def asked(cluster: str, limit_bytes: float = math.inf) -> Request:
    """A small model and a batch of two samples, which a slow network divides badly."""
    return Request.of("gpt-tiny", cluster, 2, "roofline", None, (), limit_bytes)


@pytest.mark.parametrize("cluster", ["2xg5.xlarge", "1xg2-standard-4+1xg5.xlarge"])
@pytest.mark.parametrize("limit_bytes", [math.inf, 0.7e9])
def test_a_device_beside_idle_ones_is_as_fast_as_alone(cluster: str, limit_bytes: float) -> None:
    """It waits for no other, and needs no memory to talk: 0.7 GB would not do with it."""
    one, several = (search(asked(name, limit_bytes), top=1) for name in ("1xg5.xlarge", cluster))
    best, own = several.choices[0], one.choices[0]
    assert (best.estimate.time_s, best.estimate.peak_bytes) == (own.estimate.time_s, own.estimate.peak_bytes)
    assert len(best.plan.ranks) == 1 and several.bound_s <= best.estimate.formula_s


def test_batches_of_it_take_as_long_as_alone() -> None:
    grids = []
    for name in ("1xg5.xlarge", "2xg5.xlarge"):
        request = asked(name)
        plan = search(request, top=1).choices[0].plan
        costs = planned_costs(plan, request.model, request.cluster, request.estimator.source, 64, layouts=("packed",))
        grids.append(costs.layouts["packed"].values.tolist())
    assert grids[0] == grids[1]


def test_no_device_idles_where_all_nodes_are_to_be_used() -> None:
    request = asked("2xg5.xlarge")
    assert OneDevice(request).bound() < OneDevice(request.on_all_of(request.cluster)).bound() == math.inf
