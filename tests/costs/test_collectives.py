"""Collectives against hand computations, and what must hold for any size and group."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import Cluster, Link, Node, NodeRun, resolve_cluster, resolve_device
from penstock.clusters.cluster import LinkOverride
from penstock.costs.collectives import COLLECTIVES, collective_s, group_of, point_to_point_s, sync_gradients_s
from penstock.errors import InputError

H200 = resolve_cluster("16xh200")  # two nodes of eight: NVLink 450 GB/s and 4 µs inside, 400 GB/s over 8 rails and 6 µs across
MIXED = resolve_cluster("1xp4d.24xlarge+2xg5.24xlarge")
CLUSTERS = (H200, MIXED)
SIZES = st.floats(1.0, 1e11)
KINDS = st.sampled_from(COLLECTIVES)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, list[int]]:
    """Two or more ranks of a cluster."""
    cluster = draw(st.sampled_from(CLUSTERS))
    ranks = draw(st.sets(st.integers(0, cluster.num_devices - 1), min_size=2))
    return cluster, sorted(ranks)


def one_rail(num_nodes: int, per_node: int = 4) -> Cluster:
    """Nodes with 100 GB/s and 1 µs inside, 10 GB/s and 10 µs across."""
    node = Node("n", resolve_device("a100-40gb"), per_node, Link("in", 100e9, 1e-6), Link("out", 10e9, 10e-6))
    return Cluster("test", (NodeRun(node, num_nodes),))


@pytest.mark.parametrize(
    ("kind", "expected_s"),
    [
        ("reduce_scatter", 2e-6 + 0.75 * 1e9 / 100e9),
        ("all_gather", 2e-6 + 0.75 * 1e9 / 100e9),
        ("all_reduce", 4e-6 + 1.5 * 1e9 / 100e9),
        ("all_to_all", 2e-6 + 0.75 * 0.25e9 / 100e9),
        ("broadcast", 2e-6 + 1e9 / 100e9),
    ],
)
def test_inside_a_node_by_hand(kind: str, expected_s: float) -> None:
    assert collective_s(kind, 1e9, one_rail(1), range(4)) == pytest.approx(expected_s)


def test_across_nodes_by_hand() -> None:
    cluster = one_rail(2)
    # Flat: the four channels share 10 GB/s. Hierarchical: 3/4 of the tensor inside, then halves of quarters at 2.5 GB/s each.
    flat = 3 * 10e-6 + 7 / 8 * 1e9 / 10e9
    hierarchical = 2e-6 + 0.75 * 1e9 / 100e9 + 10e-6 + 0.5 * 0.25e9 / 2.5e9
    assert group_of(cluster, range(8)).lines("reduce_scatter") == (
        pytest.approx((3 * 10e-6, 7 / 8 / 10e9)), pytest.approx((12e-6, 0.75 / 100e9 + 0.125 / 2.5e9))
    )  # fmt: skip
    assert hierarchical < flat
    assert collective_s("reduce_scatter", 1e9, cluster, range(8)) == pytest.approx(hierarchical)
    assert collective_s("all_reduce", 1e9, cluster, range(8)) == pytest.approx(2 * hierarchical)


def test_all_to_all_across_nodes_by_hand() -> None:
    # Each rank holds 1/8 GB: 3/4 of it moves inside, then half of it crosses at 2.5 GB/s.
    expected_s = 2e-6 + 0.75 * 0.125e9 / 100e9 + 10e-6 + 0.5 * 0.125e9 / 2.5e9
    assert collective_s("all_to_all", 1e9, one_rail(2), range(8)) == pytest.approx(expected_s)


def test_one_rank_per_node_drives_one_rail_and_groups_share_the_network() -> None:
    ranks = [0, 8]
    alone = collective_s("all_reduce", 1e9, H200, ranks)
    assert alone == pytest.approx(2 * 6e-6 + 1e9 / 50e9)
    assert collective_s("all_reduce", 1e9, H200, ranks, sharing=8) == pytest.approx(alone)
    assert collective_s("all_reduce", 1e9, H200, ranks, sharing=16) == pytest.approx(2 * 6e-6 + 1e9 / 25e9)
    assert collective_s("all_reduce", 1e9, one_rail(2), [0, 4], sharing=4) == pytest.approx(2 * 10e-6 + 1e9 / 2.5e9)


def test_uneven_groups_have_only_the_flat_way() -> None:
    assert len(group_of(one_rail(2), [0, 1, 2, 4]).lines("all_reduce")) == 1
    assert len(group_of(one_rail(2), [0, 1, 2, 4, 5]).lines("all_reduce")) == 1
    assert len(group_of(one_rail(2), [0, 1, 4, 5]).lines("all_reduce")) == 2


def test_an_uneven_group_drives_the_network_by_the_channels_of_its_smallest_node() -> None:
    """Three ranks and one: one ring that crosses at all of the network's 10 GB/s, not at the share of one rank of three."""
    assert collective_s("all_reduce", 1e9, one_rail(2), [0, 1, 2, 4]) == pytest.approx(2 * (2 * 10e-6 + 0.75 * 1e9 / 10e9))
    assert collective_s("all_reduce", 1e9, one_rail(2), [0, 1, 2, 4], sharing=2) == pytest.approx(2 * (2 * 10e-6 + 0.75 * 1e9 / 5e9))


def test_the_slowest_link_of_a_mixed_group_counts() -> None:
    fast = collective_s("all_reduce", 1e9, MIXED, range(8))
    slow = collective_s("all_reduce", 1e9, MIXED, range(8, 12))
    assert collective_s("all_reduce", 1e9, MIXED, [0, 1, 2, 3, 8, 9, 10, 11]) > max(fast, slow)


def test_a_ring_is_as_slow_as_its_slowest_link_wherever_that_is() -> None:
    """Also between its last node and its first; and as late as its latest."""
    cluster, ranks = one_rail(3, per_node=1), [0, 1, 2]
    usual_s = 2 * 2 * 10e-6 + 2 * 2 / 3 * 1e9 / 10e9
    assert collective_s("all_reduce", 1e9, cluster, ranks) == pytest.approx(usual_s)
    for a, b in ((0, 1), (1, 2), (0, 2)):
        slow = LinkOverride(((a, a + 1),), ((b, b + 1),), Link("slow", 5e9, 10e-6))
        late = LinkOverride(((a, a + 1),), ((b, b + 1),), Link("late", 10e9, 500e-6))
        assert collective_s("all_reduce", 1e9, replace(cluster, overrides=(slow,)), ranks) == pytest.approx(4e-5 + 4 / 3 * 1e9 / 5e9)
        assert collective_s("all_reduce", 1e9, replace(cluster, overrides=(late,)), ranks) == pytest.approx(4 * 500e-6 + 4 / 3 * 1e9 / 10e9)


def test_a_flat_ring_has_the_longer_of_both_latencies() -> None:
    node = Node("n", resolve_device("cpu"), 2, Link("in", 100e9, 50e-6), Link("out", 10e9, 10e-6))
    flat, _ = group_of(Cluster("test", (NodeRun(node, 2),)), range(4)).lines("all_gather")
    assert flat == pytest.approx((2 * 50e-6, 0.75 / 10e9))


@settings(deadline=None)
@given(KINDS, SIZES, SIZES, groups())
def test_monotone_in_size(kind: str, size: float, other: float, group: tuple[Cluster, list[int]]) -> None:
    cluster, ranks = group
    less, more = sorted((size, other))
    assert collective_s(kind, less, cluster, ranks) <= collective_s(kind, more, cluster, ranks)


@settings(deadline=None)
@given(KINDS, SIZES, st.sampled_from(CLUSTERS))
def test_one_rank_needs_no_time(kind: str, size: float, cluster: Cluster) -> None:
    assert collective_s(kind, size, cluster, [3]) == 0.0
    assert sync_gradients_s(size, cluster, [3]) == 0.0
    assert point_to_point_s(size, cluster, 3, 3) == 0.0


@settings(deadline=None)
@given(SIZES, groups(), st.integers(1, 8))
def test_all_reduce_is_reduce_scatter_and_all_gather(size: float, group: tuple[Cluster, list[int]], sharing: int) -> None:
    parts = [collective_s(kind, size, *group, sharing) for kind in ("reduce_scatter", "all_gather")]
    assert collective_s("all_reduce", size, *group, sharing) == pytest.approx(sum(parts))
    assert collective_s("all_reduce", size, *group, sharing) >= parts[0]


@settings(deadline=None)
@given(st.integers(2, 8))
def test_large_messages_reach_the_bandwidth(num_ranks: int) -> None:
    size, link = 1e13, H200.link(0, 1)
    expected_s = 2 * (num_ranks - 1) / num_ranks * size / link.bandwidth_bytes_per_s
    assert collective_s("all_reduce", size, H200, range(num_ranks)) == pytest.approx(expected_s, rel=1e-3)


@settings(deadline=None)
@given(KINDS, SIZES, st.sampled_from([2, 4, 8]))
def test_slower_across_nodes(kind: str, size: float, num_ranks: int) -> None:
    inside = collective_s(kind, size, H200, range(num_ranks))
    half = num_ranks // 2
    assert collective_s(kind, size, H200, [*range(half), *range(8, 8 + half)]) >= inside


@settings(deadline=None)
@given(KINDS, SIZES, groups(), st.integers(1, 16))
def test_sharing_never_helps(kind: str, size: float, group: tuple[Cluster, list[int]], sharing: int) -> None:
    assert collective_s(kind, size, *group, sharing + 1) >= collective_s(kind, size, *group, sharing)


@settings(deadline=None)
@given(KINDS, st.lists(SIZES, min_size=1, max_size=5), groups())
def test_many_sizes_at_once_are_the_same(kind: str, sizes: list[float], group: tuple[Cluster, list[int]]) -> None:
    one = group_of(*group)
    assert one.times_s(kind, np.array(sizes)) == pytest.approx([one.time_s(kind, size) for size in sizes])


def test_transfers() -> None:
    assert point_to_point_s(1e9, H200, 0, 1) == pytest.approx(4e-6 + 1e9 / 450e9)
    assert point_to_point_s(1e9, H200, 0, 8) == pytest.approx(6e-6 + 1e9 / 50e9)
    assert point_to_point_s(1e9, H200, 0, 8, sharing=16) == pytest.approx(6e-6 + 1e9 / 25e9)


def test_gradients_go_in_buckets() -> None:
    ranks, bucket = range(4), 1e6
    full, rest = (collective_s("all_reduce", size, H200, ranks) for size in (bucket, 0.5 * bucket))
    assert sync_gradients_s(10.5 * bucket, H200, ranks, bucket_bytes=bucket) == pytest.approx(10 * full + rest)
    assert sync_gradients_s(1e9, H200, ranks, zero=1) == pytest.approx(sync_gradients_s(1e9, H200, ranks))
    half = sync_gradients_s(1e9, H200, ranks, zero=1, weight_share=0.5)  # fp32 gradients, bf16 weights
    assert half == pytest.approx(0.75 * sync_gradients_s(1e9, H200, ranks), rel=0.1) and half < sync_gradients_s(1e9, H200, ranks, zero=1)
    assert sync_gradients_s(1e9, H200, ranks, zero=3) == pytest.approx(1.5 * sync_gradients_s(1e9, H200, ranks))
    again = {zero: sync_gradients_s(1e9, H200, ranks, zero=zero, micro_batches=4) / sync_gradients_s(1e9, H200, ranks) for zero in range(4)}
    assert again == pytest.approx({0: 1.0, 1: 1.0, 2: 2.5, 3: 6.0})


@settings(deadline=None)
@given(SIZES, SIZES, st.integers(0, 3))
def test_syncing_more_gradients_takes_longer(size: float, other: float, zero: int) -> None:
    less, more = sorted((size, other))
    assert sync_gradients_s(less, H200, range(16), zero=zero) <= sync_gradients_s(more, H200, range(16), zero=zero) * (1 + 1e-12)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(InputError, match="all_reduce"):
        collective_s("allreduce", 1.0, H200, [0, 1])
    with pytest.raises(InputError, match="sharing=0"):
        collective_s("all_reduce", 1.0, H200, [0, 1], sharing=0)


def test_a_thousand_nodes_are_quick() -> None:
    cluster = resolve_cluster("8000xh200")
    assert math.isfinite(collective_s("all_reduce", 1e9, cluster, range(8000)))
