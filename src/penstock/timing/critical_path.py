"""The chain of passes, transfers and waits that an iteration could not be shorter than: what would have to be quicker.

Found backwards from what ends last: of all that an event waited for, the one that ended last held it up. Time that nothing explains
(a link that others used before) counts as waiting.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Action
from penstock.timing.execution import Execution

__all__ = ["PathStep", "critical_path"]

_ACTIVATION, _GRADIENT, _AFTER, _WAIT = "activation", "gradient", "after", "wait"
_TOLERANCE = 1e-9
"""Share of an iteration below which two moments are one."""


@dataclass(frozen=True)
class PathStep:
    """A part of the path: a pass (F, B, I, W), a transfer (activation, gradient; `stage` is the cut), work `after` passes, or a `wait`."""

    cause: str
    stage: int
    micro_batch: int
    start_s: float
    end_s: float


class _Event(NamedTuple):
    cause: str
    stage: int
    micro_batch: int


def critical_path(run: Execution) -> list[PathStep]:
    """The path in the order of time; its steps follow each other without a gap from 0 to the end of the iteration."""
    known = _Known(run)
    least_s = _TOLERANCE * max(run.makespan_s, 1e-12)
    now, found, seen = known.last(), list[PathStep](), set[_Event]()
    while True:
        seen.add(now)
        start_s, end_s = known.span_s(now)
        if end_s > start_s:
            found.append(PathStep(*now, start_s, end_s))
        before = [(known.span_s(one)[1], one) for one in known.before(now) if one not in seen]
        before = [(ended_s, one) for ended_s, one in before if ended_s <= start_s + least_s]
        held_s, held = max(before, key=lambda one: one[0], default=(0.0, None))
        if start_s - held_s > least_s:
            found.append(PathStep(_WAIT, now.stage, now.micro_batch, held_s, start_s))
        if held is None:
            return found[::-1]
        now = held


class _Known:
    """What happened when, and what waited for what."""

    def __init__(self, run: Execution) -> None:
        self._run, self._work = run, run.workload
        self._place = {action: (device, at) for device, own in enumerate(run.schedule) for at, action in enumerate(own)}
        self._links: dict[int, list[tuple[float, _Event]]] = defaultdict(list)
        for direction, cut, micro_batch in np.argwhere(np.isfinite(run.transfer_end_s)).tolist():
            link = int(self._work.links[direction, cut])
            if link >= 0:
                event = _Event((_ACTIVATION, _GRADIENT)[direction], cut, micro_batch)
                self._links[link].append((float(run.transfer_end_s[direction, cut, micro_batch]), event))
        for own in self._links.values():
            own.sort()

    def last(self) -> _Event:
        """What ends last."""
        passes = [(self._run.span_s(own[-1])[1], _event(own[-1])) for own in self._run.schedule if own]
        ends = [(end_s, _Event(_AFTER, stage, -1)) for stage, end_s in enumerate(self._run.after_end_s.tolist()) if np.isfinite(end_s)]
        sent = [own[-1] for own in self._links.values()]
        return max([*ends, *sent, *passes], key=lambda one: one[0])[1]

    def span_s(self, event: _Event) -> tuple[float, float]:
        """When an event begins and ends."""
        run = self._run
        if event.cause == _AFTER:
            return float(run.after_start_s[event.stage]), float(run.after_end_s[event.stage])
        if event.cause in (_ACTIVATION, _GRADIENT):
            where = int(event.cause == _GRADIENT), event.stage, event.micro_batch
            return float(run.transfer_start_s[where]), float(run.transfer_end_s[where])
        return run.span_s(Action(event.stage, KINDS.index(event.cause), event.micro_batch))

    def before(self, event: _Event) -> Iterator[_Event]:
        """All that it may have waited for; what it needs comes before what it only took turns with."""
        if event.cause == _AFTER:
            yield from (_event(action) for action in self._place if self._work.devices[action.stage] == self._work.devices[event.stage])
            return
        if event.cause in (_ACTIVATION, _GRADIENT):
            up = event.cause == _ACTIVATION
            yield from self._passes(event.stage + (not up), event.micro_batch, (FORWARD,) if up else (BACKWARD, INPUT_GRAD))
            yield from self._turns(event)
            return
        kind = KINDS.index(event.cause)
        yield from self._needed(kind, event.stage, event.micro_batch)
        device, at = self._place[Action(event.stage, kind, event.micro_batch)]
        if at:
            previous = self._run.schedule[device][at - 1]
            yield _event(previous)
            if not self._work.overlap:  # the device waits for what it sends
                yield from self._sent(previous)

    def _needed(self, kind: int, stage: int, micro_batch: int) -> Iterator[_Event]:
        if kind == WEIGHT_GRAD:
            yield from self._passes(stage, micro_batch, (INPUT_GRAD,))
        elif kind == FORWARD:
            if stage:
                yield from self._arrived(_ACTIVATION, stage - 1, stage - 1, micro_batch, (FORWARD,))
        elif stage < self._work.num_stages - 1:
            yield from self._arrived(_GRADIENT, stage, stage + 1, micro_batch, (BACKWARD, INPUT_GRAD))
        else:
            yield from self._passes(stage, micro_batch, (FORWARD,))

    def _arrived(self, cause: str, cut: int, sender: int, micro_batch: int, kinds: tuple[int, ...]) -> Iterator[_Event]:
        if np.isfinite(self._run.transfer_end_s[int(cause == _GRADIENT), cut, micro_batch]):
            yield _Event(cause, cut, micro_batch)
        else:
            yield from self._passes(sender, micro_batch, kinds)

    def _sent(self, action: Action) -> Iterator[_Event]:
        cause, cut = (_ACTIVATION, action.stage) if action.kind == FORWARD else (_GRADIENT, action.stage - 1)
        if 0 <= cut < self._work.num_stages - 1 and np.isfinite(self._run.transfer_end_s[int(cause == _GRADIENT), cut, action.micro_batch]):
            yield _Event(cause, cut, action.micro_batch)

    def _passes(self, stage: int, micro_batch: int, kinds: tuple[int, ...]) -> Iterator[_Event]:
        yield from (_event(action) for action in (Action(stage, kind, micro_batch) for kind in kinds) if action in self._place)

    def _turns(self, event: _Event) -> Iterator[_Event]:
        """The transfer that had the link before."""
        own = self._links.get(int(self._work.links[int(event.cause == _GRADIENT), event.stage]), [])
        at = bisect_right(own, (self.span_s(event)[0], _Event("~", 0, 0)))
        yield from (one for _, one in own[max(0, at - 1) : at])


def _event(action: Action) -> _Event:
    return _Event(KINDS[action.kind], action.stage, action.micro_batch)
