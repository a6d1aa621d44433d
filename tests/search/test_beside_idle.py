"""Plans for one device of several are those of a cluster that has no other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.batching.planned import planned_costs
from penstock.search.beside_idle import BesideIdle
from penstock.search.engine import Outcome, search
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


@pytest.mark.parametrize("micro_batches", [(), (1, 2)])
def test_a_node_behind_a_slow_network_is_as_fast_as_alone(micro_batches: tuple[int, ...], tmp_path: Path) -> None:
    """Stages, replicas and stages that idle at the end of a cluster all speak to the other node, at 0.1 GB/s."""

    def found(count: int) -> Outcome:
        path = tmp_path / "slow.yaml"
        path.write_text(f"name: x\nnodes: [{{name: n, device: a10g, gpus: 2, count: {count}, inter: {{bandwidth_gb_per_s: 0.1}}}}]\n")
        return search(Request.of("gpt-small", str(path), 16, "roofline", None, micro_batches, math.inf), top=1)

    alone, beside = found(1), found(2)
    best, own = beside.choices[0], alone.choices[0]
    assert best.estimate.time_s <= own.estimate.time_s * (1 + 1e-9) and beside.bound_s <= best.estimate.formula_s


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
    assert BesideIdle(request).bound() < BesideIdle(request.on_all_of(request.cluster)).bound() == math.inf
