"""Plans for one device of several are those of a cluster that has no other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from penstock.batching.planned import planned_costs
from penstock.clusters import resolve_cluster
from penstock.search.beside_idle import BesideIdle, _parts
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


def on_nodes(tmp_path: Path, *nodes: tuple[int, int], batch: int, micro_batches: tuple[int, ...] = ()) -> Outcome:
    """The best of gpt-small on nodes of one kind, each given as devices and count, behind a slow network."""
    path = tmp_path / "nodes.yaml"
    lines = "".join(
        f"  - {{name: n{at}, device: a10g, gpus: {gpus}, count: {count}, intra: nvlink4, inter: {{bandwidth_gb_per_s: 0.1}}}}\n"
        for at, (gpus, count) in enumerate(nodes)
    )
    path.write_text(f"name: x\nnodes:\n{lines}")
    return search(Request.of("gpt-small", str(path), batch, "roofline", None, micro_batches, math.inf), top=1)


def is_no_slower(outcome: Outcome, part: Outcome) -> bool:
    """Whether a cluster has a plan as fast as a part of it, and a bound that this plan keeps."""
    (best, *_), (own, *_) = outcome.choices, part.choices
    return best.estimate.time_s <= own.estimate.time_s * (1 + 1e-9) and outcome.bound_s <= own.estimate.formula_s


def test_replicas_of_a_node_beside_another_may_have_unequal_shares(tmp_path: Path) -> None:
    """11 micro-batches are 4 + 4 + 3 on the three devices of a node."""
    alone, beside = (on_nodes(tmp_path, (3, count), batch=110, micro_batches=(10,)) for count in (1, 2))
    assert alone.choices[0].plan.micro_batches_per_replica == (4, 4, 3)
    assert is_no_slower(beside, alone)


def test_no_bound_depends_on_which_node_of_a_kind_is_the_first(tmp_path: Path) -> None:
    """Three nodes of one device and one of four, whose pipelines of unequal widths are faster than what single devices can do."""
    (tmp_path / "wide.yaml").write_text(
        "{family: llama, layers: 3, hidden: 48, heads: 2, kv_heads: 2, ffn: 98, seq_length: 128, vocab: 32000, dtype: fp32}"
    )
    kind = "devices: [{name: box, memory_gb: 8, memory_bandwidth_gb_per_s: 600, fp32_tflops: 5}]"
    nodes = ["{name: one, device: box, gpus: 1, count: 3, inter: {bandwidth_gb_per_s: 50, latency_us: 5}}",
             "{name: four, device: box, gpus: 4, intra: pcie3, inter: {bandwidth_gb_per_s: 3}}"]  # fmt: skip
    found = []
    for ordered in (nodes, nodes[::-1]):
        (tmp_path / "mixed.yaml").write_text(f"{kind}\nnodes: [{', '.join(ordered)}]\n")
        asked = Request.of(str(tmp_path / "wide.yaml"), str(tmp_path / "mixed.yaml"), 2, "roofline", None, (), math.inf)
        found.append(search(asked, top=1))
    assert max(outcome.bound_s for outcome in found) <= min(outcome.formula_s for outcome in found) * (1 + 1e-9)


def test_nodes_that_are_too_many_for_a_batch_to_divide_idle() -> None:
    def parts(nodes: str, batch: int) -> list[tuple[int, int]]:
        return [(first, part.num_devices) for first, part in _parts(resolve_cluster(nodes), batch)]

    assert parts("3xg5.12xlarge", 64) == [(0, 1), (0, 4), (0, 8)]
    assert parts("3xg5.12xlarge", 24) == [(0, 1), (0, 4)]  # all of them divide it
    assert parts("1xg5.xlarge+2xg5.12xlarge+1xp3.8xlarge", 24) == [(0, 1), (9, 1), (1, 4), (1, 8), (9, 4)]


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
