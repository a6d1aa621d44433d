"""Links that stages have at least: those of the estimate where both stages and their nodes are known."""

from __future__ import annotations

import pytest

from penstock.search.assemble import assembled, stage_of
from penstock.search.partition.least_links import LeastLinks
from penstock.search.space.families import families
from tests.search.partition.test_by_neighbours import request_of_nodes


@pytest.mark.parametrize("other", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("pools", [(0, 1), (1, 1)], ids=["kinds", "nodes"])
def test_messages_elsewhere_are_those_of_the_estimate(pools: tuple[int, int], size: int, other: int) -> None:
    """Two stages in nodes of four, whose other devices are idle; a rank of the smaller one serves several of the larger one."""
    request = request_of_nodes({"a100-40gb": (1, 4), "v100-32gb": (2, 4)}, [10.0, 25.0], "gpt-350m")
    family = next(family for family in families(request) if (family.replicas, family.samples) == (1, 4))
    sizes = zip(pools, (other, size), strict=True)
    options = [next(o for o in family.options if (o.pool, o.num_devices, o.tp) == (pool, number, 1)) for pool, number in sizes]
    middle = request.model.num_ops // 2
    places = zip(options, ((0, middle), (middle, request.model.num_ops)), (0, 4 if pools == (1, 1) else 0), strict=True)
    stages = [stage_of(*ops, option, family.ranks(option, start, together=False)) for option, ops, start in places]
    plan = assembled(request.frame, stages, 4)
    links = [LeastLinks(family.prices, pool, side_by_side=True, unit_devices=1) for pool in pools]
    (latency_s, byte_s), (sent, _) = links[1].far(options[1], options[0], links[0]), family.prices.messages.cut_bytes(options[1])
    assert request.estimator.estimate(plan).stages[1].work.transfer_in_s == pytest.approx(latency_s + byte_s * sent[middle])


def test_stages_stay_in_a_node_only_as_far_as_it_and_the_replica_go() -> None:
    """And where replicas of a stage are side by side, nothing is known of it."""
    request = request_of_nodes({"a100-40gb": (3, 2), "v100-32gb": (3, 4)}, [10.0, 25.0], "gpt-350m")
    rooms = {}
    for family in families(request):
        if family.replicas in (1, 2, 4) and all(pool.num_devices for pool in family.pools):
            rooms[family.replicas] = [LeastLinks(family.prices, pool, side_by_side=True, unit_devices=1).room for pool in (0, 1)]
            assert LeastLinks(family.prices, 0, side_by_side=False, unit_devices=1).room == 0
    assert rooms == {1: [2, 4], 2: [2, 4], 4: [1, 3]}
