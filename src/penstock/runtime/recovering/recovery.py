"""What a launcher does when a process of its run has died: where the run goes on from, with whom, and when it gives up.

    died ─► lost ─► the newest step that is whole: copies, a checkpoint, or the beginning ─► others in its place ─► replaced
                └─► twice without a step between: its device is left out, and another plan in force             ─► shrunk
                └─► three times: the run ends, what the copies have is written down as a checkpoint
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.errors import InputError, PenstockError
from penstock.models.ops import Model
from penstock.plans.texts import format_ranks
from penstock.runtime.checkpoints.folder import latest_checkpoint, step_of, whole_checkpoints
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.recovering.copies import SLOTS
from penstock.runtime.request import GoingOn, StepReport, TrainRequest, TrainResult
from penstock.runtime.run_folder import CHECKPOINTS, go_back

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["CopiesLeft", "DeathWitness", "RunRecovery", "require_room_for_copies"]

MOST_DEATHS = 3
"""A step before which so many processes died, one after the other, will not be done."""
_BROKEN_DEATHS = 2
"""A rank that died so often before one step is on a device that is taken to be broken."""
_FP32_BYTES = 4
_KEPT = {"adamw": 3, "lamb": 3, "sgd": 2}
"""Numbers that an optimizer keeps for each weight, the weight included."""


class DeathWitness(Protocol):
    """Is told of deaths, and knows plans for fewer devices: `adapting` has one, since this room does not search."""

    def tell(self, event: str, step: int, text: str, *, ranks: Sequence[int] = (), pause_s: float | None = None) -> None:
        """Ranks were `lost`, have `left`, or were `replaced`, or the plan has `shrunk`, after a step; without ranks: a planner."""

    def smaller_plan(self, plan: Plan, lost: Sequence[int], devices: Sequence[int]) -> Plan:
        """The best plan for what is left of the devices; raises where there is none."""


class CopiesLeft(Protocol):
    """The copies of a job, on one machine or on several."""

    def newest(self, before: int) -> int | None:
        """The newest step below `before` of which every rank has left its copy."""

    def go_back(self, step: int | None) -> None:
        """Forgets the copies of later steps, or all."""

    def write_checkpoint(self, step: int, writer: CheckpointWriter) -> None:
        """Writes those of a step down as a checkpoint."""


@dataclass(frozen=True)
class _ProcessChange:
    """Processes that have died, left or come."""

    event: str
    """`replaced`, `shrunk` or `joined`."""
    step: int
    """The one that training goes on from."""
    ranks: tuple[int, ...]
    done: int
    """Steps that were done before."""
    since_s: float


class RunRecovery:
    """Follows one run in its launcher, from death to death."""

    def __init__(
        self, request: TrainRequest, first_step: int, copies: CopiesLeft | None, members: Sequence[int], witness: DeathWitness | None
    ) -> None:  # fmt: skip
        self.request = request
        """With the plan in force."""
        self.members = tuple(members)
        """The devices that have a process."""
        self._begun, self._first_step, self._copies, self._witness = request, first_step, copies, witness
        self._reports: dict[int, StepReport] = {}
        self._notes: list[str] = []
        """To be told with the next step that is new."""
        self._dead: list[tuple[int, ...]] = []
        """Ranks that have died since a step was done for the first time, those that did together; nobody where all that is known is that
        some lost others."""
        self._change: _ProcessChange | None = None
        """The last one, while no step has followed it yet."""
        self.gave_up = ""
        """Why the run has to end with the last death."""

    @property
    def done(self) -> int:
        """Steps that the run has done, those that are done again not counted."""
        return max(self._reports, default=self._first_step - 1) + 1

    def hear(self, told: StepReport) -> StepReport | None:
        """A step was done; what to tell of it: nothing where it was done again."""
        if self._change is not None:
            self._notes.append(self._went_on(told, self._change))
            self._change = None
        is_new = told.step >= self.done
        self._reports[told.step] = told
        if not is_new:
            return None
        self._dead.clear()
        notes, self._notes = (*self._notes, *told.notes), []
        return replace(told, notes=notes)

    def _went_on(self, told: StepReport, change: _ProcessChange) -> str:
        """A note on the first step after a change of processes, which is told to the witness too."""
        ranks, pause_s, num_again = change.ranks, time.monotonic() - change.since_s, change.done - change.step
        again = {0: "no step is done again", 1: "1 step is done again"}.get(num_again, f"{num_again} steps are done again")
        plan = f"a plan of ranks {format_ranks(self.request.plan.ranks)} is in force"
        who, has, is_ = ("rank", "has another process", "is") if len(ranks) == 1 else ("ranks", "have other processes", "are")
        how = has if set(ranks) <= set(self.members) else f"{is_} left out, {plan}"
        if change.event == "joined":
            how = f"{is_} there, {plan}"
        text = f"{who} {format_ranks(ranks)} {how}. Training went on from step {change.step} after {pause_s:.2g} s; {again}"
        self._tell(change.event, told.step, ranks, text, pause_s)
        return text + "."

    def _tell(self, event: str, step: int, ranks: Sequence[int], text: str, pause_s: float | None = None) -> None:
        if self._witness is not None:
            self._witness.tell(event, step, text, ranks=ranks, pause_s=pause_s)

    def adopted(self, plan: Plan) -> None:
        """The run has moved to another plan."""
        self.request = replace(self.request, plan=plan)

    def go_on(
        self, ranks: Sequence[int], text: str, gone: Sequence[int] = (), *, has_left: bool = False, lost_peer: bool = False
    ) -> GoingOn | None:  # fmt: skip
        """Where new processes begin, `members` of them, after ranks have died, or have left with their node; nothing where the run has to
        end. The machines of the ranks that are `gone` are lost: they cannot have others. Of ranks that only lost a peer nobody knows
        whether it was their end that failed: no device is taken to be broken by that."""
        since_s = time.monotonic()
        if not has_left and not set(ranks) <= set(gone):  # what is gone cannot die again
            self._dead.append(() if lost_peer else tuple(ranks))
        self._tell("left" if has_left else "lost", self.done, ranks, text.partition("\n")[0].rstrip("."))
        if len(self._dead) >= MOST_DEATHS:
            self.gave_up = f"{MOST_DEATHS} deaths came before step {self.done} was done: the next processes would meet another."
            return None
        is_broken = not lost_peer and self._dead.count(tuple(ranks)) >= _BROKEN_DEATHS
        left_out = sorted({rank for rank in self.members if rank in gone or (is_broken and rank in ranks)})
        event, who, before = "replaced", tuple(ranks), self.request.plan
        if left_out and self._witness is not None:
            try:
                left = [one for one in self.members if one not in left_out]
                if set(self.request.plan.ranks) & set(left_out):
                    self.request = replace(self.request, plan=self._witness.smaller_plan(self.request.plan, left_out, left))
                is_smaller = len(self.request.plan.ranks) < len(before.ranks)
                self.members, event, who = tuple(left), "shrunk" if is_smaller else "replaced", tuple(left_out)
            except PenstockError as error:  # there is none: on a machine that is there another process may still live
                if gone:
                    self.gave_up = str(error)
                    return None
        return self._from_newest(event, who, since_s)

    def part_with(self, ranks: Sequence[int], text: str) -> None:
        """Ranks have left with their node, and the others go on as they are: their plan has no work for those."""
        self.members = tuple(one for one in self.members if one not in ranks)
        self._tell("left", self.done, ranks, text.rstrip("."))

    def _from_newest(self, event: str, who: tuple[int, ...], since_s: float) -> GoingOn:
        found = self._newest()
        if self._copies is not None:
            self._copies.go_back(found.step if found.from_copies else None)
        go_back(self.request.out, found.step, self.request.plan)
        if (last := self._change) is not None:  # one died while others took the place of another: both are told of when it is over
            who = tuple(sorted({*who, *last.ranks})) if last.event == event else who
            since_s = last.since_s
        self._change = _ProcessChange(event, found.step, who, self.done, since_s)
        return found

    def join(self, ranks: Sequence[int]) -> GoingOn:
        """Where processes begin, `members` of them, after those of more devices have come: under the plan that the run began with, if all
        that it needs are there."""
        since_s = time.monotonic()
        self.members = tuple(sorted({*self.members, *ranks}))
        if set(self._begun.plan.ranks) <= set(self.members):
            self.request = replace(self.request, plan=self._begun.plan)
        return self._from_newest("joined", tuple(ranks), since_s)

    def take_over(self, told: Iterable[StepReport], plan: Plan) -> None:
        """The launcher before this one, on another node, has heard of these steps, and the run before it of some; `plan` was in force."""
        self._reports = {one.step: one for one in told if one.step >= self._first_step}
        self.adopted(plan)

    def _newest(self) -> GoingOn:
        """The newest step that is whole, of those before the end: of all steps the run tells what they came to."""
        written = reversed(whole_checkpoints(Path(self.request.out) / CHECKPOINTS))
        saved = next((one for one in written if step_of(one) < self.request.steps), None)
        saved_step = -1 if saved is None else step_of(saved)
        copied = None if self._copies is None else self._copies.newest(self.request.steps)
        if copied is not None and copied >= max(saved_step, self._first_step):
            return GoingOn(copied, True)
        if saved is not None and saved_step >= self._first_step:
            self.request = replace(self.request, resume=str(saved))
            return GoingOn(saved_step, False)
        self.request = replace(self.request, resume=self._begun.resume)
        return GoingOn(self._first_step, False)

    def save_copies(self) -> None:
        """Writes the newest copies down as a checkpoint, if they are newer than those that there are."""
        folder = Path(self.request.out) / CHECKPOINTS
        saved, copied = latest_checkpoint(folder), None if self._copies is None else self._copies.newest(self.request.steps)
        if self._copies is not None and copied is not None and (saved is None or step_of(saved) < copied):
            self._copies.write_checkpoint(copied, CheckpointWriter(folder, keep=self.request.keep))

    def whole(self, found: TrainResult) -> TrainResult:
        """The result of the processes that came to the end, with all steps of those before them."""
        told = [self._reports[step] for step in sorted(self._reports)]
        losses = tuple(float("nan") if one.loss is None else one.loss for one in told)
        evaluated = tuple(one.evaluated for one in told if one.evaluated is not None)
        moved = self.request.plan if self.request.plan != self._begun.plan else None
        return replace(
            found, first_step=self._first_step, num_steps=len(told), losses=losses, evaluated=evaluated, plan=found.plan or moved
        )  # fmt: skip


def require_room_for_copies(request: TrainRequest, model: Model) -> None:
    """Refuses copies that the memory of this machine cannot hold."""
    needed = SLOTS * _FP32_BYTES * _KEPT[request.plan.optimizer] * model.num_parameters
    free = _free_bytes()
    if needed > free:
        raise InputError(
            f"two copies of what {model.num_parameters:,} weights have learned take {needed / 1e9:.3g} GB, but this machine has "
            f"{free / 1e9:.3g} GB of memory left. Use --copies 0: the run then goes back to checkpoints."
        )


def _free_bytes() -> int:
    """Memory that this machine, or the container that this process is in, can still give."""
    found = [int(line.split()[1]) * 1024 for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):  # no such limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        found.append(limit - used)
    return min(found, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
