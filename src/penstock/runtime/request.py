"""What a run is told, and what it tells: the request that is the same on every rank, progress after each step, and the result."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.notebooks import Shown
from penstock.runtime.settings import TrainingSettings
from penstock.stores.addresses import ADDRESS_VARIABLE
from penstock.timing.disturbance import Disturbance

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.plans.plan import Plan
    from penstock.runtime.telemetry.observing import StageTime
    from penstock.runtime.telemetry.parts import RankTimes

__all__ = [
    "END", "PACED", "RECOVER", "TIMED", "WARM_UP", "EvalRecord", "GoingOn", "MayLeave", "NodePlace", "PlanAdopted", "PlanningSettings",
    "StepReport", "TrainRequest", "TrainResult",
]  # fmt: skip

TIMED, PACED = "timed", "paced"
"""Devices that take as long as the costs say: on those of a rehearsal ops are waits, the others compute, and wait for what is left."""
END, RECOVER = "end", "recover"
"""What becomes of a run one of whose processes dies."""
WARM_UP = 2
"""Iterations that measured times leave out."""


@dataclass(frozen=True)
class PlanningSettings:
    """Settings of the planners that work while a run trains."""

    planners: int = 1
    """Planner processes on each node; 0: every rank plans for itself, in step with training."""
    store: str = ""
    """Address of the store between planners and ranks; empty: what the environment names, or one that this job serves."""
    away_s: float = 60.0
    """How long the store may be away before the run ends, with a checkpoint."""
    wait_s: float = 1800.0
    """How long a rank waits for a program that does not come, though the store answers, before the run ends, with a checkpoint."""
    hang_s: float = 300.0
    """A planner that is at one iteration, or shows no life, for longer is replaced."""
    search_steps: int = 0
    """Steps of search for each batch of dynamic micro-batches, after the plan found at once."""

    def __post_init__(self) -> None:
        if self.planners < 0:
            raise InputError(f"{self.planners} planners were asked for; 1 or more were expected, or 0 to plan in step with training.")
        if not self.wait_s > 0:
            raise InputError(f"ranks may wait for {self.wait_s} s for a program; a number of seconds above 0 was expected.")
        if not self.away_s >= 0:
            raise InputError(f"the store may be away for {self.away_s} s; a number of seconds was expected.")

    @property
    def address(self) -> str:
        """The address of a store that others serve; empty if the job serves its own."""
        return self.store or os.environ.get(ADDRESS_VARIABLE, "")


@dataclass(frozen=True)
class NodePlace:
    """One of the machines of a job."""

    number: int
    """Among those that have work, in the order of ranks."""
    host: str
    port: int
    """Where the supervisor of node 0 is met."""
    address: str = ""
    """Of this machine, for the others; empty: the one from which it reaches node 0."""
    command: tuple[str, ...] = ()
    """The words after `penstock` that started it, so that others can be started alike."""


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
    """`cpu` or `cuda`; empty: what the plan's cluster has. `timed`: stand-ins for devices that are not here, which compute nothing.
    `paced`: the processor, at the pace of the plan's devices."""
    eval_every: int = 0
    """Steps between evaluations on the held-out split; 0: never."""
    eval_batches: int = 4
    checkpoint_every: int = 500
    """Steps between checkpoints, of which there is one every ten minutes besides; 0: only at the end."""
    keep: int = 2
    """Checkpoints that stay, the newest ones; the best by evaluation stays besides."""
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
    disturbance: Disturbance = field(default_factory=Disturbance)
    """What slows timed and paced devices down."""
    on_death: str = "end"
    """What becomes of a run one of whose processes dies: `end`, or `recover`, which goes on with another in its place."""
    copies: int = 10
    """Steps between copies of what each rank has learned, which outlive it; 0: none, and a run that recovers goes back to a checkpoint."""
    spares: int = 0
    """Devices after the last with work that have a process too, and take the place of those that are lost."""
    node: NodePlace | None = None
    """Which of several nodes this is, each with a supervisor of its own; None: there is one, or torchrun starts all processes."""


@dataclass(frozen=True)
class GoingOn:
    """The step from which processes go on that take the place of others, after a death or a move to other nodes."""

    step: int
    """How many steps they go on from."""
    from_copies: bool
    """Whether what was learned in them is in copies; else in the checkpoint that the request names, or it is nothing yet."""


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation."""

    step: int
    loss: float
    accuracy: float


@dataclass(frozen=True)
class StepReport:
    """Rank 0's message to the launcher after each step."""

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
class PlanAdopted:
    """Every process' message to the launcher when the job has moved to another plan: planners have to follow."""

    step: int
    """The first one under it."""
    plan: Plan


@dataclass(frozen=True)
class MayLeave:
    """A rank's message to the launcher of a node that is asked to leave: other nodes have what its ranks have learned."""

    has_moved: bool = False
    """Whether theirs go on already with its work, and not from their copies."""


@dataclass(frozen=True)
class TrainResult(Shown):
    """The result of a run."""

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
    ranks: Mapping[int, RankTimes] = field(default_factory=dict)
    """Measured, on each rank; none where no step was counted."""
    plan: Plan | None = None
    """In force at the end, if the run moved to it; times are those of its steps."""
    plan_since: int = 0
    """Its first step."""
    has_left: bool = False
    """Whether this node was asked to leave a run that goes on without it."""
