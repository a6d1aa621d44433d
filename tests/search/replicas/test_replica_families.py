"""Replicas on different kinds of devices: where they lie, plans against trying every plan, bounds, and odd clusters."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun, cluster_to_dict, resolve_cluster
from penstock.costs.roofline import Roofline
from penstock.errors import InfeasibleError
from penstock.models.catalog import model_from_mapping
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.ranks import packed_replicas
from penstock.plans.validity import check_plan
from penstock.search import Outcome, Request, search, search_plans
from penstock.search.partition.pipelines import best_pipeline
from penstock.search.replicas.replica_families import ReplicaFamily, replica_families
from penstock.search.replicas.shares import rebalanced
from penstock.search.space.device_kinds import kinds_of
from penstock.search.space.families import families
from penstock.timing.estimate import Estimator

GIGABIT = 1.25e8


def two_nodes(first: tuple[str, int], *others: tuple[str, int], bytes_per_s: float = 10 * GIGABIT) -> Cluster:
    """Nodes of some devices each, joined by Ethernet."""
    runs = []
    for name, count in (first, *others):
        device = DEVICES[name]
        runs.append(NodeRun(Node(f"{count}x{name}", device, count, device.intra, Link("ethernet", bytes_per_s, 3e-5))))
    return Cluster("test", tuple(runs))


def request_on(cluster: Cluster, batch: int, model: str = "bert-large", schedules: tuple[str, ...] = ("1f1b",)) -> Request:
    # In fp16, which V100s and T4s have too.
    request = Request.of(model, "1xa100-40gb", batch, "roofline", None, (), math.inf, schedules, "fp16", "fp16")
    return request.on(cluster)


def test_replicas_fill_nodes_then_kinds_then_the_cluster() -> None:
    cluster = two_nodes(("a100-40gb", 3), ("a100-40gb", 3), ("v100-32gb", 5))
    kinds = [kind.ranks for kind in kinds_of(cluster)]
    fast, slow = kinds
    assert packed_replicas(cluster, [fast], 1, 2) == (((0,), (1,)), ((3,), (4,)), ((2,), (5,)))
    assert packed_replicas(cluster, [fast], 2, 1) == (((0, 1),), ((3, 4),))
    assert packed_replicas(cluster, [slow], 2, 2) == (((6, 7), (8, 9)),)
    assert packed_replicas(cluster, [fast], 4, 1) == ()
    for tp, depth in itertools.product((1, 2, 4), range(1, 12)):
        replicas = packed_replicas(cluster, kinds, tp, depth)
        ranks = [rank for replica in replicas for group in replica for rank in group]
        assert len(ranks) == len(set(ranks)) == len(replicas) * tp * depth
        for group in (group for replica in replicas for group in replica):
            assert len({cluster.node_index(rank) for rank in group}) == 1
        groups = sum(run.num_devices // tp for run in cluster.runs)
        assert len(replicas) == groups // depth


def shares_of(total: int, replicas: int) -> Iterator[tuple[int, ...]]:
    if replicas == 1:
        yield (total,)
        return
    for first in range(1, total - replicas + 2):
        yield from ((first, *rest) for rest in shares_of(total - first, replicas - 1))


def by_trying(family: ReplicaFamily) -> float:
    """The best of all cuts and all shares, by the estimate; nothing is recomputed."""
    request, depth = family.layout.request, family.depth
    num_ops, best = request.model.num_ops, math.inf
    for inner in itertools.combinations(range(1, num_ops), depth - 1):
        stages = tuple(
            Stage(
                first,
                last,
                tuple(replica[index] for replica in family.replicas),
                Degrees(family.tp),
                zero=int(len(family.replicas) > 1),
                sequence_parallel=family.sequence,
            )
            for index, (first, last) in enumerate(itertools.pairwise((0, *inner, num_ops)))
        )
        for shares in shares_of(family.total, len(family.replicas)):
            batching = replace(request.frame.micro_batching, samples=family.samples, per_replica=shares)
            plan = replace(request.frame, stages=stages, num_replicas=len(family.replicas), micro_batching=batching)
            estimate = request.estimator.estimate(plan)
            best = min(best, estimate.time_s) if estimate.fits else best
    return best


def small_request(cluster: Cluster, batch: int) -> Request:
    """Two layers of a width at which a step takes milliseconds."""
    sizes = {"layers": 2, "hidden": 1024, "heads": 16, "seq_length": 512, "vocab": 8192, "tied": False, "dtype": "fp16"}
    model = model_from_mapping({"family": "gpt", **sizes}, "test", "small")
    frame = Plan({"family": "gpt", **sizes}, cluster_to_dict(cluster), batch, (Stage(0, model.num_ops, ((0,),)),),
                 MicroBatching("padded", "fixed", 1), seq_length=512, precision=model.dtype)  # fmt: skip
    return Request(model, cluster, frame, Estimator(model, cluster, Roofline()), (), math.inf, ("1f1b",))


CLUSTERS = (
    (("a100-40gb", 1), ("v100-32gb", 1)), (("a100-40gb", 2), ("t4", 2)), (("h100-80gb", 1), ("a100-40gb", 1), ("t4", 1)),
    (("a100-40gb", 3), ("a10g", 1)), (("v100-32gb", 2), ("a10g", 3)),
)  # fmt: skip


@pytest.mark.parametrize("nodes", CLUSTERS, ids=lambda nodes: "+".join(f"{count}{name}" for name, count in nodes))
def test_small_clusters_equal_trying_every_plan(nodes: tuple[tuple[str, int], ...]) -> None:
    """Every family of up to three stages: the plan found is the best of all, and the bounds are below it."""
    request = small_request(two_nodes(*nodes), 6)
    tried = 0
    for family in replica_families(request):
        if family.depth > 3 or len(family.replicas) > 3:
            continue
        expected, found = by_trying(family), family.best(math.inf)
        assert found is not None
        plan, estimate = found.plan, found.estimate
        assert check_plan(plan, request.model, request.cluster) == [] and estimate.fits
        assert expected * (1 - 1e-9) <= estimate.time_s <= expected * 1.005
        tried += 1
        if len(plan.ranks) > 1:  # one device alone, which waits for no other, is bounded by itself
            assert family.bound_s <= expected * (1 + 1e-9)
            assert family.sharper_bound_s(expected * 1.01) <= expected * (1 + 1e-9)
    assert tried >= 8


@cache
def bert_on_two_kinds() -> tuple[Request, Outcome]:
    request = request_on(two_nodes(("a100-40gb", 4), ("v100-32gb", 4)), 2048, schedules=("1f1b", "zero-bubble"))
    return request, search(request, top=3, prove=False)


def test_unequal_shares_win_where_the_network_is_slow() -> None:
    """A replica on each device of both kinds: no activation crosses the network, and nobody waits for the slower kind."""
    request, outcome = bert_on_two_kinds()
    best = outcome.choices[0]
    shares = best.plan.micro_batching.per_replica
    assert best.plan.num_stages == 1 and len(best.plan.ranks) == 8
    assert len(set(shares[:4])) == len(set(shares[4:])) == 1 and shares[0] > shares[4]
    assert check_plan(best.plan, request.model, request.cluster) == [] and best.estimate.fits
    assert outcome.bound_s <= best.estimate.time_s
    assert all(best_pipeline(family, best.estimate.time_s / 0.9) is None for family in families(request))
    equal = replace(best.plan, micro_batching=replace(best.plan.micro_batching, per_replica=()))
    assert best.estimate.time_s < 0.8 * request.estimator.estimate(equal).time_s


def test_plans_keep_the_best_shares() -> None:
    request, outcome = bert_on_two_kinds()
    for choice in outcome.choices:
        again = rebalanced(request.estimator, choice.plan)
        assert request.estimator.estimate(again).time_s >= choice.estimate.time_s * (1 - 1e-9)


ODD = {
    "a node of eight and one of three": ((("a100-40gb", 8), ("a100-40gb", 3)), "gpt-350m", 61),
    "three kinds": ((("h100-80gb", 2), ("a100-40gb", 3), ("t4", 1)), "gpt-350m", 48),
    "seven devices, a prime batch": ((("a100-40gb", 7),), "gpt-350m", 31),
    "five kinds of one": ((("t4", 1), ("a100-40gb", 1), ("v100-32gb", 1), ("a10g", 1), ("h100-80gb", 1)), "bert-large", 97),
    "more devices than samples": ((("a100-40gb", 3), ("a10g", 5)), "gpt-350m", 2),
    "one sample": ((("a100-40gb", 2), ("t4", 3)), "gpt-tiny", 1),
    "images": ((("t4", 3), ("v100-32gb", 2)), "resnet-50", 37),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_clusters(name: str) -> None:
    nodes, model, batch = ODD[name]
    request = request_on(two_nodes(*nodes), batch, model)
    outcome = search(request, top=3)
    for choice in outcome.choices:
        assert check_plan(choice.plan, request.model, request.cluster) == [] and choice.estimate.fits
        assert request.estimator.estimate(replace(choice.plan, predicted=None)).time_s == pytest.approx(choice.estimate.formula_s)
    assert 0 < outcome.bound_s <= outcome.formula_s
    if request.cluster.num_devices < 8:
        assert search(request, top=3) == outcome


def test_a_batch_that_nothing_divides_is_shared_out() -> None:
    """Thirty-one samples on seven devices: only a pipeline of all seven has equal shares, and it is slower."""
    request = request_on(two_nodes(("a100-40gb", 7)), 31, "gpt-350m")
    best = search(request, top=1).choices[0]
    assert best.plan.micro_batches_per_replica == (5, 5, 5, 4, 4, 4, 4)
    pipelines = [found.estimate.time_s for family in families(request) if (found := best_pipeline(family, math.inf)) is not None]
    assert best.estimate.time_s < 0.96 * min(pipelines)


def test_a_kind_with_too_little_memory_is_left_out() -> None:
    """A t4 cannot hold a stage of a replica of two stages; with the fast kind alone there is a plan."""
    request = request_on(two_nodes(("a100-80gb", 4), ("t4", 4)), 64, "gpt-6.7b")
    found = {
        family.layout.kinds: plan
        for family in replica_families(request)
        if family.depth == 2 and family.tp == 2 and family.samples == 1 and (plan := family.best(math.inf))
    }
    assert set(found) == {(0,)}
    assert {request.cluster.device(rank).name for rank in found[0,].plan.ranks} == {"a100-80gb"}


def test_every_class_keeps_its_memory() -> None:
    """With a limit below what one kind would like, more is recomputed, and every replica still fits."""
    free = search_plans("gpt-350m", "2xa100-40gb+2xv100-32gb", 64, schedules=("1f1b",), top=1).choices[0]
    tight = search_plans(
        "gpt-350m", "2xa100-40gb+2xv100-32gb", 64, schedules=("1f1b",), top=1, memory_limit_bytes=0.6 * free.estimate.peak_bytes
    ).choices[0]
    cluster = resolve_cluster("2xa100-40gb+2xv100-32gb")
    assert tight.estimate.fits and tight.estimate.peak_bytes <= 0.6 * free.estimate.peak_bytes
    assert tight.estimate.time_s >= free.estimate.time_s and check_plan(tight.plan, cluster=cluster) == []


def test_large_clusters_are_left_to_the_other_families() -> None:
    request = request_on(two_nodes(("a100-40gb", 8)), 64, "gpt-350m")
    many = Cluster("many", tuple(replace(run, count=200) for run in request.cluster.runs))
    assert list(replica_families(request.on(many))) == []


def test_equal_clusters_and_batches_need_no_shares() -> None:
    """On eight equal devices, powers of two of everything leave nothing that `families` has not."""
    for family in replica_families(request_on(two_nodes(("a100-40gb", 8)), 64, "gpt-350m")):
        assert len(family.replicas) * family.tp * family.depth < 8 or family.total % len(family.replicas)


def test_bounds_hold_for_random_plans() -> None:
    """Any shares, any cuts: nothing is below the bounds of its family."""
    numbers = random.Random(4)
    request = request_on(two_nodes(("a100-40gb", 4), ("v100-32gb", 5)), 24, "bert-large", ("1f1b", "zero-bubble"))
    chosen = [family for family in replica_families(request) if 1 < family.depth < 4 and len(family.replicas) > 1]
    for family in numbers.sample(chosen, 12):
        num_ops, best_s = request.model.num_ops, math.inf
        for _ in range(30):
            inner = sorted(numbers.sample(range(1, num_ops), family.depth - 1))
            stages = tuple(
                Stage(
                    first,
                    last,
                    tuple(replica[index] for replica in family.replicas),
                    Degrees(family.tp),
                    zero=1,
                    sequence_parallel=family.sequence,
                )
                for index, (first, last) in enumerate(itertools.pairwise((0, *inner, num_ops)))
            )
            batching = replace(request.frame.micro_batching, samples=family.samples)
            plan = replace(request.frame, stages=stages, num_replicas=len(family.replicas), micro_batching=batching,
                           schedule=numbers.choice(["1f1b", "zero-bubble"]))  # fmt: skip
            estimate = request.estimator.estimate(rebalanced(request.estimator, plan))
            best_s = min(best_s, estimate.time_s) if estimate.fits else best_s
        assert family.bound_s <= best_s * (1 + 1e-9)
        assert family.sharper_bound_s(best_s * 1.001) <= best_s * (1 + 1e-9)


def test_what_is_missing_is_said_of_the_device_that_lacks_it() -> None:
    """The fullest stage may lie on the larger device; the one that does not fit is on the smaller."""
    with pytest.raises(InfeasibleError) as refused:
        search(request_on(two_nodes(("t4", 6), ("a10g", 4)), 32, "gpt-13b"), top=1)
    needed, limit = re.search(r"a device needs is ([0-9.]+) GB.* has ([0-9.]+) GB", str(refused.value)).groups()  # type: ignore[union-attr]
    assert float(needed) > float(limit)
