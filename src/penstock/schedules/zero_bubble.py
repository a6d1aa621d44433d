"""Zero-bubble schedule with the memory of 1F1B (ZB-H1): weight gradients wait until the device would be idle.

    3 stages, 5 micro-batches
    0: F0 F1 F2 I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
    1: F0 F1 I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
    2: F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4

Stage s lets s weight gradients wait, so that every stage holds as many micro-batches as 1F1B's first one, and the bubble of a
pipeline of equal stages falls from (stages - 1) · (F + I + W) to (stages - 1) · (F + I - W).
"""

from __future__ import annotations

from penstock.schedules.actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule

__all__ = ["zero_bubble"]


def zero_bubble(num_stages: int, num_micro_batches: int) -> Schedule:
    """1F1B with its backward passes split, each weight gradient `stage` input gradients later than there."""
    return tuple(_stage(stage, min(num_stages - stage, num_micro_batches), num_micro_batches) for stage in range(num_stages))


def _stage(stage: int, depth: int, num_micro_batches: int) -> tuple[Action, ...]:
    actions = [Action(stage, FORWARD, m) for m in range(depth)]
    for m in range(num_micro_batches):
        actions.append(Action(stage, INPUT_GRAD, m))
        if m >= stage:
            actions.append(Action(stage, WEIGHT_GRAD, m - stage))
        if m + depth < num_micro_batches:
            actions.append(Action(stage, FORWARD, m + depth))
    actions += [Action(stage, WEIGHT_GRAD, m) for m in range(max(0, num_micro_batches - stage), num_micro_batches)]
    return tuple(actions)
