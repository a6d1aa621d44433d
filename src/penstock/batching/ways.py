"""Batches cut and run in a way that is asked for instead of the best one: to see what each part of the planner is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.batching.baselines import usual_ways
from penstock.batching.costs import LayoutCosts, PipelineCosts
from penstock.batching.fitting import TooLong
from penstock.batching.ordering import ORDERS
from penstock.batching.plan import BatchPlan, ReplicaBatch, SampleLengths
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_workload
from penstock.errors import InfeasibleError, InputError, near_misses
from penstock.ordering.choose import MADE, order_of
from penstock.schedules.rules import SCHEDULES
from penstock.timing.execution import execute

__all__ = ["SPLITS", "WAYS_SCHEDULES", "BatchWays", "one_mode"]

SPLITS = ("dynamic", "budget", "uniform", "packed")
"""Dynamic programming over an order; similar lengths up to a budget of tokens; equally many samples, padded to the longest; packed rows."""
WAYS_SCHEDULES = (*(name for name, rules in SCHEDULES.items() if rules.whole_passes), *MADE)
"""Orders of whole passes, which is what micro-batches of a batch run in."""


@dataclass(frozen=True)
class BatchWays:
    """Choices of how a batch is ordered, cut, run and recomputed that are made beforehand; an empty one is left to the planner."""

    order: str = ""
    """Of samples before they are cut, one of `ORDERS`."""
    split: str = ""
    """One of `SPLITS`."""
    schedule: str = ""
    """One of `WAYS_SCHEDULES`."""
    recompute: str = ""
    """The one mode of recomputation, by its name among those of the costs."""
    memory_limit_bytes: float = math.inf

    def __post_init__(self) -> None:
        known = {"order": (self.order, tuple(ORDERS)), "split": (self.split, SPLITS), "schedule": (self.schedule, WAYS_SCHEDULES)}
        for name, (given, names) in known.items():
            if given and given not in names:
                raise InputError(f"--{name} is '{given}'. {near_misses(given, names)}")
        if self.order and self.split not in ("", "dynamic"):
            raise InputError(f"--order {self.order} is of dynamic splitting; --split {self.split} has its own. Drop one of them.")

    @property
    def cuts(self) -> bool:
        """Whether they say how samples become micro-batches, so that no search should change it."""
        return bool(self.order or self.split)

    def limited(self, costs: PipelineCosts) -> PipelineCosts:
        """The costs with less memory and one mode of recomputation, as asked for."""
        if self.recompute and self.recompute not in costs.modes:
            raise InputError(f"--recompute is '{self.recompute}'. {near_misses(self.recompute, costs.modes)}")
        costs = replace(costs, limit_bytes=np.minimum(costs.limit_bytes, self.memory_limit_bytes))
        return _with_others_away(costs, costs.modes.index(self.recompute)) if self.recompute else costs

    def planned(
        self, samples: Sequence[SampleLengths], costs: PipelineCosts, *, steps: int = 0, seed: int = 0, too_long: TooLong = "refuse",
        bound: bool = False,
    ) -> BatchPlan:  # fmt: skip
        """The batch in these ways, by costs that are `limited` already."""
        found = self._cut(samples, costs, steps, seed, too_long, bound)
        return self._scheduled(found, costs) if self.schedule else found

    def _cut(
        self, samples: Sequence[SampleLengths], costs: PipelineCosts, steps: int, seed: int, too_long: TooLong, bound: bool
    ) -> BatchPlan:  # fmt: skip
        if self.split in ("", "dynamic"):
            order = self.order or ("hilbert" if self.split else "")
            return plan_batch(samples, costs, steps=steps, seed=seed, too_long=too_long, bound=bound, order=order)
        if self.split != "packed" and "padded" not in costs.layouts:
            raise InputError(f"--split {self.split} makes padded micro-batches; the plan's are packed. Give one whose layout is padded.")
        ways = usual_ways(samples, costs, too_long)
        chosen = ("packed", "across") if self.split == "packed" else (self.split,)
        found = [ways[way] for way in chosen if way in ways]
        if not found:
            raise InfeasibleError(f"--split {self.split}: no such micro-batches fit these devices and the plan's limits. Raise the limits.")
        return min(found, key=lambda plan: plan.predicted_s)

    def _scheduled(self, plan: BatchPlan, costs: PipelineCosts) -> BatchPlan:
        replicas = tuple(self._reordered(replica, costs, index) for index, replica in enumerate(plan.replicas))
        return replace(plan, replicas=replicas, predicted_s=max(replica.predicted_s for replica in replicas) + costs.fixed_s)

    def _reordered(self, replica: ReplicaBatch, costs: PipelineCosts, index: int) -> ReplicaBatch:
        if not replica.micro_batches:
            return replica
        workload = batch_workload(costs, replica.micro_batches, index)
        run = execute(order_of(self.schedule, workload), workload)
        if run.violation is not None:
            raise InfeasibleError(f"--schedule {self.schedule}: device {run.violation.device} would hold more than it has. Use another.")
        return replace(
            replica, schedule=run.schedule, predicted_s=run.pipeline_s, peak_bytes=tuple(map(float, run.peak_bytes)), order=self.schedule
        )


def _with_others_away(costs: PipelineCosts, mode: int) -> PipelineCosts:
    """Costs in which all recomputation modes but one fit nowhere; all stay in the list, since batches name modes by number."""

    def alone(grid: LayoutCosts) -> LayoutCosts:
        values = np.full_like(grid.values, np.inf)
        values[..., mode, :] = grid.values[..., mode, :]
        return LayoutCosts(grid.axes, values)

    return _changed(costs, alone)


def one_mode(costs: PipelineCosts, mode: int) -> PipelineCosts:
    """Costs that know one recomputation mode alone, which all micro-batches then have, as DynaPipe plans."""
    one = _changed(costs, lambda grid: LayoutCosts(grid.axes, grid.values[..., mode : mode + 1, :].copy()))
    return replace(one, modes=costs.modes[mode : mode + 1])


def _changed(costs: PipelineCosts, change: Callable[[LayoutCosts], LayoutCosts]) -> PipelineCosts:
    """The costs with every grid changed, those of chunks too."""
    chunks = costs.chunks and replace(costs.chunks, layouts={layout: change(grid) for layout, grid in costs.chunks.layouts.items()})
    return replace(costs, layouts={layout: change(grid) for layout, grid in costs.layouts.items()}, chunks=chunks)
