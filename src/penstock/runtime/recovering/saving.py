"""What a run leaves behind to go on from: checkpoints on disk, and copies in memory for whoever takes a dead rank's place.

    after a step      evaluated better than ever, every N steps, or not for ten minutes ──► checkpoint
                      every N steps ──► copy, once the checkpoint of the best evaluation is whole
    under a new plan  copy
    at the end        checkpoint, unless there is one of this step
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.data.batches import GlobalBatches
from penstock.runtime.checkpoints.folder import BEST_LOSS, best_checkpoint
from penstock.runtime.checkpoints.going_on import RUN, run_facts
from penstock.runtime.checkpoints.intervals import SaveInterval
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank import Rank
from penstock.runtime.rank_state import rank_pieces, rank_state
from penstock.runtime.recovering.copies import Copies, CopyPlace
from penstock.runtime.recovering.faults import RankFaults
from penstock.runtime.request import EvalRecord, TrainRequest
from penstock.runtime.run_folder import CHECKPOINTS
from penstock.runtime.telemetry.phases import COPYING, SAVING

__all__ = ["RunSaves"]


class RunSaves:
    """Saves one process' share of what a run has learned. Every process of the run calls each method after the same step.

    `token` tells this start of the run from others before it; `saved` are the steps of which there is a checkpoint already.
    """

    def __init__(
        self, request: TrainRequest, rank: Rank, batches: GlobalBatches, *,
        copies: Copies | None, faults: RankFaults, token: str, saved: int,
    ) -> None:  # fmt: skip
        self._request, self._rank, self._batches = request, rank, batches
        self._copies, self._faults, self._token, self._saved = copies, faults, token, saved
        self._folder = Path(request.out) / CHECKPOINTS
        best = best_checkpoint(self._folder)
        self._best_loss = math.inf if best is None else best[1]
        self._interval = SaveInterval()
        self._last_copy = self._parting = -1
        self._best_under_way = self._owes_copy = False
        """Whether a checkpoint that was begun since it is the best may not be whole yet, and whether a copy waits for that."""
        self.safe_copy = -1.0
        """The steps of the last copies that all ranks have, each at another node too, as all of them have agreed."""
        self._writer: CheckpointWriter | None = None
        self.before_copy: Callable[[], None] = lambda: None
        """What has to be on disk before training can go on from a copy: steps that it has behind it are not done, and told, again."""

    def take_place(self) -> None:
        """Saves this rank's share under the plan that it has adopted from now on; nothing if it has no work there."""
        world = self._rank.world
        self._writer = None
        if world.rank >= 0:
            self._writer = CheckpointWriter(
                self._folder, rank=world.place, world_size=len(world.ranks), token=self._token, keep=self._request.keep
            )  # fmt: skip

    @property
    def is_late(self) -> bool:
        """Whether the last checkpoint of a run that makes any was so long ago that it is time for another."""
        return self._request.checkpoint_every > 0 and self._interval.is_over(time.monotonic())

    @property
    def is_saving(self) -> bool:
        """Whether this process is still writing its part of one."""
        return self._writer is not None and self._writer.busy

    def after(self, done: int, evaluated: EvalRecord | None, *, is_due: bool, is_saving: bool = False, leaves: bool = False) -> None:
        """Saves what is due after a step; all have agreed whether it is time for a checkpoint, whether anybody still writes the last one,
        and whether a node is to leave."""
        every, copied, best_loss = self._request.checkpoint_every, self._request.copies, None
        if evaluated is not None and evaluated.loss < self._best_loss:
            best_loss = self._best_loss = evaluated.loss
        if best_loss is not None or (every and done % every == 0) or (is_due and self._saved < done):
            self._save(done, best_loss)
        # Training that went on from a copy would not come by the evaluation again, whose checkpoint may have ended with its ranks.
        self._best_under_way = best_loss is not None or (self._best_under_way and is_saving)
        # Not before the last ones are at another node too, where there is one: their places are needed no sooner.
        parts = leaves and self._parting < 0
        if copied and (done % copied == 0 or parts or self._owes_copy) and self.safe_copy >= self._last_copy:
            self._owes_copy = self._best_under_way
            if not self._owes_copy:
                self.copy(done)
                self._parting = done if parts else self._parting

    @property
    def may_leave(self) -> bool:
        """Whether all that was learned before a node was asked to leave is in copies of other nodes too."""
        return 0 <= self._parting <= self.safe_copy

    @property
    def copied(self) -> float:
        """The steps of this rank's last copy that is at another node too; infinitely many where none are made here."""
        world = self._rank.world
        return math.inf if self._copies is None or world.rank < 0 else float(self._copies.safe_step(world.rank))

    def copy(self, done: int) -> None:
        """Leaves a copy of what this rank has learned, if there is somebody who would take its place."""
        world = self._rank.world
        if self._copies is not None and world.rank >= 0 and done < self._request.steps:
            self.before_copy()
            whose = CopyPlace(world.groups.generation.number, world.place, len(world.ranks))
            pieces = self._faults.within(COPYING, rank_pieces(self._rank))
            keep = int(self.safe_copy) if math.isfinite(self.safe_copy) else -1
            self._copies.save(world.rank, done, whose, pieces, self._state(done), keep=keep)
        self._last_copy = done  # on all processes, since all have to agree when the next one is

    def finish(self, done: int) -> None:
        """The last checkpoint, whole."""
        if done > self._saved:
            self._save(done)
        self.wait()

    def wait(self) -> None:
        """Returns when this process writes nothing any more; raises what went wrong."""
        if self._writer is not None:
            self._writer.wait()

    def _save(self, done: int, best_loss: float | None = None) -> None:
        self._saved, start_s = done, time.monotonic()
        if self._writer is not None:
            state = self._state(done)
            pieces = self._faults.within(SAVING, rank_pieces(self._rank))
            self._writer.save(done, pieces, state if best_loss is None else {**state, BEST_LOSS: best_loss})
        self._interval.saved(start_s, time.monotonic())

    def _state(self, done: int) -> dict[str, Any]:
        """The state in a checkpoint or a copy that is no tensor. The facts of the run are told by the plan's first rank alone."""
        facts = {} if self._rank.world.place else self._facts
        return {**rank_state(self._rank), "data": self._batches.state(done), RUN: facts}

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """The facts that every plan of the run has in common."""
        request = self._request
        return run_facts(self._rank.model, request.data, seed=request.settings.seed, global_batch=request.plan.global_batch)
