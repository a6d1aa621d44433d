"""Every choice of nodes from a pool: in which order they are searched, and what is left to smaller choices."""

from __future__ import annotations

import math

from penstock.clusters import resolve_cluster
from penstock.search.money import clusters_of
from penstock.search.space.families import families
from penstock.search.space.request import Request


def test_parts_come_before_the_whole_and_one_kind_before_several() -> None:
    names = [cluster.name for cluster in clusters_of(resolve_cluster("2xp4d.24xlarge+1xg5.24xlarge"))]
    assert names == [
        "1xg5.24xlarge", "1xp4d.24xlarge", "2xp4d.24xlarge", "1xp4d.24xlarge+1xg5.24xlarge", "2xp4d.24xlarge+1xg5.24xlarge",
    ]  # fmt: skip


def test_plans_that_leave_a_node_idle_are_left_to_the_cluster_without_it() -> None:
    """Four A10Gs give each of up to four replicas one, and nothing to more of them."""
    request = Request.of("gpt-tiny", "2xp4d.24xlarge+1xg5.24xlarge", 48, "roofline", None, (1,), math.inf)
    every = {family.replicas for family in families(request)}
    assert {1, 2, 4, 8, 16} <= every
    assert {family.replicas for family in families(request.on_all_of(request.cluster))} == {number for number in every if number <= 4}
