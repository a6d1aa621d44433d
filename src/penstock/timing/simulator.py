"""When every action of a schedule starts and ends, given how long actions and transfers take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError
from penstock.schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from penstock.timing.workload import Floats, Integers, read_only

__all__ = ["Timeline", "as_arrays", "check_shapes", "deadlock_message", "simulate"]

_SHOWN_LINKS = 6


@dataclass(frozen=True)
class Timeline:
    """Start and end of each kind of action of each stage on each micro-batch: [2 or 4, stages, micro-batches].

    The kinds are F and B, or F, B, I and W; what the schedule does not have is infinite.
    """

    start_s: Floats
    end_s: Floats
    schedule: Schedule = ()

    @property
    def makespan_s(self) -> float:
        """When the last action ends."""
        return float(np.max(self.end_s[np.isfinite(self.end_s)], initial=0.0))

    def busy_s(self) -> Floats:
        """Time each stage computes."""
        ran = np.isfinite(self.end_s)
        spans = np.subtract(self.end_s, self.start_s, out=np.zeros(self.end_s.shape), where=ran)
        return np.asarray(spans.sum(axis=(0, 2)))

    def span_s(self, action: Action) -> tuple[float, float]:
        """Start and end of one action."""
        where = action.kind, action.stage, action.micro_batch
        return float(self.start_s[where]), float(self.end_s[where])


def simulate(schedule: Schedule, durations_s: Floats, transfers_s: Floats) -> Timeline:
    """Runs each device's actions in order; an action waits for its input to arrive and for the one before it to end.

    `durations_s` [2 or 4, stages, micro-batches] are of F and B, or of F, B, I and W; `transfers_s` [2, stages - 1, micro-batches]
    of activations from stage s to s + 1, and of gradients back. Transfers overlap with everything; `execution` has the rest.
    """
    from penstock.timing.clock import Orders, run_orders

    actions, bounds = as_arrays(schedule)
    check_shapes(actions, durations_s, transfers_s)
    start, end = np.full(durations_s.shape, np.inf), np.empty(durations_s.shape)
    stuck, _ = run_orders(Orders(actions, bounds), read_only(durations_s), read_only(transfers_s), start, end)
    if stuck >= 0:
        raise InputError(deadlock_message(schedule, Action(*map(int, actions[stuck])), np.isfinite(end)))
    return Timeline(start, end, schedule)


def as_arrays(schedule: Schedule) -> tuple[NDArray[np.int32], Integers]:
    """All actions as rows (stage, kind, micro-batch), and where each device's begin, the end last."""
    actions = np.array([action for device in schedule for action in device], dtype=np.int32).reshape(-1, 3)
    return actions, np.cumsum([0, *map(len, schedule)], dtype=np.int64)


def check_shapes(actions: NDArray[np.int32], durations_s: Floats, transfers_s: Floats) -> None:
    """Refuses arrays that do not fit together, and actions that have no duration."""
    kinds, stages, micro_batches = durations_s.shape
    if kinds not in (2, 4) or transfers_s.shape != (2, max(stages - 1, 0), micro_batches):
        raise InputError(
            f"simulate: durations have shape {durations_s.shape} and transfers {transfers_s.shape}; expected (2 or 4, stages, "
            f"micro-batches) and (2, stages - 1, micro-batches)."
        )
    if not len(actions):
        return
    if actions.min() < 0 or actions[:, 0].max() >= stages or actions[:, 2].max() >= micro_batches:
        raise InputError(f"simulate: the schedule names stages or micro-batches beyond the {stages} × {micro_batches} that have durations.")
    if actions[:, 1].max() >= kinds:
        raise InputError("simulate: the schedule splits backward passes (I, W), but durations are of F and B alone. Give all four kinds.")


def deadlock_message(schedule: Schedule, waiting: Action, ran: NDArray[np.bool_]) -> str:
    """Says which action waits for which, along the chain to one that is missing or to where the circle closes."""
    heads = [next((a for a in actions if not ran[a.kind, a.stage, a.micro_batch]), None) for actions in schedule]
    places = {action: device for device, actions in enumerate(schedule) for action in actions}
    links: list[str] = []
    seen: set[Action] = set()
    head: Action | None = waiting
    while head is not None and head not in seen:
        seen.add(head)
        needed = _needs(head, ran)
        on = places.get(needed)
        where = "on no device" if on is None else f"on device {on} behind {heads[on]}"
        links.append(f"action {head} waits for {needed}, which is {where}")
        head = None if on is None else heads[on]
    if len(links) > _SHOWN_LINKS:
        links = [*links[: _SHOWN_LINKS - 1], "…", links[-1]]
    return f"schedule deadlocks: {'; '.join(links)}."


def _needs(action: Action, ran: NDArray[np.bool_]) -> Action:
    """The first action that has not run of those whose results this one takes."""
    stage, kind, m = action
    if kind == FORWARD:
        return Action(stage - 1, FORWARD, m)
    if kind == WEIGHT_GRAD:
        return Action(stage, INPUT_GRAD, m)
    if not ran[FORWARD, stage, m]:
        return Action(stage, FORWARD, m)
    return Action(stage + 1, BACKWARD, m)
