"""What is to be lowered: the micro-batches of a replica with their shares, and the order in which its devices run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from penstock.models.micro_batch import MicroBatch
from penstock.schedules.actions import FORWARD, Schedule
from penstock.schedules.orders import gpipe
from penstock.timing.pipeline import dp_shares

if TYPE_CHECKING:
    from penstock.batching.plan import BatchPlan
    from penstock.plans.plan import Plan
    from penstock.programs.instructions import Program

__all__ = ["ReplicaWork", "dp_degrees", "forward_work", "shares_of_dp", "work_of"]


@dataclass(frozen=True)
class ReplicaWork:
    """One replica's part of an iteration."""

    micro_batches: tuple[MicroBatch, ...]
    """Numbered from 0, as the schedule's actions name them."""
    schedule: Schedule
    """The actions of each device group."""
    patterns: tuple[tuple[int, ...], ...] = ()
    """For each micro-batch the recomputation pattern on each stage; none: 0 everywhere."""
    durations_s: Sequence[Sequence[Sequence[float]]] | None = None
    """[kind][stage][micro-batch], kinds as in `schedules.actions`; they decide only in which order transfers go. None: by arithmetic."""
    ends: tuple[int, ...] = ()
    """Of several global batches, how many micro-batches there are up to the end of each; see `Program`."""

    def pattern(self, micro_batch: int, stage: int) -> int:
        """The recomputation pattern of a micro-batch on a stage."""
        patterns = self.patterns[micro_batch] if self.patterns else ()
        return patterns[stage] if patterns else 0


def dp_degrees(plan: Plan) -> list[int]:
    """The dp above 1 that any op of the plan has."""
    degrees = {dp for stage in plan.stages for dp in (stage.degrees.dp, *(run.dp for run in stage.runs))}
    return sorted(degrees - {1})


def work_of(batch: BatchPlan, plan: Plan, counted: Mapping[int, int] | None = None) -> tuple[ReplicaWork, ...]:
    """The work of a planned batch; `counted` has, per sample id, the positions that count in the loss where not all do."""
    found = []
    for number, replica in enumerate(batch.replicas):
        shares = shares_of_dp(plan, number)
        micro_batches = tuple(_placed(micro, shares, counted) for micro in replica.micro_batches)
        found.append(ReplicaWork(micro_batches, replica.schedule, tuple(micro.recompute for micro in replica.micro_batches)))
    return tuple(found)


def shares_of_dp(plan: Plan, replica: int) -> dict[int, tuple[float, ...]]:
    """For each dp above 1 that any op of the plan has, what part of the samples each rank gets; nothing: equal parts."""
    return {dp: dp_shares(plan, replica, dp) for dp in dp_degrees(plan)}


def _placed(micro: MicroBatch, shares: Mapping[int, Sequence[float]], counted: Mapping[int, int] | None) -> MicroBatch:
    """A micro-batch as programs hold it: with shares and loss positions, and without recomputation, which its forward passes name."""
    own = tuple(counted[sample] for sample in micro.samples) if counted is not None else ()
    return replace(micro, counted=own, bounds={dp: micro.even_bounds(dp, parts) for dp, parts in shares.items()}, recompute=())


def forward_work(program: Program) -> ReplicaWork:
    """The micro-batches of a program's replica, passed forward one after the other; the stages of a device in turn."""
    stages = [place.stage for place in program.places]
    full = gpipe(program.num_stages, len(program.micro_batches))
    forward = [tuple(action for action in actions if action.kind == FORWARD) for actions in full]
    chunks = len(stages)
    groups = program.num_stages // chunks
    merged = tuple(
        tuple(
            sorted(
                (action for chunk in range(chunks) for action in forward[chunk * groups + group]), key=lambda a: (a.micro_batch, a.stage)
            )
        )
        for group in range(groups)
    )
    return ReplicaWork(program.micro_batches, merged)
