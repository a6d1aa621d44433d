"""From a plan and prepared data to trained weights: what is checked before anything starts, and what every rank then does."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from penstock.data.dataset import DataSet, open_data
from penstock.data.forms import SampleForm, form_of
from penstock.data.planners import BatchSource
from penstock.data.planning import ProgramPlanner
from penstock.errors import InputError
from penstock.plans.capabilities import unsupported
from penstock.plans.references import cluster_of, model_of
from penstock.plans.validity import require_valid
from penstock.runtime.interrupts import Interrupts
from penstock.runtime.planner_processes import Handover, PlanningSettings, planners_here, planners_of_nodes
from penstock.runtime.run_folder import write_run
from penstock.runtime.update import TrainingSettings
from penstock.runtime.workers import Pool, Worker, joined
from penstock.schedules.rules import SCHEDULES

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.runtime.telemetry.observing import StageTime
    from penstock.runtime.telemetry.predicting import Predicted

__all__ = ["EvalRecord", "Progress", "TrainRequest", "TrainResult", "Trainer", "train_rank"]

PROCESSES_PER_CORE = 8
TIMED = "timed"
WARM_UP = 2
"""Iterations that measured times leave out."""
_EVAL_SPLIT = "validation"


@dataclass(frozen=True)
class TrainRequest:
    """Everything that a run is told; the same on every rank."""

    plan: Plan
    data: str
    """A folder that `penstock prepare-data` wrote."""
    steps: int
    out: str
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    device: str = ""
    """`cpu` or `cuda`; empty: what the plan's cluster has. `timed`: stand-ins for devices that are not here, which compute nothing."""
    eval_every: int = 0
    """Steps between evaluations on the held-out split; 0: never."""
    eval_batches: int = 4
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    resume: str = ""
    """A checkpoint, or a folder of them, to go on from."""
    weights: str = ""
    """What to begin with in place of random weights: `hf:FOLDER`, or a checkpoint, or a folder of them."""
    prompt_loss: bool = False
    """Whether the tokens of inputs count in a decoder's loss."""
    profile_steps: tuple[int, ...] = ()
    """Steps of which every rank writes a torch.profiler trace."""
    share_gpus: bool = False
    """Whether several ranks may run on one GPU (each with its part of it, under MPS)."""
    reserve_memory: float = 0.0
    """Share of each GPU's memory that is taken at the start, so that no step waits for more; 0: none."""
    planning: PlanningSettings = field(default_factory=PlanningSettings)
    slower: Mapping[int, float] = field(default_factory=dict)
    """Ranks whose timed devices take so many times as long as the costs say."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Progress:
    """What rank 0 tells the launcher after each step."""

    step: int
    loss: float | None
    """None on timed devices."""
    tokens_per_s: float
    gpu_utilisation: float | None = None
    """Of rank 0's device, where it is known."""
    evaluated: EvalRecord | None = None
    notes: tuple[str, ...] = ()
    """What to say once, such as what cannot be recorded."""


@dataclass(frozen=True)
class TrainResult:
    """What a run achieved."""

    first_step: int
    num_steps: int
    """Those before it in a checkpoint not counted."""
    losses: tuple[float, ...]
    """One for each step; none on timed devices."""
    evaluated: tuple[EvalRecord, ...]
    time_s: float
    """Median of one iteration, the first ones left out."""
    tokens_per_s: float
    """Useful tokens of one iteration over its median time."""
    stages: dict[int, StageTime]
    """Measured, on the slowest rank of each."""
    checkpoint: str | None
    """The folder of checkpoints; None on timed devices, which have nothing to keep."""
    ended_by: int = 0
    """The signal that ended it before its last step; 0: none."""


class Trainer:
    """Trains a plan on this machine.

    >>> Trainer(TrainRequest(read_plan("plan.json"), "data", steps=100, out="run")).train()   # doctest: +SKIP
    """

    def __init__(self, request: TrainRequest) -> None:
        self.request = _checked(request)
        self.model = model_of(request.plan)
        self.first_step = _first_step(self.request)
        """How many steps a checkpoint has behind it."""

    def join(self, progress: Callable[[Progress], None] | None = None) -> TrainResult:
        """Trains as one of the processes that torchrun started."""
        import torch
        import torch.distributed as dist

        request = self.request
        with (
            joined(request.device) as worker,
            planners_of_nodes(request.planning, *planning_of(request, self.model), self.first_step) as handover,
            Interrupts(quiet=worker.rank != 0) as interrupts,
        ):
            if worker.rank == 0:
                write_run(request)
            token = torch.tensor([secrets.randbits(62)])
            dist.broadcast(token, 0)
            worker = replace(worker, tell=lambda told: progress(told) if progress else None, asked_to_end=lambda: interrupts.number)
            return train_rank(worker, request, handover, f"{int(token):x}")

    def train(self, progress: Callable[[Progress], None] | None = None) -> TrainResult:
        """Starts the plan's processes, trains, and ends them; `progress` hears of every step. Ctrl-C and SIGTERM end it after the step that
        runs, with a checkpoint."""
        request, rehearses = self.request, self.request.device == TIMED
        write_run(request)
        threads = max(1, len(os.sched_getaffinity(0)) // len(request.plan.ranks))
        with (
            planners_here(request.planning, *planning_of(request, self.model), self.first_step) as handover,
            Pool(len(request.plan.ranks), device="cpu" if rehearses else request.device, threads=threads, timeout_s=_OPERATION_S) as pool,
            nullcontext() if rehearses else Interrupts(pool.board.ask_to_end),
        ):
            job = (_rehearse_rank, request, handover) if rehearses else (train_rank, request, handover, secrets.token_hex(8))
            found: list[TrainResult] = pool.run(
                *job, timeout_s=_RUN_S, listen=lambda rank, told: progress(told) if progress else None
            )  # fmt: skip
        return found[0]

    def predicted(self, result: TrainResult) -> Predicted:
        """What the plan's costs say of the steps of a run, those left out that warm up."""
        from penstock.runtime.telemetry.predicting import predict_steps

        last = result.first_step + result.num_steps
        first = result.first_step + WARM_UP if result.num_steps > WARM_UP else result.first_step
        return predict_steps(*planning_of(self.request, self.model), range(first, last))


_OPERATION_S = 1800.0
"""The longest that one transfer or collective may take."""
_RUN_S = 365 * 24 * 3600.0
"""A run may take as long as it takes; a rank that dies is noticed at once all the same."""


def _checked(request: TrainRequest) -> TrainRequest:
    """The request with its device named, if it can be run here."""
    plan = request.plan
    model, cluster = model_of(plan), cluster_of(plan)
    require_valid(plan, model, cluster)
    if request.steps < 1:
        raise InputError(f"{request.steps} steps were asked for; 1 or more was expected.")
    if refused := unsupported(plan, model):
        raise InputError("the plan cannot be run:\n" + "\n".join(f"  {problem}" for problem in refused))
    if SCHEDULES[plan.schedule].asynchronous and request.device != TIMED and request.settings.clip_norm is not None:
        raise InputError(
            f"gradients are to be clipped to a norm of {request.settings.clip_norm:g}, but under schedule '{plan.schedule}' no rank knows "
            "those of all stages. Use --clip 0."
        )
    device = request.device or ("cpu" if {cluster.device(rank).name for rank in plan.ranks} == {"cpu"} else "cuda")
    _require_devices(plan, device, request.share_gpus)
    _require_slower(request)
    data = open_data(request.data)
    form_of(model, data, prompt_loss=request.prompt_loss)
    if len(data) < plan.global_batch:
        raise InputError(
            f"data '{request.data}' has {len(data)} samples, fewer than one global batch of {plan.global_batch}. "
            "Use more data, or a plan with a smaller global batch."
        )
    if request.eval_every and _EVAL_SPLIT not in data.manifest.splits:
        raise InputError(f"evaluation was asked for, but data '{request.data}' has no split '{_EVAL_SPLIT}'. Prepare it with one.")
    if request.resume:
        from penstock.runtime.checkpoints.folder import find_checkpoint

        request = replace(request, resume=str(find_checkpoint(request.resume)))
    if request.weights:
        from penstock.runtime.checkpoints.first_weights import check_weights

        if request.resume:
            raise InputError(
                f"a run that goes on from '{request.resume}' has its weights from there; --weights '{request.weights}' is for one that "
                "begins. Give one of the two."
            )
        check_weights(request.weights, model)
    _require_steps(request)
    return replace(request, device=device)


def _require_steps(request: TrainRequest) -> None:
    """Refuses a run with nothing left to do, and steps to profile that it does not have."""
    first, steps = _first_step(request), request.steps
    if first >= steps:
        raise InputError(f"checkpoint '{request.resume}' has {first} steps behind it, which --steps {steps} counts too. Ask for more.")
    for step in request.profile_steps:
        if not first <= step < steps:
            raise InputError(f"step {step} is to be profiled, but this run has steps {first} to {steps - 1}. Choose among those.")


def _require_devices(plan: Plan, device: str, share_gpus: bool) -> None:
    count = len(plan.ranks)
    if device not in ("cpu", "cuda", TIMED):
        raise InputError(f"device is '{device}'; cpu or cuda was expected, or {TIMED} to rehearse a plan.")
    if "WORLD_SIZE" in os.environ:
        if device == TIMED:
            raise InputError("timed devices keep one clock, that of one machine. Run them without torchrun.")
        started = int(os.environ["WORLD_SIZE"])
        if started != count:
            raise InputError(f"the plan has {count} ranks, but {started} processes were started. Start one for each rank.")
        return
    if device != "cuda":
        cores = len(os.sched_getaffinity(0))
        if count > cores * PROCESSES_PER_CORE:
            raise InputError(
                f"the plan has {count} ranks, but this machine's {cores} processor cores run at most {cores * PROCESSES_PER_CORE} "
                "processes. Use a plan for fewer devices, or more machines."
            )
        return
    import torch

    found = torch.cuda.device_count()
    if count > found and not (share_gpus and found):
        raise InputError(
            f"the plan has {count} ranks, but this machine has {found} CUDA devices. Use a plan for at most {found}, run it on more "
            f"machines with torchrun, try it out with --device cpu, or rehearse it with --device {TIMED}."
        )


def _require_slower(request: TrainRequest) -> None:
    for rank, factor in request.slower.items():
        if request.device != TIMED:
            raise InputError(f"rank {rank} is to be {factor:g} times as slow, which only timed devices can be. Use --device {TIMED}.")
        if rank not in request.plan.ranks:
            raise InputError(f"rank {rank} is to be slower, but the plan has ranks {min(request.plan.ranks)} to {max(request.plan.ranks)}.")
        if not 0 < factor < math.inf:
            raise InputError(f"rank {rank} is to take {factor:g} times as long; a number above 0, such as 1.5, was expected.")


def _first_step(request: TrainRequest) -> int:
    if not request.resume:
        return 0
    from penstock.runtime.checkpoints.reader import Checkpoint

    return Checkpoint(request.resume).step


def _limits(plan: Plan, data: DataSet, form: SampleForm) -> tuple[int | None, ...]:
    """Longest input and target, so that a sample fills no more positions than the plan was made for."""
    longest = plan.seq_length
    if form.kind == "images":
        return ()
    if form.kind == "encoder-decoder":
        return longest, plan.dec_length
    if form.kind == "masked":
        return (longest,)
    if not form.paired:
        return (longest + 1,)
    target = min(int(data.lengths[1].max()), max(1, longest // 2))
    return longest + 1 - target, target


def _source(request: TrainRequest, model: Model, split: str = "train") -> BatchSource:
    data = open_data(request.data, split)
    limits = _limits(request.plan, data, form_of(model, data, prompt_loss=request.prompt_loss))
    training = split == "train"
    return BatchSource(
        request.data, split, samples_per_batch=request.plan.global_batch, limits=limits, seed=request.settings.seed, shuffle=training,
        num_steps=request.steps if training else request.eval_batches,
    )  # fmt: skip


def _planner(request: TrainRequest, model: Model) -> ProgramPlanner:
    data = open_data(request.data)
    costs = None
    if request.plan.micro_batching.policy == "dynamic":
        from penstock.batching.planner import costs_for

        costs = costs_for(request.plan, request.plan.seq_length, request.plan.dec_length)
    form = form_of(model, data, prompt_loss=request.prompt_loss)
    return ProgramPlanner(request.plan, model, costs, form, request.planning.search_steps, seed=request.settings.seed)


def train_rank(worker: Worker, request: TrainRequest, handover: Handover, token: str) -> TrainResult:
    """One rank's whole run: a job for workers, and what a process under torchrun calls."""
    from penstock.runtime.run import Run

    with Run(worker, request, handover, token) as run:
        return run.train()


def _rehearse_rank(worker: Worker, request: TrainRequest, handover: Handover) -> TrainResult:
    from penstock.runtime.rehearsing import rehearse_rank

    return rehearse_rank(worker, request, handover)


def planning_of(request: TrainRequest, model: Model, split: str = "train") -> tuple[BatchSource, ProgramPlanner]:
    """Which batches a run takes, and who plans them."""
    return _source(request, model, split), _planner(request, model)
