"""Which of the moves between two plans can travel while a step runs, and how long training then stands still.

An op moves whole to a rank that has nothing of it, if it is divided alike under both plans and its state is with its weights (ZeRO-0): a
value then has the same place in the optimizer's work, and the update that a step makes can be made again where the op comes to. Weights
that ops share, statistics and all else travel after the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from penstock.adapting.boxes import volume
from penstock.adapting.holdings import MASTER, Layouts
from penstock.adapting.moves import Move, Moves
from penstock.clusters import Cluster
from penstock.models.modules.build import TORCH_DTYPES
from penstock.plans.plan import Plan, Stage
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS
from penstock.schedules.rules import SCHEDULES

__all__ = ["GRADIENT", "SplitMoves", "split_moves"]

GRADIENT = "gradient"
"""What travels of a weight whose last update is made again where it comes to."""
_COPY_BYTES_PER_S = 10e9
"""At which a rank copies what it sends to host memory, before the step."""


@dataclass(frozen=True)
class SplitMoves:
    """The moves between two plans, by whether they travel during a step or after it."""

    ops: frozenset[tuple[int, int]]
    """(op, rank that it comes to) of those that move whole."""
    early: tuple[Move, ...]
    late: tuple[Move, ...]
    gradients: tuple[Move, ...]
    """Of the ops that travel early: sent after the step."""

    def pause_s(self, made: Moves, cluster: Cluster) -> float:
        """Seconds for which training stands still for it, before and after the step; for ever where a host has no room for the copies."""
        copied = self._copied_bytes()
        on_host = (rank for rank in copied if cluster.device(rank).name.startswith("cpu"))
        if any(made.peak_bytes[rank] + copied[rank] > cluster.device(rank).memory_bytes for rank in on_host):
            return math.inf
        after = replace(made, boxes=(*self.late, *self.gradients))
        return max(copied.values(), default=0) / _COPY_BYTES_PER_S + after.time_s(cluster)

    def _copied_bytes(self) -> dict[int, int]:
        """Bytes that each rank copies to host memory before the step."""
        copied: defaultdict[int, int] = defaultdict(int)
        for one in self.early:
            copied[one.source] += one.num_bytes
        return dict(copied)


def split_moves(old: Plan, new: Plan, made: Moves, layouts: Layouts) -> SplitMoves:
    """The moves between two plans by when they can travel."""
    ops = frozenset(_whole(old, new, layouts))
    names = {
        (own.layout.name, rank): (op, rank)
        for op, rank in ops
        for own in layouts.parameters(layouts.model.ops[op], 0, 0, 1)
        if own.trained
    }
    early = tuple(one for one in made.boxes if one.kind != BUFFERS and (one.name, one.target) in names)
    chosen = set(early)
    itemsize = 4 if old.gradients == "fp32" else TORCH_DTYPES[old.precision].itemsize
    exact = MASTER if any(one.kind == MASTER for one in early) else WEIGHTS
    gradients = tuple(replace(one, kind=GRADIENT, num_bytes=volume(one.box) * itemsize) for one in early if one.kind == exact)
    return SplitMoves(ops, early, tuple(one for one in made.boxes if one not in chosen), gradients)


def _whole(old: Plan, new: Plan, layouts: Layouts) -> Iterator[tuple[int, int]]:
    """(op, rank) of each op that moves whole to a rank."""
    if old.gradients != new.gradients or any(SCHEDULES[plan.schedule].asynchronous for plan in (old, new)):
        return
    homes, nexts = _homes(old), _homes(new)
    for op, before in homes.items():
        after = nexts[op]
        ways = [(stage.zero, stage.run_of(op).tp, stage.run_of(op).algo) for stage in (before, after)]
        if ways[0] == ways[1] and not before.zero and op not in layouts.shared:
            had = {rank for ranks in before.devices for rank in ranks}
            yield from ((op, rank) for ranks in after.devices for rank in ranks if rank not in had)


def _homes(plan: Plan) -> dict[int, Stage]:
    return {op: stage for stage in plan.stages for op in range(stage.first, stage.last)}
