"""From a plan and prepared data to trained weights: what is checked before anything starts, and what every rank then does."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from penstock.data.dataset import open_data
from penstock.data.forms import form_of
from penstock.errors import InputError, PenstockError, near_misses, plural
from penstock.models.ops import Model
from penstock.plans.capabilities import require_supported
from penstock.plans.ranks import wrongly_started
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import require_valid
from penstock.processes.main_guard import require_guarded_main
from penstock.programs.memory import require_memory
from penstock.runtime.checkpoints.first_weights import check_weights
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.going_on import check_goes_on, run_facts
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.data_notes import data_notes
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.nodes.place import node_key, node_notes, nodes_of, processes_of, ranks_here
from penstock.runtime.nodes.supervisor import Supervisor, hearing, with_safe_step
from penstock.runtime.planner_processes import planners_of_nodes
from penstock.runtime.rank_state import check_state
from penstock.runtime.recovering.faults import PHASES
from penstock.runtime.recovering.recovery import DeathWitness, require_room_for_copies
from penstock.runtime.request import END, PACED, RECOVER, TIMED, WARM_UP, StepReport, TrainRequest, TrainResult
from penstock.runtime.run import Watching, train_rank
from penstock.runtime.run_folder import own_folder
from penstock.runtime.run_inputs import run_inputs
from penstock.runtime.run_predictions import keep_inputs
from penstock.runtime.telemetry.predicting import PredictedSteps, predict_peaks, predict_steps
from penstock.runtime.worker import joined

__all__ = ["PlanTrainer"]

PROCESSES_PER_CORE = 8
_EVAL_SPLIT = "validation"


class PlanTrainer:
    """Trains a plan on this machine.

    >>> PlanTrainer(TrainRequest(read_plan("plan.json"), "data", steps=100, out="run")).train()   # doctest: +SKIP
    """

    def __init__(self, request: TrainRequest, watching: Watching | None = None, witness: DeathWitness | None = None) -> None:
        """`watching` makes who is told of every step, on every rank; a function that ranks can import. `witness` is told of deaths."""
        self.request, self.watching, self._witness = _checked(request), watching, witness
        self.model = model_of(request.plan)
        self.first_step = _first_step(self.request)
        """How many steps a checkpoint has behind it."""

    def notes(self) -> list[str]:
        """Notes for the user before the first step: data that the plan was not made for, nodes that are waited for."""
        follows = self.request.node is not None and self.request.node.number > 0
        return [*([] if follows else data_notes(self.request)), *node_notes(self.request)]

    def join(self, progress: Callable[[StepReport], None] | None = None) -> TrainResult:
        """Trains as one of the processes that torchrun started."""
        import torch
        import torch.distributed as dist

        request = self.request
        first = os.environ.get("RANK", "0") == "0"
        with (
            own_folder(request, self.first_step) if first else nullcontext(),  # before any rank is met: a refusal is then all that is said
            joined(request.device, processes_of(request.plan)) as worker,
            planners_of_nodes(request.planning, *run_inputs(request), self.first_step) as planners,
            Interrupts(quiet=worker.rank != 0) as interrupts,
        ):
            if first:
                keep_inputs(request)
            token = torch.tensor([secrets.randbits(62)])
            dist.broadcast(token, 0)
            worker = replace(worker, tell=hearing(request, planners, progress), asked_to_end=lambda: interrupts.number)
            try:
                return train_rank(worker, request, planners.handover, f"{int(token):x}", self.watching)
            except PenstockError as error:
                raise (with_safe_step(error, request, self.first_step) if first else error) from None

    def train(self, progress: Callable[[StepReport], None] | None = None) -> TrainResult:
        """Starts the plan's processes, trains, and ends them; `progress` hears of every step. Ctrl-C and SIGTERM end it after the step that
        runs, with a checkpoint. Where processes die and the request says so, others take their place. On several nodes, this one starts
        those of its own; where it does not lead, nothing is told, and the result has nothing but the signal that ended the run."""
        require_guarded_main()
        return Supervisor(self.request, self.first_step, train_rank, self.watching, self._witness).train(progress)

    def predicted(self, result: TrainResult) -> PredictedSteps:
        """Predicts the steps of a run by the plan's costs, those left out that warm up."""
        request = self.request if result.plan is None else replace(self.request, plan=result.plan)
        last, since = result.first_step + result.num_steps, max(result.first_step, result.plan_since)
        first = since + WARM_UP if last - since > WARM_UP else since
        steps, (source, planner) = range(first, last), run_inputs(request)
        return replace(predict_steps(source, planner, steps), peak_bytes=predict_peaks(source, planner, steps))


_CLOCKED = (TIMED, PACED)
"""Devices that keep the time of the plan's, on the processor."""


def _checked(request: TrainRequest) -> TrainRequest:
    """The request with its device named, if it can be run here."""
    plan = request.plan
    model, cluster = model_of(plan), cluster_of(plan)
    require_valid(plan, model, cluster)
    if request.steps < 1:
        raise InputError(f"{request.steps} steps were asked for; 1 or more was expected.")
    if request.keep < 1:
        raise InputError(f"{request.keep} checkpoints are to be kept; keep at least 1.")
    require_supported(plan, model)
    if request.device != TIMED:  # which learns and holds nothing
        request.settings.require_suits(plan.schedule)
        require_memory(plan, model, cluster)
    device = request.device or ("cpu" if {cluster.device(rank).name for rank in plan.ranks} == {"cpu"} else "cuda")
    _require_spares(request)
    _require_node(request)
    _require_devices(replace(request, device=device))
    _require_clocked(replace(request, device=device))
    _require_data(request, model)
    if request.resume:
        request = replace(request, resume=str(find_checkpoint(request.resume)))
        _require_same_run(request, model)
    _require_weights(request, model)
    _require_steps(request)
    _require_recoverable(replace(request, device=device), model)
    return replace(request, device=device)


def _require_data(request: TrainRequest, model: Model) -> None:
    """Refuses data that is damaged, of another kind of model, less than a global batch, or without what is to be evaluated."""
    data, global_batch = open_data(request.data), request.plan.global_batch
    data.check()
    form_of(model, data, prompt_loss=request.prompt_loss)
    if len(data) < global_batch:
        raise InputError(
            f"data '{request.data}' has {plural(len(data), 'sample')}, fewer than one global batch of {global_batch}. "
            "Use more data, or a plan with a smaller global batch."
        )
    if request.eval_every and _EVAL_SPLIT not in data.manifest.splits:
        raise InputError(f"evaluation was asked for, but data '{request.data}' has no split '{_EVAL_SPLIT}'. Prepare it with one.")
    if request.eval_every:
        open_data(request.data, _EVAL_SPLIT).check()


def _require_weights(request: TrainRequest, model: Model) -> None:
    """Refuses first weights that are not of this model, or of a run that goes on."""
    if not request.weights:
        return
    if request.resume:
        raise InputError(
            f"a run that goes on from '{request.resume}' has its weights from there; --weights '{request.weights}' is for one that "
            "begins. Give one of the two."
        )
    check_weights(request.weights, model)


def _require_same_run(request: TrainRequest, model: Model) -> None:
    """Refuses a checkpoint that is damaged, or of another run than the request's; only the plan may be another."""
    checkpoint, seed = Checkpoint(request.resume), request.settings.seed
    check_goes_on(checkpoint, run_facts(model, request.data, seed=seed, global_batch=request.plan.global_batch))
    check_state(checkpoint, model, request.settings.optimizer.kind)
    if os.environ.get("RANK", "0") == "0":  # one reader is enough
        checkpoint.verify_small()


def _require_recoverable(request: TrainRequest, model: Model) -> None:
    """Refuses to recover where nobody could, and copies for which there is no room."""
    if request.on_death not in (END, RECOVER):
        raise InputError(f"--on-death is '{request.on_death}'; {END} or {RECOVER} was expected.")
    if request.on_death == END:
        return
    if "WORLD_SIZE" in os.environ:
        raise InputError("--on-death recover is for processes that `penstock train` starts; torchrun ends all of its own when one fails. "
                         "Start `penstock train … --node-rank R --master HOST:PORT` on each node in its place.")  # fmt: skip
    if request.device == TIMED:
        raise InputError(f"--on-death recover is for devices that compute; {TIMED} ones have nothing to lose. Leave it out.")
    if request.copies:
        require_room_for_copies(request, model)


def _require_steps(request: TrainRequest) -> None:
    """Refuses a run with nothing left to do, and steps to profile that it does not have."""
    first, steps = _first_step(request), request.steps
    if first >= steps:
        raise InputError(
            f"checkpoint '{request.resume}' has {plural(first, 'step')} behind it, which --steps {steps} counts too. Ask for more."
        )
    for step in request.profile_steps:
        if not first <= step < steps:
            raise InputError(f"step {step} is to be profiled, but this run has steps {first} to {steps - 1}. Choose among those.")


def _require_spares(request: TrainRequest) -> None:
    """Refuses spares that nobody would need, or for which there are no devices."""
    if not request.spares:
        return
    if request.on_death != RECOVER:
        raise InputError(f"--spares {request.spares} are for a run that recovers, and take the place of devices that are lost. "
                         "Add --on-death recover, or leave them out.")  # fmt: skip
    last, count = request.plan.ranks[-1], cluster_of(request.plan).num_devices
    if last + request.spares >= count:
        raise InputError(f"--spares is {request.spares}, but the plan's cluster has {plural(count, 'device')}, {count - 1 - last} of them "
                         f"after rank {last}, the last with work. Ask for fewer, or plan for fewer of a larger cluster.")  # fmt: skip


def _require_node(request: TrainRequest) -> None:
    """Refuses a node that the plan does not have."""
    if request.node is None:
        return
    if "WORLD_SIZE" in os.environ or request.device == TIMED:
        what = "torchrun" if "WORLD_SIZE" in os.environ else f"--device {TIMED}"
        raise InputError(f"--node-rank is for supervisors, which start the ranks of their nodes themselves. Leave out it, or {what}.")
    count = len(nodes_of(request))
    if not 0 <= request.node.number < count:
        raise InputError(f"--node-rank is {request.node.number}, but the plan has work for {plural(count, 'node')}, numbered from 0.")
    node_key()


def _require_devices(request: TrainRequest) -> None:
    """Refuses a run for which this machine, or torchrun, has not the devices or processes that the plan asks for."""
    plan, device, share_gpus, count = request.plan, request.device, request.share_gpus, len(ranks_here(request))
    if device not in ("cpu", "cuda", *_CLOCKED):
        raise InputError(f"device is '{device}'; cpu or cuda was expected, or {TIMED} to rehearse a plan, or {PACED} to train at its pace.")
    if "WORLD_SIZE" in os.environ:
        if device in _CLOCKED:
            raise InputError(f"{device} devices keep one clock, that of one machine. Run them without torchrun.")
        started = int(os.environ["WORLD_SIZE"])
        if started != count:
            raise wrongly_started(plan, started)
        if processes_of(plan)[0] not in plan.ranks:
            raise InputError(
                f"the first process tells what a run does, but the plan leaves rank 0 out. Start {plural(len(plan.ranks), 'process')}."
            )
        return
    if device != "cuda":
        cores = len(os.sched_getaffinity(0))
        if count > cores * PROCESSES_PER_CORE:
            raise InputError(
                f"the plan has {count} ranks, but this machine's {plural(cores, 'processor core')} run at most "
                f"{cores * PROCESSES_PER_CORE} processes. Use a plan for fewer devices, or more machines."
            )
        return
    import torch

    found = torch.cuda.device_count()
    if count > found and not (share_gpus and found):
        raise InputError(
            f"the plan has {plural(count, 'rank')}, but this machine has {plural(found, 'CUDA device')}. Use a plan for at most {found}, "
            f"run it on more machines with torchrun, try it out with --device cpu, or rehearse it with --device {TIMED}."
        )


def _require_clocked(request: TrainRequest) -> None:
    """Refuses a disturbance of devices that nobody can slow down, and of ranks that the plan does not have."""
    for change in request.disturbance.changes:
        if request.device not in _CLOCKED:
            raise InputError(
                f"{change.subject} is to be slower, which only timed and paced devices can be. Use --device {TIMED} or --device {PACED}."
            )
    for strike in request.disturbance.strikes:
        if request.device == TIMED:
            raise InputError(f"{strike.subject} is to be struck, but {TIMED} devices learn nothing that could be lost. Leave it out.")
        if strike.phase not in PHASES:
            raise InputError(f"{strike.subject} is to be struck in phase '{strike.phase}'. {near_misses(strike.phase, PHASES)}")
        if strike.rank is None and not (request.node is not None and (strike.node or 0) < len(nodes_of(request))):
            count = 1 if request.node is None else len(nodes_of(request))
            raise InputError(f"{strike.subject} is to be struck, but this run has {count} node{'s' * (count > 1)}. Nodes, and the stores "
                             "that one of them serves, are those of a run that is started with --node-rank and --master.")  # fmt: skip
    request.disturbance.require_ranks(request.plan.ranks)


def _first_step(request: TrainRequest) -> int:
    if not request.resume:
        return 0
    return Checkpoint(request.resume).step
