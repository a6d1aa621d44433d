"""Plans without devices that are lost, where more than one slow replica or stage has to go: as when a node had several stages.

    stages    ranks              without ranks 2-4
    0         0 1   dp 2         0 1   dp 2
    1         2 3   dp 2         left out: its ops go to its neighbours
    2         4 5   dp 2         5     dp 1
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from penstock.plans.plan import Plan, Stage
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES
from penstock.search.present_cuts import recomputed_ops, with_cuts, with_present_cuts
from penstock.timing.estimate import Estimator

__all__ = ["plans_without"]


def plans_without(plan: Plan, lost: Collection[int], estimator: Estimator) -> Iterator[Plan]:
    """The plan on those of its device groups that are whole, and with what is left of the others; each with several cuts. Not all of them
    need be valid."""
    groups = list({stage.devices: stage for stage in reversed(plan.stages)}.values())[::-1]
    whole = [stage for stage in groups if not any(set(ranks) & set(lost) for ranks in stage.devices)]
    narrowed = [left for stage in groups if (left := _narrowed(plan, stage, lost)) is not None]
    for kept in (whole, narrowed):
        if kept:
            yield from _on_groups(plan, kept, estimator)


def _narrowed(plan: Plan, stage: Stage, lost: Collection[int]) -> Stage | None:
    """A stage without the dp ranks that have lost a device, as many in each replica; None: there are none left."""
    size = stage.degrees.size // stage.degrees.dp
    parts = [[ranks[at : at + size] for at in range(0, len(ranks), size)] for ranks in stage.devices]
    left = [[part for part in own if not set(part) & set(lost)] for own in parts]
    samples = plan.micro_batching.samples if plan.micro_batching.policy == "fixed" else None
    dp = max((count for count in range(1, min(map(len, left)) + 1) if (samples or 0) % count == 0), default=0)
    if not dp:
        return None
    devices = tuple(tuple(rank for part in own[:dp] for rank in part) for own in left)
    return replace(stage, devices=devices, degrees=replace(stage.degrees, dp=dp))


def _on_groups(plan: Plan, kept: list[Stage], estimator: Estimator) -> Iterator[Plan]:
    """All ops on these device groups, by the plan's schedule where it suits so few, with one stage each."""
    rules = SCHEDULES[plan.schedule]
    if rules.chunked or len(kept) < rules.min_groups:
        rules = SCHEDULES[DEFAULT_SCHEDULE]
    end = estimator.model.num_ops
    inner = [end * at // len(kept) for at in range(1, len(kept))] if plan.num_chunks > 1 else [stage.last for stage in kept[:-1]]
    stages = tuple(replace(stage, runs=()) for stage in kept)
    for recomputed in [recomputed_ops(plan), *([frozenset(range(end))] if rules.recomputes else [])]:
        shorter = with_cuts(replace(plan, schedule=rules.name, stages=stages), [0, *inner, end], recomputed)
        yield shorter
        yield from with_present_cuts(shorter, estimator.estimate(shorter), estimator)
