"""Interleaved 1F1B: each device runs several chunks of the model, so that the pipeline fills in shorter steps.

    2 devices, 2 chunks each (stages 0 2 and 1 3), 4 micro-batches
    0: 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1: 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

Micro-batches pass in rounds of as many as there are devices: a round through the first chunk, the same through the second, and so
on. Where the last round is not full, the order is that of a full one with the places of the missing micro-batches left out: an order
made of what is there would deadlock, because devices would run ahead by unequal shares of a round.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedules.actions import BACKWARD, FORWARD, Action, Schedule
from penstock.schedules.in_flight import warm_up

__all__ = ["interleaved"]


def interleaved(num_devices: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """Stage c · devices + d is chunk c of device d."""
    return tuple(_device(device, num_devices, num_chunks, num_micro_batches) for device in range(num_devices))


def _device(device: int, num_devices: int, num_chunks: int, num_micro_batches: int) -> tuple[Action, ...]:
    passes = list(_passes(num_devices, num_chunks, num_micro_batches))
    forward = [Action(chunk * num_devices + device, FORWARD, m) for chunk, m in passes]
    backward = [Action((num_chunks - 1 - chunk) * num_devices + device, BACKWARD, m) for chunk, m in passes]
    ahead = min(len(forward), warm_up(num_devices, device, num_chunks) + 1)
    actions = forward[:ahead]
    for done, action in enumerate(backward):
        actions.append(action)
        actions += forward[ahead + done : ahead + done + 1]
    return tuple(action for action in actions if action.micro_batch < num_micro_batches)


def _passes(num_devices: int, num_chunks: int, num_micro_batches: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order of forward passes, in full rounds; backward passes go through the chunks the other way."""
    for start in range(0, num_micro_batches, num_devices):
        for chunk in range(num_chunks):
            yield from ((chunk, m) for m in range(start, start + num_devices))
