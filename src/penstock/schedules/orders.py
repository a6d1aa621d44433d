"""Schedules as pure functions of the number of stages and micro-batches.

    1F1B, 3 stages, 4 micro-batches               GPipe
    0: F0 F1 F2 B0 F3 B1 B2 B3                    0: F0 F1 F2 F3 B0 B1 B2 B3
    1: F0 F1 B0 F2 B1 F3 B2 B3                    1: F0 F1 F2 F3 B0 B1 B2 B3
    2: F0 B0 F1 B1 F2 B2 F3 B3                    2: F0 F1 F2 F3 B0 B1 B2 B3

Both alternate backward and forward passes once a stage has run ahead by its *depth*, 3 2 1 and 4 4 4 here. Depths between give
micro-batches of unequal cost some slack where memory allows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from penstock.errors import InputError
from penstock.schedules.actions import BACKWARD, FORWARD, Action, Schedule

__all__ = ["gpipe", "one_forward_one_backward", "with_depths"]


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes."""
    return with_depths([num_micro_batches] * num_stages, num_micro_batches)


def one_forward_one_backward(num_stages: int, num_micro_batches: int) -> Schedule:
    """Each stage runs ahead by as many forward passes as stages are left, itself included."""
    return with_depths(range(num_stages, 0, -1), num_micro_batches)


def with_depths(depths: Sequence[int], num_micro_batches: int) -> Schedule:
    """1F1B in which stage s holds up to `depths[s]` micro-batches."""
    for stage, (depth, next_depth) in enumerate(pairwise([*depths, 1])):
        if depth < next_depth:
            raise InputError(
                f"stage {stage} runs ahead by {depth} and the next by {next_depth}: it would wait for ever. "
                f"Depths are 1 or more and never grow along the pipeline; got {list(depths)}."
            )
    return tuple(_alternate(stage, min(depth, num_micro_batches), num_micro_batches) for stage, depth in enumerate(depths))


def _alternate(stage: int, depth: int, num_micro_batches: int) -> tuple[Action, ...]:
    actions = [Action(stage, FORWARD, m) for m in range(depth)]
    for m in range(num_micro_batches):
        actions.append(Action(stage, BACKWARD, m))
        if m + depth < num_micro_batches:
            actions.append(Action(stage, FORWARD, m + depth))
    return tuple(actions)
