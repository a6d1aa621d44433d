"""Moves a job that trains from one plan to another in its running processes, between two steps, or leaves it exactly as it is.

    prepare       every process works out the same moves, whether there is room for them, and tells the others
    transfer      boxes go from rank to rank in rounds of bounded size; before each round all say that they are ready for it
    acknowledge   all have what they need under the new plan; until here nothing of the old plan was touched
    commit        all make the next generation of process groups and adopt the new plan with what they hold and what came;
                  processes that leave the job have no part in it

A process that fails in one of the first three says so in place of going on, so that nobody waits for it: all then raise
`MoveAbortedError`, and training goes on under the old plan. To the bit a move is what stopping, saving a checkpoint and resuming under the
new plan in new processes would be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.adapting.moves import MAX_MOVE_BYTES, Move, Moves, moves
from penstock.adapting.split_moves import GRADIENT
from penstock.errors import InfeasibleError, InputError, PenstockError
from penstock.models.modules.build import TORCH_DTYPES
from penstock.plans.degrees import parts_of
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of
from penstock.plans.schema import plan_to_dict
from penstock.plans.texts import format_ranks
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, TensorPiece, optimizer_kinds
from penstock.runtime.checkpoints.reader import PiecesInMemory
from penstock.runtime.optimizing.optimizer import MASTER
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import TrainedState, adopt_state, held_pieces
from penstock.runtime.telemetry.phases import COMMITTING

__all__ = ["MoveAbortedError", "MoveNote", "Mover", "all_kinds", "move", "move_rounds", "require_movable", "state_moves"]


class MoveAbortedError(PenstockError):
    """A process could not take its part in a move: all keep the plan that they had, and training can go on."""


@dataclass(frozen=True)
class MoveNote:
    """One process' message to all others before anything travels."""

    plan: Mapping[str, Any]
    """The new plan, as its file would be."""
    step: int
    kinds: Mapping[str, bool]
    """What its optimizer keeps for each weight, and whether that is one number; nothing on a rank without weights."""
    loss_scale: Mapping[str, Any] | None
    update: tuple[float, float | None, bool] | None = None
    """The last update: its rate, what gradients were multiplied by, if anything, and whether it was dropped; None: it has made none."""


def move(
    rank: Rank, plan: Plan, step: int, prepare: Callable[[], object] = lambda: None, members: Sequence[int] | None = None
) -> Moves:  # fmt: skip
    """Puts `plan` in force before step `step`, with all that training has reached; what travelled. `prepare` does what else every process
    needs for the new plan: where it fails on one, nobody moves. The job goes on with all of its processes, or with `members` of them: the
    others have sent what they had, and may end.

    Every process of the job calls it between the same two steps, also one to which either plan gives nothing. Raises `InputError` for a
    plan of other training, `InfeasibleError` where a device has no room to move, `MoveAbortedError` where a process failed: on all
    processes, and with the old plan in force as before.
    """
    return Mover(rank, plan, step, prepare, members).run()


def require_movable(old: Plan, new: Plan, processes: Sequence[int]) -> Moves:
    """Returns the moves between two plans of a job that has these processes; refuses a plan of other training, of devices that the job
    lacks, or without room while both are held."""
    missing = [one for one in new.ranks if one not in processes]
    if missing:
        raise InputError(f"the new plan has rank {format_ranks(missing)}, but the job has processes for {format_ranks(processes)} alone. "
                         "Use a plan of devices that take part.")  # fmt: skip
    for word in ("optimizer", "global_batch", "seq_length", "dec_length"):
        before, after = getattr(old, word), getattr(new, word)
        if before != after:
            raise InputError(f"{word} is {after} in the new plan, but {before} in the old one: training would not be the same. "
                             "Use plans of one optimizer, global batch and length.")  # fmt: skip
    made = moves(old, new)
    if problem := made.unfit(cluster_of(old)):
        raise InfeasibleError(f"no room to move: {problem}. Stop and resume under the new plan, or choose one that moves less.")
    return made


def state_moves(old: Plan, new: Plan) -> bool:
    """Whether plans differ in more than their micro-batches, so that processes have to hold other things, or otherwise."""
    return replace(new, micro_batching=old.micro_batching, predicted=old.predicted, notes=old.notes) != old


class Mover:
    """This process' part in one move."""

    def __init__(
        self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object], members: Sequence[int] | None = None
    ) -> None:  # fmt: skip
        self.rank, self.plan, self.step, self.prepare, self.members = rank, plan, step, prepare, members
        self.generation = rank.groups.generation
        self.through = torch.device("cpu") if rank.groups.staged else rank.groups.device
        """Where the process groups can reach a tensor: processes that share a GPU have theirs on the host."""
        self.own: list[TensorPiece] = []
        """What this process holds under the old plan."""
        self.arrived: list[TensorPiece] = []

    def run(self) -> Moves:
        """All of a move that blocks training."""
        notes = self._exchanged(self._prepare)
        if self.members is None and not state_moves(self.rank.plan, self.plan):
            self.rank.share_out(self.plan)
            return self.made
        # Before the first step there are no moments to send.
        self._transfer([one for one in self.made.boxes if one.kind in (WEIGHTS, MASTER, BUFFERS, *all_kinds(notes))])
        self._adopt(notes)
        return self.made

    def _exchanged(self, act: Callable[[], MoveNote]) -> list[MoveNote]:
        """Exchanges the notes of all processes, which must want the same."""
        notes = [MoveNote(**told) for told in self._agreed(act)]
        if any((note.plan, note.step) != (notes[0].plan, notes[0].step) for note in notes):
            raise MoveAbortedError(f"processes were to move to different plans, or before different steps: "
                                   f"{[note.step for note in notes]}. Training goes on under the old plan.")  # fmt: skip
        return notes

    def _adopt(self, notes: Sequence[MoveNote]) -> None:
        """Puts the new plan in force with what this process holds and what came."""
        self.rank.phase(COMMITTING)
        if self.members is not None and self.generation.own not in self.members:
            self.generation.leave(self.members)
            return
        kinds = all_kinds(notes)
        # Exact ones first: a weight that a rank has, or gets, in half precision is its master rounded.
        pieces = sorted((*self.own, *self.arrived), key=lambda piece: piece.tensor.dtype != torch.float32)
        numbers = frozenset(kind for kind, is_number in kinds.items() if is_number)
        scale = next((note.loss_scale for note in notes if note.loss_scale is not None), None)
        adopt_state(self.rank, self.plan, TrainedState(PiecesInMemory(pieces), tuple(kinds), numbers, scale), self.members)

    def _prepare(self) -> MoveNote:
        rank = self.rank
        if rank.groups.staged and any(part.degrees.tp > 1 for stage in self.plan.stages for part in parts_of(stage)):
            raise InputError("the new plan has tensor parallelism, for which ranks that share one GPU have no collectives. Use tp 1 there.")
        rank.settings.require_suits(self.plan.schedule)
        self.made = require_movable(*self._plans(), self.generation.members)
        self.prepare()
        return self._note()

    def _plans(self) -> tuple[Plan, Plan]:
        """The old one and the new one with the optimizer that really runs, whatever they were priced for."""
        kind = self.rank.settings.optimizer.kind
        return replace(self.rank.plan, optimizer=kind), replace(self.plan, optimizer=kind)

    def _note(self) -> MoveNote:
        """Looks up what this process holds now; its note to the others."""
        rank = self.rank
        self.own = list(held_pieces(rank))
        scale = rank.update.scale if rank.world.rank >= 0 else None
        kinds = optimizer_kinds((piece.name, piece.shape) for piece in self.own)
        return MoveNote(plan_to_dict(self.plan), self.step, kinds, None if scale is None else asdict(scale))

    def _transfer(self, boxes: Sequence[Move]) -> None:
        """Returns once every process has what it needs."""
        source, coming = PiecesInMemory(self.own), list[TensorPiece]()
        for some in move_rounds(boxes):
            operations: list[dist.P2POp] = []
            self._agreed(partial(self._ready, some, source, operations, coming))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
        self._agreed(lambda: self.arrived.extend(replace(piece, tensor=piece.tensor.to(self.rank.groups.device)) for piece in coming))

    def _ready(
        self, some: Sequence[Move], source: PiecesInMemory, operations: list[dist.P2POp], coming: list[TensorPiece], group: Any = None,
        through: torch.device | None = None,
    ) -> None:  # fmt: skip
        """Fills what this process sends in a round, and makes room for what it receives."""
        through = through or self.through
        for one in some:
            if self.generation.own not in (one.source, one.target):
                continue
            values = torch.empty([stop - start for start, stop in one.box], dtype=self._dtype(one.kind), device=through)
            piece = TensorPiece(f"{WEIGHTS if one.kind == MASTER else one.kind}/{one.name}", one.shape, one.box, values)
            if one.source == self.generation.own:
                source.load([piece])
                operations.append(dist.P2POp(dist.isend, values, self.generation.members.index(one.target), group))
            else:
                coming.append(piece)
                operations.append(dist.P2POp(dist.irecv, values, self.generation.members.index(one.source), group))

    def _dtype(self, kind: str) -> torch.dtype:
        """In which values of a kind travel."""
        plan = self.rank.plan
        return TORCH_DTYPES[plan.precision] if kind == WEIGHTS or (kind == GRADIENT and plan.gradients != "fp32") else torch.float32

    def _agreed(self, act: Callable[[], object]) -> list[Any]:
        """Acts; what the act returned on each process, as JSON has it. Raises on all if it failed on any: nobody goes on to wait for one
        that failed."""
        failure: Exception | None = None
        done = None
        try:
            done = act()
        except Exception as error:  # whatever it is, the others must hear of it
            failure = error
        answers = self._gathered(("" if failure is None else f"{type(failure).__name__}: {failure}", done))
        try:
            if isinstance(failure, InputError | InfeasibleError):  # what a plan lacks, all find alike
                raise failure
            failed = [f"process {member}: {why}" for member, (why, _) in zip(self.generation.members, answers, strict=True) if why]
            if failed:
                raise MoveAbortedError(f"the move before step {self.step} was aborted ({'; '.join(failed)}). "
                                       "Training goes on under the old plan.") from failure  # fmt: skip
        finally:
            failure = None  # its traceback has this frame: in a circle, transfers and their process groups would outlive the generation
        return [told for _, told in answers]

    def _gathered(self, told: object) -> list[Any]:
        """Gathers what each process tells. As JSON, not as torch gathers objects: nothing that arrives is unpickled."""
        own = torch.frombuffer(bytearray(msgspec.json.encode(told)), dtype=torch.uint8).to(self.through)
        if len(self.generation.members) == 1:
            return [msgspec.json.decode(bytes(own.tolist()))]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self.through) for _ in self.generation.members]
        dist.all_gather(sizes, torch.tensor([len(own)], device=self.through))
        longest = max(int(size) for size in sizes)
        texts = [torch.empty(longest, dtype=torch.uint8, device=self.through) for _ in sizes]
        dist.all_gather(texts, torch.nn.functional.pad(own, (0, longest - len(own))))
        return [msgspec.json.decode(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def all_kinds(notes: Sequence[MoveNote]) -> dict[str, bool]:
    """The kinds of state that optimizers keep for each weight, and whether each is one number."""
    told = [one for note in notes for one in note.kinds.items()]
    return {kind: all(is_number for its, is_number in told if its == kind) for kind, _ in told}


def move_rounds(boxes: Sequence[Move]) -> Iterator[list[Move]]:
    """Moves in turn, in rounds in which no rank sends or receives more than `MAX_MOVE_BYTES`: they are begun together and waited for
    together, so that no two ranks can wait for each other in a circle."""
    found: list[Move] = []
    busy: defaultdict[tuple[str, int], int] = defaultdict(int)
    for one in boxes:
        ends = ("sends", one.source), ("receives", one.target)
        if found and any(busy[end] + one.num_bytes > MAX_MOVE_BYTES for end in ends):
            yield found
            found = []
            busy.clear()
        found.append(one)
        for end in ends:
            busy[end] += one.num_bytes
    if found:
        yield found
