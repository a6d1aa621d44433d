"""Links fitted to measured collectives and transfers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import Link, resolve_cluster, with_measured_links
from penstock.costs.collectives import COLLECTIVES, Group
from penstock.costs.measured_links import measured_links
from penstock.costs.profile import DeviceProfile, LinkPoint

SIZES = [1024.0 * 4**k for k in range(9)]


def points(link: Link, num_ranks: int, num_nodes: int = 1, sizes: list[float] = SIZES) -> list[LinkPoint]:
    group = Group(num_ranks, 1, link)
    found = [LinkPoint(kind, num_ranks, num_nodes, size, group.time_s(kind, size)) for kind in COLLECTIVES for size in sizes]
    if num_ranks == 2:
        found += [LinkPoint("transfer", 2, num_nodes, size, link.latency_s + size / link.bandwidth_bytes_per_s) for size in sizes]
    return found


@settings(deadline=None)
@given(st.floats(1e8, 1e12), st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.floats(1e-6, 1e-3))
def test_the_links_points_came_from_are_found_again(inside: float, latency: float, network: float, far: float) -> None:
    intra, inter = Link("a", inside, latency), Link("b", network, far)
    measured = [*points(intra, 2), *points(intra, 4), *points(intra, 8), *points(inter, 2, 2), *points(inter, 4, 4)]
    found = measured_links(DeviceProfile({}, links=measured), "h200-141gb")
    assert set(found) == {"intra:h200-141gb", "inter"}
    for key, link in (("intra:h200-141gb", intra), ("inter", inter)):
        assert found[key].bandwidth_bytes_per_s == pytest.approx(link.bandwidth_bytes_per_s, rel=0.01)
        assert found[key].latency_s == pytest.approx(link.latency_s, rel=0.01)


def test_noise_moves_the_link_little() -> None:
    link = Link("a", 3e11, 5e-6)
    noisy = [replace(point, time_s=point.time_s * (1.05 if index % 2 else 0.95)) for index, point in enumerate(points(link, 4))]
    found = measured_links(DeviceProfile({}, links=noisy), "cpu")["intra:cpu"]
    assert found.bandwidth_bytes_per_s == pytest.approx(3e11, rel=0.06) and found.latency_s == pytest.approx(5e-6, rel=0.06)


def test_what_was_not_measured_is_left_out() -> None:
    assert measured_links(DeviceProfile({}), "cpu") == {}
    guess = LinkPoint("all_reduce", 2, 1, 1e6, 1e-3, modelled=True)
    assert measured_links(DeviceProfile({}, links=[guess]), "cpu") == {}


def test_small_messages_alone_tell_the_latency() -> None:
    few = [LinkPoint("transfer", 2, 1, size, 1e-5) for size in (1.0, 2.0, 4.0)]
    link = measured_links(DeviceProfile({}, links=few), "cpu")["intra:cpu"]
    assert link.latency_s == pytest.approx(1e-5, rel=0.01) and link.bandwidth_bytes_per_s == pytest.approx(
        4 / 1e-5
    )  # the best that was seen


def test_a_cluster_takes_them() -> None:
    cluster = resolve_cluster("2xp4d.24xlarge")
    links = measured_links(DeviceProfile({}, links=points(Link("a", 2e11, 7e-6), 2)), "a100-40gb")
    measured = with_measured_links(cluster, links)
    assert measured.link(0, 1).bandwidth_bytes_per_s == pytest.approx(2e11, rel=0.01)
    assert measured.link(0, 8) == cluster.link(0, 8)
