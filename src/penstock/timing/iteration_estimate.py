"""The answer to what a plan takes: one iteration in time, money and memory, stage by stage, and where the time goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.costs.memory import MemoryBreakdown
from penstock.plans.plan import Degrees, Plan, Predicted, StageMemory
from penstock.timing.pass_times import StagePasses

__all__ = ["Estimate", "StageEstimate", "update_s", "with_prediction"]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage in the slowest replica."""

    index: int
    group: int
    """Its devices; only the chunks of an interleaved schedule share a group."""
    num_ops: int
    device: str
    degrees: Degrees
    work: StagePasses
    """For one micro-batch."""
    bubble_s: float
    """Idle in one iteration while the pipeline fills and drains, or waits for a slower stage."""
    sync_s: float
    """Gradients, once per iteration."""
    optimizer_s: float
    memory: MemoryBreakdown
    """On the fullest device; of all chunks of the group together."""
    limit_bytes: float
    fits: bool
    sequence_parallel: bool = False
    """Whether it really is: with tp above 1, in a model that works token by token."""
    zero: int = 0
    """The same: among several ranks that hold the same weights."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One iteration of a plan."""

    time_s: float
    pipeline_s: float
    num_micro_batches: int
    """Of the slowest replica."""
    samples: int
    """Samples of a micro-batch."""
    samples_per_s: float
    tokens_per_s: float | None
    """None for images."""
    price_usd: float | None
    price_usd_per_h: float | None
    mfu: float
    """Arithmetic the model needs (recomputation not counted) over what the devices in use could do in that time."""
    bottleneck: int
    """The stage that the others wait for."""
    fits: bool
    stages: tuple[StageEstimate, ...]
    source: str
    notes: tuple[str, ...] = ()
    """What the numbers leave out."""
    replica: int = 0
    """The slowest, of which the stages tell."""
    per_replica: tuple[int, ...] = ()
    """Micro-batches of each replica."""
    formula_s: float = 0.0
    """The iteration by closed formula, where no message is hidden behind compute; what bounds are of. `time_s` is the same until the
    clock has been asked, see `planned.clocked`."""

    @property
    def peak_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(stage.memory.total_bytes for stage in self.stages)

    def with_times(self, time_s: float, pipeline_s: float) -> Estimate:
        """The same iteration with other times; rates, money and idle time follow."""
        slower, later_s = time_s / self.time_s, pipeline_s - self.pipeline_s
        return dataclasses.replace(
            self, time_s=time_s, pipeline_s=pipeline_s, samples_per_s=self.samples_per_s / slower, mfu=self.mfu / slower,
            tokens_per_s=None if self.tokens_per_s is None else self.tokens_per_s / slower,
            price_usd=None if self.price_usd is None else self.price_usd * slower,
            stages=tuple(dataclasses.replace(stage, bubble_s=max(0.0, stage.bubble_s + later_s)) for stage in self.stages),
        )  # fmt: skip

    def shares(self) -> list[tuple[str, float]]:
        """Where the iteration goes, as seen from the bottleneck's devices; the parts sum to `time_s`.

        Of messages, gradient sync and the optimizer only what is not hidden behind compute.
        """
        own = [stage for stage in self.stages if stage.group == self.stages[self.bottleneck].group]
        work = sum((stage.work for stage in own), StagePasses())
        last = max({stage.group for stage in self.stages}, key=lambda group: sum(update_s(self.stages, group)))
        sync, optimizer = update_s(self.stages, last)
        shown = (self.time_s - self.pipeline_s) / (sync + optimizer) if sync + optimizer else 0.0
        times = self.num_micro_batches
        messages_s = work.transfer_in_s + work.transfer_out_s
        idle_s = self.pipeline_s - (work.total_s - messages_s) * times
        transfers_s = min(messages_s * times, idle_s)
        return [
            ("forward", work.forward_s * times), ("backward", work.backward_s * times), ("recomputation", work.recompute_s * times),
            ("tp collectives", work.tp_s * times), ("transfers", transfers_s), ("waiting for the host", work.waiting_s * times),
            ("bubble", idle_s - transfers_s), ("gradient sync", shown * sync), ("optimizer", shown * optimizer),
        ]  # fmt: skip


def update_s(stages: Sequence[StageEstimate], group: int) -> tuple[float, float]:
    """What a device group does after its last backward pass: (gradient sync, optimizer step)."""
    own = [stage for stage in stages if stage.group == group]
    return sum(stage.sync_s for stage in own), sum(stage.optimizer_s for stage in own)


def with_prediction(plan: Plan, found: Estimate) -> Plan:
    """The plan with what was estimated for it."""
    predicted = Predicted(
        found.time_s, found.source, found.tokens_per_s, found.price_usd, found.price_usd_per_h,
        memory=tuple(_whole_bytes(stage.memory) for stage in found.stages),
    )  # fmt: skip
    return dataclasses.replace(plan, costs=found.source, predicted=predicted)


def _whole_bytes(memory: MemoryBreakdown) -> StageMemory:
    """The memory of a stage as plan files have it: whole bytes, by the same purposes."""
    return StageMemory(*(round(getattr(memory, field.name)) for field in dataclasses.fields(StageMemory)))
