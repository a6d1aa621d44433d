"""What the plan's costs say of the steps that a run did, with the micro-batches that it really had: to compare with what was measured.

A plan is predicted for samples of its full length; real ones are shorter, and so are rows that are padded to the longest of each
micro-batch. Pipelines that micro-batches are not priced for (images, split backward passes) are predicted as the plan is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.batching.workloads import batch_workload
from penstock.plans.ranks import seats_of
from penstock.programs.instructions import Backward, BackwardInput, BackwardWeight, Forward, Instruction
from penstock.runtime.telemetry.parts import StepParts
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD
from penstock.schedules.rules import SCHEDULES
from penstock.timing.estimate import Estimator
from penstock.timing.execution import Execution, execute
from penstock.timing.iteration_estimate import Estimate
from penstock.timing.pipeline import dp_shares
from penstock.timing.workload import Floats, Workload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.batching.costs import PipelineCosts
    from penstock.data.planners import BatchSource
    from penstock.data.planning import ProgramPlanner
    from penstock.models.micro_batch import MicroBatch
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.programs.instructions import Place, Program
    from penstock.timing.planned import PlannedPipeline

__all__ = ["PASSES", "Pass", "PredictedSteps", "ProgramTimes", "passes_s", "predict_peaks", "predict_steps", "predict_timelines"]

Pass = Forward | Backward | BackwardInput | BackwardWeight
PASSES: dict[type[Instruction], int] = {Forward: FORWARD, Backward: BACKWARD, BackwardInput: INPUT_GRAD, BackwardWeight: WEIGHT_GRAD}
"""The kind of action that each instruction is."""
_ROUNDING = 1e-9
"""Of a step's time, what sums of its parts may be off by."""


@dataclass(frozen=True)
class PredictedSteps:
    """Seconds of a step, and of one micro-batch on each stage."""

    time_s: float
    """Median of the steps."""
    forward_s: tuple[float, ...]
    """Mean over the micro-batches of the replica that takes longest."""
    backward_s: tuple[float, ...]
    """Mean over the micro-batches of the replica that takes longest, recomputation included."""
    source: str
    """Where the costs come from."""
    parts: Mapping[int, StepParts] = field(default_factory=dict)
    """For each rank where the mean of the steps goes."""
    peak_bytes: Mapping[int, float] = field(default_factory=dict)
    """For each rank the most that tensors take; none if not asked for."""


def predict_steps(source: BatchSource, planner: ProgramPlanner, steps: range) -> PredictedSteps:
    """Predicts these steps of a run: their median time, and the passes of each stage."""
    plan = planner.plan
    if not _is_priced(plan, planner.model):
        return _of_plan(plan)
    costs = _costs(plan, planner.costs)
    times_s: list[float] = []
    passes: list[list[Floats]] = [[] for _ in range(plan.num_replicas)]
    for replicas in _of_batches(source, planner, costs, steps):
        times_s.append(max(one.makespan_s for one in replicas))
        for own, one in zip(passes, replicas, strict=True):
            own.append(one.workload.durations_s)
    means = np.stack([np.concatenate(own, axis=2).mean(axis=2) for own in passes]).max(axis=0)  # [kinds, stages]
    # [replicas, kinds, stages] of a step
    totals = np.stack([np.mean([durations.sum(axis=2) for durations in own], axis=0) for own in passes])
    return PredictedSteps(
        statistics.median(times_s), tuple(means[FORWARD].tolist()), tuple(means[BACKWARD].tolist()), costs.name,
        _parts(plan, statistics.fmean(times_s), totals[:, FORWARD], totals[:, BACKWARD], _estimate(plan)),
    )  # fmt: skip


def predict_peaks(source: BatchSource, planner: ProgramPlanner, steps: range) -> dict[int, float]:
    """For each rank the most bytes that its tensors take, in the one of these steps that has the most tokens."""
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of
    from penstock.programs.memory import peak_bytes

    data, batches = source.open()
    fullest = max(steps, key=lambda step: batches[step].num_tokens)
    cluster = cluster_of(planner.plan)
    estimator = Estimator(planner.model, cluster, open_costs(planner.plan.costs, cluster))
    return {program.rank: peak_bytes(program, planner.plan, estimator) for program in planner.window(data, batches, fullest)[1]}


def predict_timelines(source: BatchSource, planner: ProgramPlanner, steps: Iterable[int]) -> Iterator[list[Execution]]:
    """The timeline of each replica in each of these steps, or in all that are one program with it."""
    plan = planner.plan
    if _is_priced(plan, planner.model):
        yield from _of_batches(source, planner, _costs(plan, planner.costs), steps)
        return
    known: dict[int, Execution] = {}
    for step in steps:
        count = planner.drains.after(step) - step
        if count not in known:
            found = _pipeline(plan, planner.model, count)
            known[count] = execute(found.schedule, found.workload)
        yield [known[count]] * plan.num_replicas


class ProgramTimes:
    """Predicted times of the passes and transfers of programs: the figures that predictions of plans are made from."""

    def __init__(self, plan: Plan, model: Model, costs: PipelineCosts | None = None) -> None:
        """`costs` are those of single micro-batches, where they are known already."""
        self._costs = _costs(plan, costs) if _is_priced(plan, model) else None
        self._alike = None if self._costs is not None else _pipeline(plan, model).workload
        self._is_uneven = any(dp_shares(plan, replica, stage.degrees.dp) for replica in range(plan.num_replicas) for stage in plan.stages)
        """Whether ranks that divide a micro-batch among them get unequal parts: each is then predicted by its own."""

    def workload(self, program: Program, others: Sequence[Program] = ()) -> Workload:
        """Passes and transfers of the program's replica; recomputation is known, and counted, on the stages of the program's own rank and
        of `others` of its replica."""
        if self._alike is not None:
            count = len(program.micro_batches)
            same = {name: np.repeat(getattr(self._alike, name)[..., :1], count, axis=2) for name in ("durations_s", "transfers_s")}
            return replace(self._alike, **same)
        assert self._costs is not None
        patterns = {one.index: [0] * program.num_stages for one in program.micro_batches}
        for step in chain.from_iterable(one.instructions for one in (program, *others)):
            if isinstance(step, Forward):
                patterns[step.micro_batch][step.stage] = step.pattern
        own = program.places[0] if self._is_uneven else None
        micro_batches = [
            msgspec.structs.replace(one if own is None else _as_if_all(one, own), recompute=tuple(patterns[one.index]))
            for one in program.micro_batches
        ]
        return batch_workload(self._costs, micro_batches, program.replica)


def _as_if_all(micro: MicroBatch, place: Place) -> MicroBatch:
    """A micro-batch of which every rank of a stage has as much as one of them has of `micro`: costs are of equal parts."""
    first, last = micro.share(place.entry_dp, place.entry_share)
    if place.entry_dp == 1 or first == last or micro.row_sizes:
        return micro
    parts = {name: getattr(micro, name)[first:last] * place.entry_dp for name in ("samples", "lengths", "dec_lengths")}
    return msgspec.structs.replace(micro, **parts)


def passes_s(program: Program, work: Workload) -> float:
    """Seconds of all passes of a rank in a program; `work` has the times of its replica."""
    passes = (step for step in program.instructions if isinstance(step, Pass))
    return sum(float(work.durations_s[PASSES[type(step)], step.stage, step.micro_batch]) for step in passes)


def _pipeline(plan: Plan, model: Model, num_batches: int = 1) -> PlannedPipeline:
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of
    from penstock.timing.planned import planned_pipeline

    cluster = cluster_of(plan)
    return planned_pipeline(plan, model, cluster, open_costs(plan.costs, cluster), num_batches)


def _is_priced(plan: Plan, model: Model) -> bool:
    """Whether there are costs of single micro-batches."""
    return bool(model.seq_length) and SCHEDULES[plan.schedule].whole_passes


def _costs(plan: Plan, known: PipelineCosts | None) -> PipelineCosts:
    from penstock.batching.planner import costs_for

    if plan.micro_batching.made_for_slow:  # what it is compared with is to show how slow ranks and links are now
        plan = replace(plan, micro_batching=replace(plan.micro_batching, slower=(), slower_links=()))
        known = None
    layouts = (plan.micro_batching.layout,) if plan.micro_batching.policy == "fixed" else ()
    return known or costs_for(plan, plan.seq_length, plan.dec_length, layouts=layouts)


def _of_batches(source: BatchSource, planner: ProgramPlanner, costs: PipelineCosts, steps: Iterable[int]) -> Iterator[list[Execution]]:
    """With the micro-batches that these steps have."""
    data, batches = source.open()
    for step in steps:
        replicas = planner.batch_plan(data, batches[step]).replicas
        yield [execute(own.schedule, batch_workload(costs, own.micro_batches, number)) for number, own in enumerate(replicas)]


def _of_plan(plan: Plan) -> PredictedSteps:
    """Predicts a step from the plan's own micro-batches, where real ones have no price."""
    found = _estimate(plan)
    works = [stage.work for stage in found.stages]
    forward_s, backward_s = tuple(work.forward_pass_s for work in works), tuple(work.backward_pass_s for work in works)
    counts = np.array(found.per_replica)[:, None]
    parts = _parts(plan, found.time_s, counts * np.array(forward_s), counts * np.array(backward_s), found)
    return PredictedSteps(found.time_s, forward_s, backward_s, found.source, parts)


def _estimate(plan: Plan) -> Estimate:
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of

    cluster = cluster_of(plan)
    return Estimator(model_of(plan), cluster, open_costs(plan.costs, cluster)).estimate(plan)


def _parts(plan: Plan, step_s: float, forward_s: Floats, backward_s: Floats, found: Estimate) -> dict[int, StepParts]:
    """A step of so long on each rank, given [replicas, stages] of passes: what is neither pass nor update is transfers and waiting."""
    parts = {}
    for rank, seats in seats_of(plan).items():
        forward, backward = (float(sum(passes[seat.replica, seat.stage] for seat in seats)) for passes in (forward_s, backward_s))
        update = sum(found.stages[seat.stage].optimizer_s for seat in seats)
        rest = step_s - forward - backward - update
        parts[rank] = StepParts(forward, backward, update, rest if rest > _ROUNDING * step_s else 0.0)
    return parts
