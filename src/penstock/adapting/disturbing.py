"""Slowing down a run that goes on: factors for timed and paced devices, loads beside or inside ranks that compute for real; and killing or
freezing its processes.

Nothing is done to a process that the run's folder does not name, nor to one of another user.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from penstock.adapting.events import RunEvent, append_event
from penstock.adapting.loads import LOOK_S, LoadBeside, LoadWithin
from penstock.errors import InputError, plural, shell_words
from penstock.plans.plan import Plan
from penstock.plans.ranks import pairs_of
from penstock.processes.burners import MAX_FACTOR
from penstock.runtime.recovering.faults import PHASES, Fault, ask_fault
from penstock.runtime.request import PACED, TIMED
from penstock.runtime.run_folder import last_step, plan_of_run, read_request
from penstock.runtime.run_lock import is_held
from penstock.runtime.telemetry.process_files import NODE, RankProcess, read_process
from penstock.timing.asked import ask
from penstock.timing.disturbance import DisturbanceChange

__all__ = ["RunningRun", "changes_of", "disturb", "require_node", "require_rank", "running", "strike", "strike_node"]

SOON = 2
"""Steps after the last recorded one: the first that no rank can have begun."""


class RunningRun:
    """A run that goes on, and may be disturbed by this user."""

    def __init__(self, folder: Path, plan: Plan, processes: dict[int, RankProcess]) -> None:
        self.folder, self.plan, self.processes = folder, plan, processes
        self.last_step = read_request(folder).steps - 1

    @property
    def clocked(self) -> bool:
        """Whether its devices keep a clock, which can be slowed."""
        return next(iter(self.processes.values())).device in (TIMED, PACED)

    @property
    def goes_on(self) -> bool:
        """Whether it still runs."""
        return is_held(self.folder) and any(process.is_here for process in self.processes.values())


def running(folder: Path) -> RunningRun:
    """The run of a folder; refused if it does not run, not here, or for another user."""
    plan = plan_of_run(folder)
    if not is_held(folder):
        raise InputError(f"run '{folder}' is not running on this machine. Start it with `penstock train … {shell_words('--out', folder)}`.")
    found = {rank: process for rank in plan.ranks if (process := read_process(folder, rank)) is not None and process.is_here}
    if not found:
        raise InputError(f"run '{folder}' has no rank at work on this machine: it is starting, or ending. Try again in a moment.")
    for rank, process in found.items():
        if process.user != os.getuid():
            raise InputError(f"rank {rank} of run '{folder}' belongs to user {process.user}; you are user {os.getuid()}. Ask them.")
    return RunningRun(folder, plan, found)


def changes_of(
    target: RunningRun, slow: dict[int, float], links: dict[tuple[int, int], float], data: float | None, first: int | None, steps: int
) -> list[DisturbanceChange]:  # fmt: skip
    """What is asked for, as changes; refused where the run has no such rank, link or step."""
    behind = last_step(target.folder) + 1
    if first is not None and first < behind:
        raise InputError(
            f"--from is {first}, but run '{target.folder}' has {plural(behind, 'step')} behind it. Give a later one, or none: soon."
        )
    begin = behind + SOON - 1 if first is None else first
    if begin > target.last_step:
        raise InputError(f"step {begin} would be the first, but the last step of run '{target.folder}' is {target.last_step}.")
    asked: list[tuple[tuple[int, ...], float]] = [*(((rank,), factor) for rank, factor in slow.items()), *links.items()]
    if data is not None:
        asked.append(((), data))
    found = [DisturbanceChange(ranks, factor, "pulse" if steps else "step", begin, steps) for ranks, factor in asked]
    used = pairs_of(target.plan)
    for change in found:
        missing = [rank for rank in change.ranks if rank not in target.plan.ranks]
        if missing:
            raise InputError(f"{change.subject} is to be slower, but the plan has no rank {missing[0]}: {min(target.plan.ranks)} to "
                             f"{max(target.plan.ranks)}.")  # fmt: skip
        if len(change.ranks) == 2 and tuple(sorted(change.ranks)) not in used:
            some = ", ".join(f"{a}-{b}" for a, b in used[:8]) or "none"
            raise InputError(f"{change.subject} is to be slower, but the plan sends nothing over it. Its links: {some}.")
    if not target.clocked:
        _require_burnable(target, found)
    return found


def _require_burnable(target: RunningRun, changes: Sequence[DisturbanceChange]) -> None:
    """Refuses what processes that keep a device busy cannot do."""
    for change in changes:
        if len(change.ranks) != 1:
            raise InputError(
                f"{change.subject} is to be slower, but only timed and paced devices have links and data whose time can be set. "
                "Slow a rank with --slow, or a real link with `tc`."
            )
        if not 1 < change.factor <= MAX_FACTOR:
            raise InputError(f"{change.subject} is to take {change.factor:g} times as long; burners can do 1 to {MAX_FACTOR:g}.")
        if change.ranks[0] not in target.processes:
            raise InputError(f"{change.subject} has no process on this machine. Disturb it from the machine that it runs on.")


def disturb(target: RunningRun, changes: Sequence[DisturbanceChange], told: Callable[[str], None]) -> None:
    """Disturbs a run: on devices with a clock ranks do so by themselves, else burners run here until all is over."""
    if target.clocked:
        for change in changes:
            ask(target.folder, change)
            told(_noted(target, change, change.first))
        return
    _burn(target, changes, told)


def _burn(target: RunningRun, changes: Sequence[DisturbanceChange], told: Callable[[str], None]) -> None:
    first = changes[0].first
    last = first + changes[0].steps - 1 if changes[0].steps else target.last_step
    if not _await_step(target, first - 1):
        return
    with ExitStack() as stack:
        loads = []
        for change in changes:
            load = _load(target, change, last)
            # Once it is gone, however that comes about.
            stack.callback(lambda change=change, load=load: told(_noted_end(target, change, load.reached)))
            loads.append(stack.enter_context(load))
            told(_noted(target, change, last_step(target.folder) + 1))
        victims = [target.processes[change.ranks[0]] for change in changes]
        while target.goes_on and last_step(target.folder) < last and all(victim.is_here for victim in victims):
            time.sleep(LOOK_S)
            for load in loads:
                load.look()


def _load(target: RunningRun, change: DisturbanceChange, last: int) -> LoadBeside | LoadWithin:
    """Inside a rank that has a GPU, which others may share; beside one on a processor."""
    (rank,) = change.ranks
    if target.processes[rank].device.startswith("cuda"):
        return LoadWithin(target.folder, rank, change.factor, change.first, last)
    return LoadBeside(target.processes[rank], change.factor)


def _await_step(target: RunningRun, step: int) -> bool:
    """Whether the run has come so far; False: it ended before."""
    while last_step(target.folder) < step:
        if not target.goes_on:
            return False
        time.sleep(LOOK_S / 5)
    return True


def _noted(target: RunningRun, change: DisturbanceChange, step: int) -> str:
    """Writes the event of a disturbance; what it says."""
    long = f" for {plural(change.steps, 'step')}" if change.steps else ""
    text = f"{change.subject} is made to take {change.factor:.3g} times as long from step {step} on{long}"
    cause = ("data", "compute", "link")[len(change.ranks)]
    append_event(target.folder, RunEvent("disturbed", step, time.time(), text, cause, tuple(sorted(change.ranks)), change.factor))
    return text


def _noted_end(target: RunningRun, change: DisturbanceChange, reached: float | None) -> str:
    """Writes the event that a disturbance has ended, with what it came to."""
    text = f"{change.subject} is no longer slowed down"
    if reached is not None:
        text += f"; it took {reached:.3g} times as long as before"
    append_event(target.folder, RunEvent("disturbed", last_step(target.folder), time.time(), text, "compute", change.ranks, 1.0, reached))
    return text


def require_node(target: RunningRun, node: int) -> RankProcess:
    """The supervisor of a node; refused if it is not here, or another user's."""
    process = read_process(target.folder, node, NODE)
    if process is None or not process.is_here:
        raise InputError(f"--node names node {node}, of which run '{target.folder}' has no supervisor on this machine. Look with "
                         "`penstock events`, or disturb it from the machine that it runs on.")  # fmt: skip
    if process.user != os.getuid():
        raise InputError(f"node {node} of run '{target.folder}' belongs to user {process.user}; you are user {os.getuid()}. Ask them.")
    return process


def strike_node(target: RunningRun, node: int) -> str:
    """Kills the supervisor of a node, and its ranks with it, as the loss of the machine would. What was done, in words."""
    os.kill(require_node(target, node).pid, signal.SIGKILL)
    text = f"node {node} is killed"
    append_event(target.folder, RunEvent("disturbed", last_step(target.folder) + 1, time.time(), text))
    return text


def require_rank(target: RunningRun, kind: Literal["kill", "freeze"], rank: int, first: int | None) -> None:
    """Refuses a rank that has no process here, and a first step that the run does not have before it."""
    if rank not in target.processes:
        here = ", ".join(map(str, sorted(target.processes)))
        raise InputError(f"--{kind} names rank {rank}, which has no process of run '{target.folder}' here. It has: {here}.")
    step = last_step(target.folder) + 1
    if first is not None and not step <= first <= target.last_step:
        raise InputError(f"--from is {first}; run '{target.folder}' has steps {step} to {target.last_step} before it.")


def strike(target: RunningRun, kind: Literal["kill", "freeze"], rank: int, phase: str, first: int | None) -> str:
    """Kills or freezes the process of a rank: at once, or in a phase of a step, where it does so itself. What was done, in words."""
    require_rank(target, kind, rank, first)
    step, done = last_step(target.folder) + 1, {"kill": "killed", "freeze": "frozen"}[kind]
    if phase or first is not None:
        ask_fault(target.folder, Fault(kind, rank, phase or PHASES[0], first or 0))
        text = f"rank {rank} is {done} in {phase or PHASES[0]} of step {first or step} or soon after"
    else:
        os.kill(target.processes[rank].pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        text = f"rank {rank} is {done}"
    append_event(target.folder, RunEvent("disturbed", step, time.time(), text, ranks=(rank,)))
    return text
