"""Which batches a run draws, and who plans them: built here alone, for training, rehearsals, evaluations, predictions and traces alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.data.dataset import open_data
from penstock.data.filled import sample_limits
from penstock.data.forms import form_of
from penstock.data.planners import BatchSource
from penstock.data.planning import ProgramPlanner
from penstock.data.samples import Samples
from penstock.data.windows import Drains
from penstock.plans.references import model_of
from penstock.programs.check import require_safe
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import forward_work
from penstock.runtime.request import PACED, RECOVER, TrainRequest
from penstock.runtime.telemetry.predicting import ProgramTimes
from penstock.schedules.rules import SCHEDULES
from penstock.timing.pipeline import micro_batches

__all__ = ["PlanInputs", "batch_source", "held_out_programs", "plan_inputs", "program_planner", "run_inputs"]


@dataclass(frozen=True)
class PlanInputs:
    """A process' inputs under one plan: its planner, predicted times and held-out samples."""

    planner: ProgramPlanner
    times: ProgramTimes | None = None
    """Predicted times of its passes, for paced devices."""
    held_out: Samples | None = None
    evaluations: Sequence[Program] = ()
    """This rank's forward passes over the held-out samples."""


def plan_inputs(request: TrainRequest, planner: ProgramPlanner, rank: int) -> PlanInputs:
    """A rank's inputs under the plan of a planner; whatever of that plan can fail, fails here, before it is in force."""
    if rank not in planner.plan.ranks:
        return PlanInputs(planner)
    times = ProgramTimes(planner.plan, planner.model, planner.costs) if request.device == PACED else None
    return PlanInputs(planner, times, *(held_out_programs(request, planner, rank) if request.eval_every else (None, ())))


def run_inputs(request: TrainRequest) -> tuple[BatchSource, ProgramPlanner]:
    """The batches that a run trains on, and their planner."""
    return batch_source(request), program_planner(request)


def batch_source(request: TrainRequest, split: str = "train") -> BatchSource:
    """The batches of a split: those of all steps, shuffled, or the first few of a held-out one in their order."""
    data = open_data(request.data, split)
    form = form_of(model_of(request.plan), data, prompt_loss=request.prompt_loss)
    limits = sample_limits(form, request.plan.seq_length, request.plan.dec_length)
    training = split == "train"
    return BatchSource(
        request.data, split, samples_per_batch=request.plan.global_batch, limits=limits, seed=request.settings.seed, shuffle=training,
        num_steps=request.steps if training else request.eval_batches,
    )  # fmt: skip


def program_planner(request: TrainRequest) -> ProgramPlanner:
    """The planner that turns batches into programs of the request's plan."""
    plan, model, costs = request.plan, model_of(request.plan), None
    if plan.micro_batching.policy == "dynamic":
        from penstock.batching.planner import costs_for

        costs = costs_for(plan, plan.seq_length, plan.dec_length)
    form = form_of(model, open_data(request.data), prompt_loss=request.prompt_loss)
    return ProgramPlanner(plan, model, costs, form, request.planning.search_steps, seed=request.settings.seed, drains=_drains(request))


def _drains(request: TrainRequest) -> Drains:
    """The steps before which the pipeline of an asynchronous plan has to be empty: for what looks at the weights of all
    stages, or changes their plan."""
    rules, (_, counts) = SCHEDULES[request.plan.schedule], micro_batches(request.plan)
    if not rules.asynchronous:
        return Drains()
    copies = request.copies if request.on_death == RECOVER else 0
    profiled = [step for first in request.profile_steps for step in (first, first + 1)]
    window = rules.window(request.plan.num_groups, counts[0])
    return Drains(window, (request.eval_every, request.checkpoint_every, copies), (request.steps, *profiled))


def held_out_programs(request: TrainRequest, planner: ProgramPlanner, rank: int) -> tuple[Samples, list[Program]]:
    """Samples of the held-out split, and a rank's forward passes over some batches of it, planned like training's."""
    source = batch_source(request, "validation")
    data, batches = source.open()
    found = []
    for number in range(request.eval_batches):
        planned = planner.programs(data, batches[number])
        work = [forward_work(program) for _, program in sorted({program.replica: program for program in planned}.items())]
        programs = lower(planner.plan, planner.model, work, number, training=False)
        require_safe(programs, planner.plan, planner.model)
        found.append(next(program for program in programs if program.rank == rank))
    return Samples(data, planner.form, source.limits), found
