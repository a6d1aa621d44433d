"""Moving while a step runs: ops that move whole are sent beside it, and what the step has changed is caught up with afterwards.

    before a step     prepare; a thread sends copies of weights and optimizer state of ops that move whole, while the step runs
    after it          their gradients of the step, and all that does not move whole, are sent; acknowledge, commit
    where they come   the optimizer makes the same update from the same gradients: to the bit what the sender has

Which ops do is a function of the two plans (`split_moves.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from penstock.adapting.holdings import Layouts
from penstock.adapting.moves import Moves
from penstock.adapting.moving import MoveNote, Mover, all_kinds, move_rounds, require_movable, state_moves
from penstock.adapting.split_moves import GRADIENT, split_moves
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, TensorPiece
from penstock.runtime.checkpoints.reader import PiecesInMemory
from penstock.runtime.optimizing.optimizer import MASTER
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import gradient_pieces

__all__ = ["OverlappedMove"]


class OverlappedMove(Mover):
    """This process' part in a move that begins before a step and ends after it: `begin`, the step, `finish`."""

    def __init__(self, rank: Rank, plan: Plan, step: int, prepare: Callable[[], object] = lambda: None) -> None:
        """`step` is the first under the new plan: the one after that which runs meanwhile."""
        super().__init__(rank, plan, step, prepare)
        self._rounds: list[list[dist.P2POp]] = []
        self._coming: list[TensorPiece] = []
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def begin(self, *, always: bool = False) -> bool:
        """Begins to send what moves whole. False, on all processes, where nothing does, or where a move that blocks would take no longer
        (which is then not asked, `always`); nothing has happened then."""
        old, new = self._plans()
        made = require_movable(old, new, self.generation.members)
        self._split = split = split_moves(old, new, made, Layouts(self.rank.model))
        cluster = cluster_of(old)
        if not state_moves(old, new) or not split.early or not (always or split.pause_s(made, cluster) < made.time_s(cluster)):
            return False
        if old.optimizer == "lamb":  # what came early cannot be updated by itself: its norms are of all ranks
            return False
        if self.rank.groups.device.type != "cpu" and old.precision != "fp32":  # there small weights of several ops are updated together
            return False
        self._kinds = all_kinds(self._exchanged(self._prepare))
        if not self._kinds:  # before the first step there are no moments to send
            return False
        self._agreed(self._copy)
        own = {op for op, _ in split.ops}
        held = (held for gradients in self.rank.gradients.values() for held in gradients.updated_here())
        self.rank.update.keeps = [one.parameter for one in held if one.place.index in own]
        self._thread = threading.Thread(target=self._send, name="move", daemon=True)
        self._thread.start()
        return True

    def _copy(self) -> None:
        """Copies all that this process sends early, and makes room for what comes: nothing can fail any more but a connection."""
        source, group = PiecesInMemory(self.own), self.generation.beside()
        for some in move_rounds([one for one in self._split.early if one.kind in (WEIGHTS, MASTER, *self._kinds)]):
            self._rounds.append([])
            self._ready(some, source, self._rounds[-1], self._coming, group, torch.device("cpu"))
        self.own = []

    def _send(self) -> None:
        try:
            for operations in self._rounds:
                for work in dist.batch_isend_irecv(operations) if operations else ():
                    work.wait()
        except Exception as error:  # told by `finish`
            self._failure = error

    def finish(self) -> Moves:
        """After the step: the rest travels, and the plan is in force. Raises what `move` raises, with the old plan in force."""
        try:
            notes = self._exchanged(self._catch_up)
            rate, factor, dropped = next(note.update for note in notes if note.update is not None)
            late = [one for one in self._split.late if one.kind in (WEIGHTS, MASTER, BUFFERS, *self._kinds)]
            self._transfer([*late, *(() if dropped else self._split.gradients)])
            self.arrived += [replace(piece, tensor=piece.tensor.to(self.rank.groups.device)) for piece in self._coming]
        finally:
            self.cancel()
        self._adopt(notes)
        if not dropped:
            self._replay(rate, factor)
        return self.made

    def cancel(self) -> None:
        """Waits for what is under way, and forgets it."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self.rank.update.keeps, self.rank.update.kept = None, [], {}
        self._rounds.clear()  # they hold their process group, which ends with its generation
        self._coming.clear()

    def _catch_up(self) -> MoveNote:
        """Looks up what this process holds after the step, gradients included, and which update it made."""
        assert self._thread is not None
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        update = self.rank.update
        note = self._note()
        self.own += gradient_pieces(self.rank, update.kept, GRADIENT)
        if update.last is None:
            return note
        rate, factor, dropped = update.last
        return replace(note, update=(rate, None if factor is None else factor.item(), dropped))

    def _replay(self, rate: float, factor: float | None) -> None:
        """Makes the update of the step for ops that came before it."""
        own = {op for op, rank in self._split.ops if rank == self.generation.own}
        held = (held for gradients in self.rank.gradients.values() for held in gradients.updated_here())
        chosen = [one.parameter for one in held if one.place.index in own]
        if chosen:
            gradients = {id(one): one.grad for one in chosen if one.grad is not None}
            PiecesInMemory(self.arrived).load(gradient_pieces(self.rank, gradients, GRADIENT))
            self.rank.update.replay(chosen, rate, factor)
