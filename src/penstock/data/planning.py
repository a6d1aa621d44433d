"""From a global batch to the programs of all ranks: lengths only, no token is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.data.batches import GlobalBatch, GlobalBatches
from penstock.data.dataset import DataSet
from penstock.data.forms import Ints, SampleForm
from penstock.data.manifest import SPANS
from penstock.data.mixture import apportion
from penstock.data.windows import Drains
from penstock.errors import InputError, PenstockError, first_of

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.fitting import TooLong
    from penstock.batching.plan import BatchPlan
    from penstock.models.micro_batch import MicroBatch
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.programs.durations import StageWeights
    from penstock.programs.instructions import Program
    from penstock.programs.work import ReplicaWork

__all__ = ["PlanningError", "ProgramPlanner", "describe_samples", "sample_ids"]

_SHOWN = 20


class PlanningError(PenstockError):
    """A batch that cannot be planned; the message names its samples."""


@dataclass(frozen=True)
class ProgramPlanner:
    """Plans batches for a plan, a model and its costs; the same batch gives the same programs in every process."""

    plan: Plan
    model: Model
    costs: PipelineCosts | None
    """What micro-batches cost; a plan of fixed micro-batches needs none."""
    form: SampleForm
    search_steps: int = 0
    """Steps of search after the plan found at once."""
    too_long: TooLong = "refuse"
    seed: int = 0
    drains: Drains = field(default_factory=Drains)
    """Where programs end: after each batch, unless the plan is asynchronous."""

    def __post_init__(self) -> None:
        if self.costs is None and self.plan.micro_batching.policy != "fixed":
            raise InputError("the plan leaves micro-batches to each batch; costs are needed to choose them.")

    def batch_plan(self, data: DataSet, batch: GlobalBatch) -> BatchPlan:
        """Which samples run together, where and in which order: as the plan fixes it, or as suits the batch."""
        if self.plan.micro_batching.policy == "fixed":
            return self._fixed([self._shares(data, batch)])
        from penstock.batching.plan import SampleLengths
        from penstock.batching.planner import plan_batch

        assert self.costs is not None
        own, dec = self.form.positions(batch.lengths)
        offsets = self.costs.length_offset, self.costs.dec_offset if self.costs.has_decoder else 0
        samples = [
            SampleLengths(identity, int(n) - offsets[0], int(m) - offsets[1])
            for identity, n, m in zip(sample_ids(batch, len(data)), own, dec, strict=True)
        ]
        return plan_batch(samples, self.costs, steps=self.search_steps, seed=self.seed + batch.step, too_long=self.too_long)

    def _fixed(self, batches: Sequence[Sequence[Sequence[MicroBatch]]]) -> BatchPlan:
        """The micro-batches of some batches, of each replica, in the order of the plan's schedule."""
        from penstock.batching.plan import BatchPlan, ReplicaBatch
        from penstock.schedules.rules import schedule_of

        replicas = []
        for shares in zip(*batches, strict=True):
            micro_batches = tuple(msgspec.structs.replace(one, index=index) for index, one in enumerate(chain.from_iterable(shares)))
            schedule = schedule_of(self.plan.schedule, self.plan.num_stages, len(micro_batches), self.plan.num_chunks)
            replicas.append(ReplicaBatch(micro_batches, schedule, 0.0, ()))
        return BatchPlan(tuple(replicas), 0.0, 0.0, (), self.plan.costs, method="fixed")

    def _shares(self, data: DataSet, batch: GlobalBatch) -> list[list[MicroBatch]]:
        """The replicas' shares of the batch, cut into micro-batches of the plan's size, in the order in which samples come."""
        ids, size = sample_ids(batch, len(data)), self.plan.micro_batching.samples or 1
        own, dec = self.form.positions(batch.lengths)
        ends = np.cumsum([0, *apportion(len(ids), self.plan.micro_batching.per_replica or [1.0] * self.plan.num_replicas)])
        return [
            [self._fixed_micro_batch(ids[a:b], own[a:b], dec[a:b]) for a, b in pairwise([*range(first, last, size), last])]
            for first, last in pairwise(ends.tolist())
        ]

    def _fixed_micro_batch(self, ids: list[int], own: Ints, dec: Ints) -> MicroBatch:
        from penstock.models.micro_batch import MicroBatch

        if self.form.kind == "images":
            return MicroBatch(0, tuple(ids), "padded")
        layout, two_sided = self.plan.micro_batching.layout, self.form.kind == "encoder-decoder"
        rows = (int(own.max()), int(dec.max())) if layout == "padded" else (0, 0)
        return MicroBatch(0, tuple(ids), layout, tuple(own.tolist()), tuple(dec.tolist()) if two_sided else (), *rows)

    def programs(self, data: DataSet, batch: GlobalBatch) -> tuple[Program, ...]:
        """The programs of all ranks for one batch, proven safe; a `PlanningError` names the samples of one that cannot be planned."""
        return self.planned(data, [batch])[1]

    def window(self, data: DataSet, batches: GlobalBatches, step: int) -> tuple[BatchPlan, tuple[Program, ...]]:
        """The programs that begin with a step, up to where the pipeline is drained next, and the plan that they were made from."""
        return self.planned(data, [batches[one] for one in range(step, self.drains.after(step))])

    def planned(self, data: DataSet, batches: Sequence[GlobalBatch]) -> tuple[BatchPlan, tuple[Program, ...]]:
        """The programs of all ranks for some batches in a row, more than one for asynchronous plans alone, and the plan behind them."""
        from penstock.programs.check import require_safe
        from penstock.programs.lower import lower
        from penstock.programs.work import work_of

        batch, ends = batches[0], tuple[int, ...]()
        try:
            if len(batches) == 1:
                planned = self.batch_plan(data, batch)
            else:  # of asynchronous plans, which have one replica and fixed micro-batches
                shares = [self._shares(data, one) for one in batches]
                planned, ends = self._fixed(shares), tuple(accumulate(len(own) for own, in shares))
            counted = self._counted(data, batches, planned)
            work = [replace(own, ends=ends) for own in self._timed(planned, work_of(planned, self.plan, counted))]
            programs = lower(self.plan, self.model, work, batch.step)
            require_safe(programs, self.plan, self.model)
        except PenstockError as error:
            raise PlanningError(f"iteration {batch.step} cannot be planned: {error} {describe_samples(batch, len(data))}") from error
        return planned, programs

    def _timed(self, planned: BatchPlan, work: Sequence[ReplicaWork]) -> list[ReplicaWork]:
        """The work with what its passes take, by the costs of the batch or, where it has none, of the plan's own micro-batches."""
        from penstock.batching.workloads import batch_durations_s
        from penstock.programs.durations import durations_of

        if self.plan.num_stages == 1:  # nothing travels
            return list(work)
        if self.costs is None:
            both = zip(work, self._speeds, strict=True)
            return [replace(own, durations_s=durations_of(speeds, own.micro_batches)) for own, speeds in both]
        replicas = enumerate(zip(work, planned.replicas, strict=True))
        return [replace(own, durations_s=batch_durations_s(self.costs, batch.micro_batches, index)) for index, (own, batch) in replicas]

    @cached_property
    def _speeds(self) -> list[StageWeights]:
        """By formulas, which every process has: a profile may be missing on one, and its programs would not match the others'."""
        from penstock.costs.sources import open_costs
        from penstock.plans.references import cluster_of
        from penstock.programs.durations import priced_weights
        from penstock.timing.pipeline import at_plan_speeds

        cluster = cluster_of(self.plan)
        return priced_weights(self.model, self.plan, cluster, at_plan_speeds(open_costs("roofline", cluster), self.plan))

    def _counted(self, data: DataSet, batches: Sequence[GlobalBatch], planned: BatchPlan) -> dict[int, int] | None:
        """Positions of each sample that count in the loss, after the planner's own truncation."""
        if self.form.kind == "images":
            return None
        inputs: dict[int, int] = {}
        for batch in batches:
            inputs |= zip(sample_ids(batch, len(data)), batch.lengths[:, 0].tolist(), strict=True)
        counted = {}
        for replica in planned.replicas:
            for micro in replica.micro_batches:
                decs = micro.dec_lengths or (0,) * len(micro.samples)
                for identity, length, dec in zip(micro.samples, micro.lengths, decs, strict=True):
                    if self.form.kind == "masked":
                        counted[identity] = int((data.ragged["masked_positions"][identity % len(data)] < length).sum())
                    elif SPANS in data.ragged:
                        counted[identity] = int(self.form.answers(data.ragged[SPANS][identity % len(data)], length).sum())
                    else:
                        counted[identity] = self.form.counted(inputs[identity], length, dec)
        return counted


def sample_ids(batch: GlobalBatch, size: int) -> list[int]:
    """An id for each sample that no other of the batch has: its index in a data set of `size` samples, plus `size` for each time
    that it came before. So an id says which sample it is, also where a small data set fills a batch more than once."""
    seen: Counter[int] = Counter()
    ids = []
    for sample in batch.samples.tolist():
        ids.append(sample + size * seen[sample])
        seen[sample] += 1
    return ids


def describe_samples(batch: GlobalBatch, size: int) -> str:
    """The samples of a batch in words."""
    return f"Its samples are {first_of(list(map(str, sample_ids(batch, size))), _SHOWN)}."
