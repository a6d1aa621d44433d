"""What a plan holds: stages on devices, replicas, micro-batching, schedule, and what the planner predicted for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from penstock.notebooks import Shown
from penstock.plans.degrees import Axis, Degrees
from penstock.schedules.rules import DEFAULT_SCHEDULE

__all__ = ["MAX_PATTERNS", "Degrees", "MicroBatching", "OpRange", "OpRun", "Pattern", "Plan", "Predicted", "Stage", "StageMemory"]

OpRange = tuple[int, int]
"""Ops [first, last): `last` is one past the end, as in a Python slice. Indices count from the start of the model."""

Pattern = tuple[OpRange, ...]
"""Ops to recompute. Neighbours of one block run again together and keep only what enters them, see `models.segments`."""

MAX_PATTERNS = 4
"""Recomputation patterns per stage, so that compiled variants stay few."""


@dataclass(frozen=True, slots=True)
class OpRun:
    """Ops [first, last) of a stage that are split otherwise than the rest of it."""

    first: int
    last: int
    tp: int
    dp: int
    algo: int = 0
    """Which of the op's splits, see `Op.splits`."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops [first, last) on a group of devices in each replica."""

    first: int
    last: int
    devices: tuple[tuple[int, ...], ...]
    """Ranks in each replica; neighbours in the list form a tensor-parallel group."""
    degrees: Degrees = field(default_factory=Degrees)
    runs: tuple[OpRun, ...] = ()
    """Ops with degrees or a split of their own; the others have the stage's degrees and split 0."""
    recompute: tuple[Pattern, ...] = ()
    """Patterns a micro-batch may use; 0 is the default. No pattern at all is the same as one that recomputes nothing."""
    zero: int = 0
    """ZeRO stage: what is shared among all ranks that hold the same weights (1 optimizer state, 2 gradients, 3 weights)."""
    sequence_parallel: bool = False
    """Between tensor-parallel ops the tokens are divided among the tp ranks."""

    @property
    def num_devices(self) -> int:
        """Devices in one replica, as the degrees want them."""
        return self.degrees.size

    def pattern(self, index: int = 0) -> Pattern:
        """The ops recomputed under pattern `index`."""
        return self.recompute[index] if self.recompute else ()

    def recomputed(self, index: int = 0) -> frozenset[int]:
        """The ops recomputed under pattern `index` as positions within the stage, as `costs` and `models.modules` take them."""
        return frozenset(op - self.first for first, last in self.pattern(index) for op in range(first, last))

    def tp_groups(self, tp: int = 0) -> Iterator[tuple[int, ...]]:
        """The ranks that divide ops among them, in every replica; `tp` 0 means the stage's own degree."""
        degrees = Degrees(tp) if tp else self.degrees
        return (group for ranks in self.devices for group in degrees.groups(Axis.TP, ranks))

    def run_of(self, op: int) -> OpRun:
        """How one op of the stage is split."""
        for run in self.runs:
            if run.first <= op < run.last:
                return run
        return OpRun(op, op + 1, self.degrees.tp, self.degrees.dp)

    def algos(self) -> list[int]:
        """The split of each op of the stage."""
        return [self.run_of(op).algo for op in range(self.first, self.last)]


@dataclass(frozen=True, slots=True)
class MicroBatching:
    """How a global batch becomes micro-batches."""

    layout: Literal["padded", "packed"] = "padded"
    policy: Literal["fixed", "dynamic"] = "fixed"
    """`fixed`: every micro-batch has `samples` samples. `dynamic`: decided for each batch from its lengths."""
    samples: int | None = None
    """Samples of a micro-batch of one replica, before the stage's dp divides them; with `dynamic` the most it may have."""
    max_tokens: int | None = None
    """The most tokens a `dynamic` micro-batch may have, padding included."""
    per_replica: tuple[int, ...] = ()
    """Micro-batches that each replica runs in one iteration, with `fixed` where replicas differ in speed; none: all as many."""
    slower: tuple[tuple[int, tuple[float, float, float]], ...] = ()
    """Ranks that take longer than the costs say, and how many times longer: matrix products, attention, all else. `dynamic` micro-batches
    are chosen for these speeds, and dp ranks divide the samples of each micro-batch by them."""
    slower_links: tuple[tuple[int, int, float], ...] = ()
    """Pairs of ranks, the lower one first, whose messages take longer than the costs say, and how many times: `dynamic` micro-batches and
    their order are chosen for these."""

    @property
    def made_for_slow(self) -> bool:
        """Whether micro-batches are chosen for ranks or links that were slow."""
        return bool(self.slower or self.slower_links)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on the fullest device of a stage at the fullest moment, by the purposes of `costs.memory.MemoryBreakdown`."""

    weights_bytes: int = 0
    gradients_bytes: int = 0
    master_weights_bytes: int = 0
    moments_bytes: int = 0
    activations_bytes: int = 0
    workspace_bytes: int = 0
    buffers_bytes: int = 0
    slack_bytes: int = 0
    context_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the planner expects of one iteration."""

    time_s: float
    costs: str
    """The source of costs it was computed from."""
    tokens_per_s: float | None = None
    price_usd: float | None = None
    """Money for one iteration; None where a node has no price."""
    price_usd_per_h: float | None = None
    lower_bound_s: float | None = None
    """No plan of the searched kind is faster by closed formula, which hides no message behind compute; `time_s` is the clock's."""
    memory: tuple[StageMemory, ...] = ()
    """One for each stage, or none."""


@dataclass(frozen=True)
class Plan(Shown):
    """One way to train one model on one cluster."""

    model: str | Mapping[str, Any]
    """A name, `mine.yaml`, `hf:PATH/config.json`, or the fields of such a file (`base` or `family`, and sizes)."""
    cluster: str | Mapping[str, Any]
    """A shorthand, a cluster file, or a whole cluster as `cluster_to_dict` gives it."""
    global_batch: int
    """Samples of one iteration, all replicas together."""
    stages: tuple[Stage, ...]
    micro_batching: MicroBatching
    num_replicas: int = 1
    schedule: str = DEFAULT_SCHEDULE
    seq_length: int = 0
    """Tokens of a sample the plan was made for (with `dynamic` the usual or the longest); 0 for images."""
    dec_length: int = 0
    """Tokens of a sample on the decoder's side; 0 without a decoder."""
    precision: str = "bf16"
    gradients: str = ""
    """The dtype in which gradients are summed, over micro-batches and over ranks: fp32, or empty for the weights' own."""
    optimizer: str = "adamw"
    costs: str = "roofline"
    """The source of costs to use where more has to be predicted."""
    predicted: Predicted | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        """The plan of a file."""
        from penstock.plans.schema import read_plan

        return read_plan(path)

    def write(self, path: str | Path) -> None:
        """Writes the plan so that `read` gives an equal one."""
        from penstock.plans.schema import write_plan

        write_plan(path, self)

    def __str__(self) -> str:
        """What was chosen, what it is expected to take, and why."""
        from penstock.plans.telling import plan_in_words

        return plan_in_words(self)

    @property
    def num_stages(self) -> int:
        """Stages of one replica, chunks of an interleaved schedule counted each."""
        return len(self.stages)

    @property
    def num_groups(self) -> int:
        """Distinct device groups of one replica: `num_stages`, unless the schedule is interleaved."""
        return len({stage.devices for stage in self.stages})

    @property
    def num_chunks(self) -> int:
        """Stages per device group."""
        return max(1, self.num_stages // max(1, self.num_groups))

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches of one replica in one iteration, the most that any has; None where each batch decides."""
        batching = self.micro_batching
        if batching.policy != "fixed" or not batching.samples:
            return None
        return max(batching.per_replica, default=self.global_batch // (self.num_replicas * batching.samples))

    @property
    def micro_batches_per_replica(self) -> tuple[int, ...] | None:
        """Micro-batches of each replica in one iteration; None where each batch decides."""
        most = self.num_micro_batches
        return None if most is None else self.micro_batching.per_replica or (most,) * self.num_replicas

    @property
    def ranks(self) -> tuple[int, ...]:
        """Every rank that has work, in order."""
        return tuple(sorted({rank for stage in self.stages for group in stage.devices for rank in group}))
