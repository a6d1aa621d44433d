"""How many micro-batches each replica should run, where replicas differ in speed: the slowest then ends as early as can be.

A replica takes `first_s` for one micro-batch and `more_s` for each further one, as the closed formula of `schedules.rules` has it:

    replica 0   │ first │ more │ more │ more │
    replica 1   │    first    │   more   │
                                             ▲ the last to end
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.timing.estimate import Estimator

__all__ = ["best_shares", "least_time_s", "rebalanced"]


def best_shares(total: int, paces: Sequence[tuple[float, float]]) -> tuple[int, ...]:
    """Micro-batches of each replica, `total` in all and at least one each, such that the last replica ends as early as possible.

    `paces` are (first, more) of each replica.

    >>> best_shares(16, [(1.0, 1.0), (3.0, 3.0)])
    (12, 4)
    """
    if total < len(paces):
        raise ValueError(f"{plural(total, 'micro-batch')} cannot give {len(paces)} replicas one each")
    level_s = _level_s(total, paces) * (1 - 1e-9)
    counts = [max(1, 1 + math.floor((level_s - first) / more)) for first, more in paces]
    # Nobody ends before that level, so that all of these are needed; the few that are left go to whoever then ends first.
    ends = [(first + count * more, index) for index, (count, (first, more)) in enumerate(zip(counts, paces, strict=True))]
    heapq.heapify(ends)
    for _ in range(total - sum(counts)):
        end_s, index = heapq.heappop(ends)
        counts[index] += 1
        heapq.heappush(ends, (end_s + paces[index][1], index))
    return tuple(counts)


def least_time_s(total: int, paces: Sequence[tuple[float, float]]) -> float:
    """When the last replica ends with the best shares.

    >>> least_time_s(17, [(1.0, 1.0), (3.0, 3.0)])
    13.0
    """
    shares = best_shares(total, paces)
    return max(first + (share - 1) * more for share, (first, more) in zip(shares, paces, strict=True))


def _level_s(total: int, paces: Sequence[tuple[float, float]]) -> float:
    """When replicas would end if micro-batches could be divided, those apart that take longer for their only one."""
    busy = list(paces)
    while True:
        left = total - (len(paces) - len(busy))
        level_s = (left - sum(1 - first / more for first, more in busy)) / sum(1 / more for _, more in busy)
        still = [(first, more) for first, more in busy if first <= level_s]
        if len(still) in (0, len(busy)):
            return level_s
        busy = still


def rebalanced(estimator: Estimator, plan: Plan) -> Plan:
    """The plan with the best shares for the speeds of its replicas; the plan itself if it has one replica or each batch decides."""
    samples = plan.micro_batching.samples
    if plan.micro_batching.policy != "fixed" or samples is None or plan.num_replicas == 1:
        return plan
    first_s = SCHEDULES[plan.schedule].pipeline_s
    paces = [(first_s(pace.times_s, 1, plan.num_chunks, pace.weight_s), max(pace.times_s)) for pace in estimator.paces(plan)]
    if not all(math.isfinite(first) for first, _ in paces):
        return plan
    found = best_shares(plan.global_batch // samples, paces)
    shares = found if len(set(found)) > 1 else ()
    return replace(plan, micro_batching=replace(plan.micro_batching, per_replica=shares))
