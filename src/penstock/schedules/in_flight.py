"""How many micro-batches' activations a device group holds at once under each schedule; pure arithmetic, no clock.

Each function takes (device groups, group, micro-batches, chunks of a group) and gives the most of each chunk; `rules` says which
schedule has which. Four groups, eight micro-batches:

    group                  0     1     2     3
    all_held               8     8     8     8     GPipe: all forwards before the first backward
    as_stages_left         4     3     2     1     1F1B: a stage runs ahead of the last one by its distance from it
    as_many_as_groups      4     4     4     4     ZB-H1: weight gradients wait for idle time, and what they need with them
    by_chunk, 2 chunks    8+4   8+4   7+3   5+1    interleaved: 11, 9, 7 and 5 at any one moment, each half of a stage
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

__all__ = ["all_held", "as_many_as_groups", "as_stages_left", "by_chunk", "warm_up"]


def all_held(num_groups: int, group: int, num_micro_batches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """Every micro-batch of the iteration."""
    return (num_micro_batches,) * num_chunks


def as_stages_left(num_groups: int, group: int, num_micro_batches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """One micro-batch for each stage that is left in the pipeline, the group's own included."""
    return (min(num_micro_batches, num_groups - group),)


def as_many_as_groups(num_groups: int, group: int, num_micro_batches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """One micro-batch for each stage of the pipeline, on every stage."""
    return (min(num_micro_batches, num_groups),)


def by_chunk(num_groups: int, group: int, num_micro_batches: int, num_chunks: int) -> tuple[int, ...]:
    """The most of each chunk under the interleaved schedule.

    The chunks reach their maxima at different moments, so that the sum may exceed what the group holds at once: a safe bound.
    """
    forward = list(_chunk_order(num_groups, num_micro_batches, num_chunks))
    ahead = min(len(forward), warm_up(num_groups, group, num_chunks) + 1)
    # ahead forwards first, then one backward, one forward, ... and the remaining backwards
    steps = [*((chunk, 1) for chunk in forward[:ahead])]
    for done, chunk in enumerate(forward):
        steps.append((num_chunks - 1 - chunk, -1))
        steps.extend((later, 1) for later in forward[ahead + done : ahead + done + 1])
    return tuple(max(accumulate(change for chunk, change in steps if chunk == own)) for own in range(num_chunks))


def warm_up(num_groups: int, group: int, num_chunks: int) -> int:
    """Forwards that a group runs before its first backward in Megatron-LM's interleaved schedule, micro-batches permitting."""
    return (num_groups - group - 1) * 2 + (num_chunks - 1) * num_groups


def _chunk_order(num_groups: int, num_micro_batches: int, num_chunks: int) -> Iterator[int]:
    """The chunk of each forward in turn: `num_groups` micro-batches through chunk 0, the same through chunk 1, and so on."""
    for start in range(0, num_micro_batches, num_groups):
        for chunk in range(num_chunks):
            yield from [chunk] * min(num_groups, num_micro_batches - start)
