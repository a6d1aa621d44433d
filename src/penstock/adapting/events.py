"""What a run noticed and decided, one JSON line per event (`events.jsonl` in its folder): written by the first rank, read by people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.adapting.detecting import LEAST_CHANGE, Cause, Change
from penstock.errors import PenstockError
from penstock.runtime.telemetry.steps import open_lines, read_lines, write_line

if TYPE_CHECKING:
    from penstock.adapting.deciding import Decision

__all__ = ["EVENTS", "AlternativeTold", "RunEvent", "aborted", "append_event", "asked", "decided", "moved", "noticed", "read_events"]

EVENTS = "events.jsonl"


class AlternativeTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that could have been done."""

    remedy: str
    time_s: float
    """One step of its plan, at the speeds that were measured."""
    pause_s: float = 0.0
    moved_bytes: int = 0
    refused: str = ""
    """Why it cannot be done."""


class RunEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event; which fields it has follows from its kind."""

    event: str
    """`noticed`, `decided`, `disturbed`, `asked`, `moved`, `aborted`, `lost`, `left`, `replaced`, `shrunk` or `joined`."""
    step: int
    """After which it was."""
    time_s: Annotated[float, msgspec.Meta(ge=0, le=1e11)]
    """When, in seconds since 1970."""
    text: str
    """In words."""
    cause: str | None = None
    ranks: tuple[int, ...] = ()
    """The rank, the two ends of a link, or nobody."""
    factor: float | None = None
    """How many times as long it takes as its peers, for what was predicted of each."""
    before: float | None = None
    since: int | None = None
    """The step at which it seems to have begun."""
    remedy: str | None = None
    moves: bool | None = None
    """Whether the gain is worth its cost."""
    gain_s: float | None = None
    """Of each step."""
    expected_steps: int | None = None
    cost_s: float | None = None
    alternatives: tuple[AlternativeTold, ...] = ()
    moved_bytes: int | None = None
    pause_s: float | None = None
    """How long training stood still."""
    status: int | None = None
    """Of an aborted move: 2, the plan is of other training or devices; 3, there was no room; 1, a process failed."""
    request: str | None = None
    """The id of what somebody asked for."""


def noticed(change: Change, time_s: float) -> RunEvent:
    """The event of a change."""
    return RunEvent(
        "noticed", change.noticed, time_s, f"{_what(change)} since step {change.since}{_note(change)}", change.cause.value, change.subject,
        change.factor, change.before, change.since,
    )  # fmt: skip


def _what(change: Change) -> str:
    """A change in words, without its step."""
    near, factor = abs(change.factor - 1.0) < LEAST_CHANGE, change.factor
    times = f"{factor:.3g}x slower" if factor > 1 else f"{1 / factor:.3g}x faster"
    who = "all ranks" if not change.subject else f"rank {change.subject[0]}"
    match change.cause:
        case Cause.COMPUTE:
            return f"{who} has computed as fast as the others again" if near else f"{who} has computed {times} than the others"
        case Cause.COSTS:
            return f"{who} have computed as fast as the costs say again" if near else f"{who} have computed {times} than the costs say"
        case Cause.DATA:
            late = f"{who} has waited for samples, and its steps took {factor:.3g}x as long,"
            return f"samples have come to {who} in time again" if near else late
        case Cause.PLANNING:
            return "programs have come in time again" if near else f"programs have come late, and steps took {factor:.3g}x as long,"
        case Cause.HOST:
            return f"{who}'s host has been as fast as the others again" if near else f"{who}'s host has been {times} than the others"
        case Cause.LINK:
            link = "messages between ranks " + " and ".join(map(str, change.subject))
            return f"{link} have been as fast as predicted again" if near else f"{link} have been {times} than predicted"


def _note(change: Change) -> str:
    return "; no plan would help" if change.cause is Cause.COSTS else ""


def decided(decision: Decision, time_s: float, *, moves: bool) -> RunEvent:
    """The event of a decision, which a run that `moves` carries out."""
    chosen = decision.chosen
    move, stay = ("moves", "stays") if moves else ("would move", "would stay")
    text = f"{move} to another plan ({chosen.rung}): {decision.reason}" if decision.moves else f"{stay} as it is: {decision.reason}"
    others = (AlternativeTold(one.rung.value, one.time_s, one.pause_s, one.moved_bytes, one.refused) for one in decision.alternatives)
    return RunEvent(
        "decided", decision.step, time_s, text, remedy=chosen.rung.value, moves=decision.moves, gain_s=decision.gain_s,
        expected_steps=decision.expected_steps, cost_s=decision.cost_s, alternatives=tuple(others),
    )  # fmt: skip


def asked(step: int, time_s: float, at: int, request: str) -> RunEvent:
    """Somebody wants another plan, and can have it."""
    return RunEvent("asked", step, time_s, f"was asked to move to another plan before step {max(at, step)}", request=request)


def moved(step: int, time_s: float, moved_bytes: int, pause_s: float, remedy: str, request: str | None = None) -> RunEvent:
    """Another plan is in force from `step` on."""
    cost = f"{moved_bytes / 1e6:.3g} MB travelled, training stood still for {pause_s:.2g} s"
    text = f"another plan ({remedy}) is in force from step {step} on: {cost}"
    return RunEvent("moved", step, time_s, text, remedy=remedy, moved_bytes=moved_bytes, pause_s=pause_s, request=request)


def aborted(step: int, time_s: float, error: PenstockError, request: str | None) -> RunEvent:
    """The run has stayed with its plan."""
    return RunEvent("aborted", step, time_s, f"the plan stays as it is: {error}", status=error.exit_status, request=request)


def append_event(folder: str | Path, event: RunEvent) -> None:
    """Adds an event to the file of a run, as processes other than the run's first do."""
    with open_lines(Path(folder) / EVENTS) as file:
        write_line(file, event)


def read_events(folder: str | Path, damaged: list[str] | None = None) -> Iterator[RunEvent]:
    """The events of a run so far; none where it was not watched. Damaged lines are refused, or told in `damaged`."""
    path = Path(folder) / EVENTS
    if path.is_file():
        yield from (one for one in read_lines(path, RunEvent, damaged) if isinstance(one, RunEvent))
