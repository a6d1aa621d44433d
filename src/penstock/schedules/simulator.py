"""When every action of a schedule starts and ends, given how long actions and transfers take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError
from penstock.schedules.actions import Action, Schedule

__all__ = ["Timeline", "simulate"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """Start and end of the forward (0) and backward (1) pass of each stage on each micro-batch: [2, stages, micro-batches]."""

    start_s: Floats
    end_s: Floats

    @property
    def makespan_s(self) -> float:
        """When the last action ends."""
        return float(self.end_s.max())

    def busy_s(self) -> Floats:
        """Time each stage computes."""
        return np.asarray((self.end_s - self.start_s).sum(axis=(0, 2)))


def simulate(schedule: Schedule, durations_s: Floats, transfers_s: Floats) -> Timeline:
    """Runs each device's actions in order; an action waits for its input to arrive and for the one before it to end.

    `durations_s` [2, stages, micro-batches] are of forward and backward passes; `transfers_s` [2, stages - 1, micro-batches] of
    activations from stage s to s + 1, and of gradients back. Transfers overlap with everything.
    """
    from penstock.schedules.kernels import run_orders

    lengths = np.array([len(actions) for actions in schedule], dtype=np.int64)
    actions = np.array([action for device in schedule for action in device], dtype=np.int32).reshape(-1, 3)
    _check_shapes(actions, durations_s, transfers_s)
    start = np.full(durations_s.shape, np.inf)
    end = np.full(durations_s.shape, np.inf)
    stuck = run_orders(actions, np.concatenate([[0], np.cumsum(lengths)]), durations_s, transfers_s, start, end)
    if stuck >= 0:
        raise InputError(f"schedule deadlocks: action {Action(*map(int, actions[stuck]))} waits for one that never runs before it.")
    return Timeline(start, end)


def _check_shapes(actions: NDArray[np.int32], durations_s: Floats, transfers_s: Floats) -> None:
    _, stages, micro_batches = durations_s.shape
    if durations_s.shape[0] != 2 or transfers_s.shape != (2, max(stages - 1, 0), micro_batches):
        raise InputError(
            f"simulate: durations have shape {durations_s.shape} and transfers {transfers_s.shape}; expected (2, stages, micro-batches) "
            f"and (2, stages - 1, micro-batches)."
        )
    if len(actions) and (actions.min() < 0 or actions[:, 0].max() >= stages or actions[:, 2].max() >= micro_batches):
        raise InputError(f"simulate: the schedule names stages or micro-batches beyond the {stages} × {micro_batches} that have durations.")
