"""Ranks, nodes and links of mixed clusters; the large ones stay fast."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import (
    Cluster,
    Link,
    LinkOverride,
    NodeRun,
    cluster_from_dict,
    cluster_to_dict,
    resolve_cluster,
    resolve_instance,
)
from penstock.clusters.hardware import slowest
from penstock.errors import InputError

MIXED = resolve_cluster("2xp4d.24xlarge+3xg5.24xlarge+1xg5.xlarge")
NODES = [resolve_instance(name) for name in ("p3.2xlarge", "p4d.24xlarge", "g5.12xlarge", "g2-standard-24")]


def _override(first: tuple[int, int], second: tuple[int, int], gb_per_s: float, across: bool = False) -> LinkOverride:
    return LinkOverride((first,), (second,), Link("test", gb_per_s * 1e9, 1e-6), across)


def test_ranks_are_numbered_node_by_node() -> None:
    assert (MIXED.num_devices, MIXED.num_nodes) == (29, 6)
    assert [MIXED.node_index(rank) for rank in (0, 7, 8, 15, 16, 19, 20, 27, 28)] == [0, 0, 1, 1, 2, 2, 3, 4, 5]
    assert [MIXED.device(rank).name for rank in (0, 15, 16, 28)] == ["a100-40gb", "a100-40gb", "a10g", "a10g"]
    assert [(device.name, count) for device, count in MIXED.kinds] == [("a100-40gb", 16), ("a10g", 13)]
    assert [MIXED.ranks_of(node) for node in (0, 1, 2, 4, 5)] == [range(8), range(8, 16), range(16, 20), range(24, 28), range(28, 29)]
    assert MIXED.node_of(28).name == "g5.xlarge" and MIXED.device_id(17) == 1
    assert [node.num_devices for node in MIXED.nodes] == [8, 8, 4, 4, 4, 1]


def test_of_equally_fast_links_the_one_with_the_longer_delay_is_slower() -> None:
    near, far = Link("near", 1e9, 1e-6), Link("far", 1e9, 5e-6)
    assert slowest((near, far)) == slowest((far, near)) == far


def test_a_device_alone_is_the_same_accelerator_and_works_alone() -> None:
    """The third rank of this node is its accelerator 5."""
    node = dataclasses.replace(NODES[2], device_ids=(7, 6, 5, 4))
    cluster = Cluster("odd", (NodeRun(NODES[1]), NodeRun(node)))
    assert [cluster.device_id(rank) for rank in (3, 8, 10)] == [3, 7, 5]
    one = cluster.one_of(10)
    assert (one.num_devices, one.device_id(0), one.device(0)) == (1, 5, node.device)
    assert cluster.one_of(3).device_id(0) == 0
    assert (cluster.num_at_work, dataclasses.replace(cluster, at_work=3).num_at_work, one.num_at_work) == (12, 3, 1)


def test_links_between_mixed_nodes() -> None:
    p4d, g5, small = (resolve_instance(name) for name in ("p4d.24xlarge", "g5.24xlarge", "g5.xlarge"))
    assert MIXED.link(0, 7) == p4d.intra
    assert MIXED.link(16, 19) == g5.intra
    assert MIXED.link(0, 8) == p4d.inter
    assert MIXED.link(0, 16) == MIXED.link(16, 0) == g5.inter
    assert MIXED.link(0, 28) == small.inter
    assert MIXED.slowest_link([0, 3, 16]) == g5.inter
    assert MIXED.slowest_link(range(8)) == p4d.intra


def test_one_pair_drives_one_rail_and_many_share_the_node() -> None:
    cluster = resolve_cluster("2xp5.48xlarge+1xg5.xlarge")
    assert cluster.link(0, 8).bandwidth_bytes_per_s == 400e9
    assert cluster.flow_bandwidth_bytes_per_s(0, 8) == cluster.flow_bandwidth_bytes_per_s(0, 8, num_flows=8) == 50e9
    assert cluster.flow_bandwidth_bytes_per_s(0, 8, num_flows=16) == 25e9
    assert cluster.flow_bandwidth_bytes_per_s(0, 16) == 1.25e9
    assert cluster.flow_bandwidth_bytes_per_s(0, 1, num_flows=8) == 450e9


def test_later_overrides_win_and_node_overrides_leave_nodes_alone() -> None:
    cluster = dataclasses.replace(MIXED, overrides=(_override((0, 16), (0, 16), 1, across=True), _override((0, 1), (8, 9), 2)))
    assert cluster.link(0, 1) == MIXED.link(0, 1)
    assert cluster.link(1, 8).bandwidth_bytes_per_s == 1e9
    assert cluster.link(8, 0).bandwidth_bytes_per_s == cluster.flow_bandwidth_bytes_per_s(0, 8) == 2e9
    assert cluster.slowest_link([0, 8]).bandwidth_bytes_per_s == 2e9
    assert cluster.slowest_link([0, 1, 8]).bandwidth_bytes_per_s == 1e9


def test_wrong_questions_are_refused() -> None:
    for rank in (-1, 29):
        with pytest.raises(IndexError, match="ranks 0 to 28"):
            MIXED.device(rank)
    with pytest.raises(IndexError, match="nodes 0 to 5"):
        MIXED.ranks_of(6)
    with pytest.raises(ValueError, match="fewer than two"):
        MIXED.slowest_link([3, 3])
    with pytest.raises(InputError, match=r"ranks 28 to 29.*ranks 0 to 28"):
        dataclasses.replace(MIXED, overrides=(_override((0, 1), (28, 30), 1),))
    with pytest.raises(InputError, match="no nodes"):
        Cluster("empty", ())
    with pytest.raises(InputError, match="count is 0"):
        NodeRun(NODES[0], 0)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Mixed clusters with a few overrides, some between nodes only."""
    runs = draw(st.lists(st.builds(NodeRun, st.sampled_from(NODES), st.integers(1, 3)), min_size=1, max_size=4))
    cluster = Cluster("drawn", tuple(runs))
    bounds = st.tuples(*[st.integers(0, cluster.num_devices)] * 2).map(sorted).filter(lambda pair: pair[0] < pair[1]).map(tuple)
    drawn = draw(st.lists(st.tuples(bounds, bounds, st.sampled_from([0.5, 20, 1000]), st.booleans()), max_size=4))
    return dataclasses.replace(cluster, overrides=tuple(_override(*values) for values in drawn))


@settings(deadline=None)
@given(clusters(), st.data())
def test_slowest_link_equals_brute_force(cluster: Cluster, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, cluster.num_devices - 1), max_size=12, unique=True))
    if len(ranks) > 1:
        assert cluster.slowest_link(ranks) == slowest(cluster.link(a, b) for a, b in combinations(ranks, 2))


@settings(deadline=None)
@given(clusters())
def test_pairs_that_are_alike_have_one_link(cluster: Cluster) -> None:
    """What one of them takes stands for all of them, also while they share a network."""
    met: dict[tuple[int, ...], tuple[object, ...]] = {}
    for a, b in product(range(cluster.num_devices), repeat=2):
        rates = [cluster.flow_bandwidth_bytes_per_s(a, b, flows) for flows in (1, 8, 9)]
        found = (a == b, cluster.link(a, b), *rates)
        assert met.setdefault(cluster.link_likeness(a, b), found) == found


@settings(deadline=None)
@given(clusters())
def test_places_agree_with_a_plain_walk(cluster: Cluster) -> None:
    walked = [(index, place, node) for index, node in enumerate(cluster.nodes) for place in range(node.num_devices)]
    for rank, (index, place, node) in enumerate(walked):
        assert (cluster.node_index(rank), cluster.device_id(rank), cluster.node_of(rank)) == (index, place, node)
        assert cluster.ranks_of(index)[place] == rank
    assert len(walked) == cluster.num_devices == sum(count for _, count in cluster.kinds)


@settings(deadline=None)
@given(clusters())
def test_round_trip_through_json(cluster: Cluster) -> None:
    plain = cluster_to_dict(cluster)
    assert json.loads(json.dumps(plain)) == plain
    assert cluster_from_dict(json.loads(json.dumps(plain))) == cluster


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("runs",), [], "no nodes"),
        (("runs",), 3, r"\$\.runs"),
        (("runs", 0, "count"), 0, "count is 0"),
        (("runs", 0, "node", "device", "memory_bytes"), "much", r"\$\.runs\[0\]\.node\.device\.memory_bytes"),
        (("runs", 0, "node", "intra", "bandwidth_bytes_per_s"), -1.0, "bandwidth_bytes_per_s is -1.0"),
    ],
)
def test_a_spoilt_dict_is_refused(path: tuple[str | int, ...], value: object, message: str) -> None:
    plain = cluster_to_dict(MIXED)
    target = plain
    for key in path[:-1]:
        target = target[key]  # type: ignore[index]
    target[path[-1]] = value  # type: ignore[index]
    with pytest.raises(InputError, match=message):
        cluster_from_dict(plain)


def test_sixteen_thousand_devices_take_few_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slowest of 134 million links is found by looking at a handful."""
    cluster = resolve_cluster("1024xp5.48xlarge+1024xp4d.24xlarge")
    cluster = dataclasses.replace(cluster, overrides=(_override((0, 8192), (8192, 16384), 1, across=True),))
    assert cluster.num_devices == 16384
    assert all(cluster.device(rank) is cluster.node_of(rank).device for rank in range(16384))
    assert cluster.link(0, 16383).bandwidth_bytes_per_s == 1e9
    looks: list[tuple[int, int]] = []
    usual = Cluster.link
    monkeypatch.setattr(Cluster, "link", lambda self, a, b: (looks.append((a, b)), usual(self, a, b))[1])
    assert cluster.slowest_link(range(16384)).bandwidth_bytes_per_s == 1e9 and len(looks) < 100
    assert len(json.dumps(cluster_to_dict(cluster))) < 5000


def test_the_first_nodes_are_whole_ones() -> None:
    cluster = resolve_cluster("2xp4d.24xlarge+3xg5.12xlarge")
    assert [cluster.first_nodes(count).describe() for count in (1, 8, 9)] == [
        "1 × p4d.24xlarge (8 × a100-40gb)", "1 × p4d.24xlarge (8 × a100-40gb)", "2 × p4d.24xlarge (8 × a100-40gb)"
    ]  # fmt: skip
    assert cluster.first_nodes(17).describe() == "2 × p4d.24xlarge (8 × a100-40gb) + 1 × g5.12xlarge (4 × a10g)"
    assert cluster.first_nodes(100) == cluster
