"""A sharper bound for pipelines over several kinds of devices: kinds are in different nodes, and between nodes messages are slow.

A plan uses one kind alone, or two kinds hold neighbouring stages. Then a message crosses between their nodes in both directions for every
micro-batch, in every replica, while those of the other replicas do; that is work of one stage of each kind, whichever stages they are.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np

from penstock.costs.collectives import point_to_point_s
from penstock.costs.table import Floats
from penstock.search.bounds.by_ops import subspace_bound
from penstock.search.space.families import PlanFamily, Subspace

__all__ = ["crossing_bound_s"]


def crossing_bound_s(family: PlanFamily, subspace: Subspace, known_s: float) -> float:
    """What no plan of a subspace that is faster than `known_s` can be below; that of `subspace_bound` where there is one kind."""
    pools, plain_s = sorted({option.pool for option in subspace.options}), subspace_bound(family, subspace, known_s).time_s
    if len(pools) == 1 or plain_s >= known_s:
        return plain_s
    alone = (replace(subspace, options=tuple(option for option in subspace.options if option.pool == pool)) for pool in pools)
    bounds = [subspace_bound(family, one, known_s).time_s for one in alone]
    if subspace.max_stages > 1:
        crossings = (_crossing(family, subspace, *pair) for pair in combinations(pools, 2))
        bounds += [subspace_bound(family, subspace, known_s, extra=work).time_s for work in crossings]
    return max(plain_s, min(bounds))  # the weights behind a bound are good, but not always the best


def _crossing(family: PlanFamily, subspace: Subspace, first: int, second: int) -> Floats:
    """[P + 1] device-seconds of each pool, and seconds in all, that messages between two kinds take for a micro-batch at least."""
    found = np.zeros(len(family.pools) + 1)
    for pool, other in ((first, second), (second, first)):
        options = [option for option in subspace.options if option.pool == pool]
        times = []
        for option in options:
            size = float(family.prices.least_sent_bytes(option).min())
            counted = float(family.prices.least_messages_s(option).max())  # by the bound already
            times.append(max(_message_s(family, size, pool, other, option.num_devices) - counted, 0.0))
        found[pool] = min(time * option.num_devices for time, option in zip(times, options, strict=True))
        found[-1] += min(times)
    return found


def _message_s(family: PlanFamily, size_bytes: float, pool: int, other: int, lanes: int) -> float:
    """The time of one message between two kinds, where on some node of each as many replicas send as on the average one."""
    cluster = family.request.estimator.cluster
    nodes = [{cluster.node_index(rank): rank for rank in family.kinds[kind].ranks} for kind in (pool, other)]
    sharing = max(-(-family.replicas * lanes // len(own)) for own in nodes)
    ends = [{cluster.node_of(rank): rank for rank in own.values()}.values() for own in nodes]  # one of each kind of node
    return min(point_to_point_s(size_bytes, cluster, a, b, sharing) for a in ends[0] for b in ends[1])
