"""What a run noticed and decided, one JSON line per event (`events.jsonl` in its folder): written by the first rank, read by people."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from penstock.adapting.detecting import LEAST_CHANGE, Cause, Change
from penstock.runtime.telemetry.steps import read_lines

if TYPE_CHECKING:
    from penstock.adapting.deciding import Decision

__all__ = ["EVENTS", "AlternativeTold", "RunEvent", "decided", "noticed", "read_events"]

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
    """`noticed` or `decided`."""
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


def decided(decision: Decision, time_s: float) -> RunEvent:
    """The event of a decision that nobody carries out."""
    chosen = decision.chosen
    text = f"would move to another plan ({chosen.rung}): {decision.reason}" if decision.moves else f"would stay as it is: {decision.reason}"
    others = (AlternativeTold(one.rung.value, one.time_s, one.pause_s, one.moved_bytes, one.refused) for one in decision.alternatives)
    return RunEvent(
        "decided", decision.step, time_s, text, remedy=chosen.rung.value, moves=decision.moves, gain_s=decision.gain_s,
        expected_steps=decision.expected_steps, cost_s=decision.cost_s, alternatives=tuple(others),
    )  # fmt: skip


def read_events(folder: str | Path, damaged: list[str] | None = None) -> Iterator[RunEvent]:
    """The events of a run so far; none where it was not watched. Damaged lines are refused, or told in `damaged`."""
    path = Path(folder) / EVENTS
    if path.is_file():
        yield from (one for one in read_lines(path, RunEvent, damaged) if isinstance(one, RunEvent))
