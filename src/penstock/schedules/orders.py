"""Schedules as pure functions of the number of stages and micro-batches.

    1F1B, 3 stages, 4 micro-batches               GPipe
    0: F0 F1 F2 B0 F3 B1 B2 B3                    0: F0 F1 F2 F3 B0 B1 B2 B3
    1: F0 F1 B0 F2 B1 F3 B2 B3                    1: F0 F1 F2 F3 B0 B1 B2 B3
    2: F0 B0 F1 B1 F2 B2 F3 B3                    2: F0 F1 F2 F3 B0 B1 B2 B3
"""

from __future__ import annotations

from penstock.errors import InputError, near_misses
from penstock.schedules.actions import BACKWARD, FORWARD, Action, Schedule

__all__ = ["gpipe", "one_forward_one_backward", "schedule_of"]


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes."""
    passes = [(kind, m) for kind in (FORWARD, BACKWARD) for m in range(num_micro_batches)]
    return tuple(tuple(Action(stage, kind, m) for kind, m in passes) for stage in range(num_stages))


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Schedule:
    """Each stage warms up with as many forward passes as stages follow it, then alternates."""
    return tuple(_alternate(stage, min(num_stages - 1 - stage, num_micro_batches), num_micro_batches) for stage in range(num_stages))


def _alternate(stage: int, warm_up: int, num_micro_batches: int) -> tuple[Action, ...]:
    actions = [Action(stage, FORWARD, m) for m in range(warm_up)]
    for m in range(num_micro_batches - warm_up):
        actions += [Action(stage, FORWARD, warm_up + m), Action(stage, BACKWARD, m)]
    actions += [Action(stage, BACKWARD, m) for m in range(num_micro_batches - warm_up, num_micro_batches)]
    return tuple(actions)


_ORDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def schedule_of(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    """The schedule of this name."""
    if name not in _ORDERS:
        raise InputError(f"schedule '{name}' has no fixed order. {near_misses(name, _ORDERS)}")
    return _ORDERS[name](num_stages, num_micro_batches)
