"""How many micro-batches' activations a stage holds at once under each schedule; pure arithmetic, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

__all__ = ["SCHEDULES", "in_flight", "in_flight_by_chunk", "warm_up"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")


def in_flight(schedule: str, num_stages: int, stage: int, num_micro_batches: int, num_chunks: int = 1) -> int:
    """Micro-batches whose activations device group `stage` of `num_stages` holds at its fullest moment.

    With `interleaved`, `num_stages` counts device groups of `num_chunks` stages each, and the answer counts pairs of
    (chunk, micro-batch). Four stages or groups, eight micro-batches:

        stage          0   1   2   3
        gpipe          8   8   8   8    all forwards before the first backward
        1f1b           4   3   2   1    a stage runs ahead of the last one by its distance from it
        pipedream      4   3   2   1    the same order, and as many versions of the stage's weights
        zero-bubble    4   4   4   4    ZB-H1: weight gradients wait for idle time, and what they need with them
        interleaved   11   9   7   5    two chunks per group, so 11 are worth 5.5 of a 1f1b stage that size
    """
    if not 0 <= stage < num_stages or num_micro_batches < 1 or num_chunks < 1:
        raise ValueError(f"stage {stage} of {num_stages}, {num_micro_batches} micro-batches, {num_chunks} chunks: out of range")
    if schedule == "gpipe":
        return num_micro_batches * num_chunks
    if schedule in ("1f1b", "pipedream"):
        return min(num_micro_batches, num_stages - stage)
    if schedule == "zero-bubble":
        return min(num_micro_batches, num_stages)
    if schedule == "interleaved":
        return min(num_micro_batches * num_chunks, warm_up(num_stages, stage, num_chunks) + 1)
    raise ValueError(f"unknown schedule '{schedule}'; known: {SCHEDULES}")


def warm_up(num_groups: int, group: int, num_chunks: int) -> int:
    """Forwards that a group runs before its first backward in Megatron-LM's interleaved schedule, micro-batches permitting."""
    return (num_groups - group - 1) * 2 + (num_chunks - 1) * num_groups


def in_flight_by_chunk(num_groups: int, group: int, num_micro_batches: int, num_chunks: int) -> tuple[int, ...]:
    """The most micro-batches each chunk of a group holds under `interleaved`, for chunks of unequal size.

    The chunks reach their maxima at different moments, so that the sum may exceed `in_flight`: a safe bound.
    """
    forward = list(_chunk_order(num_groups, num_micro_batches, num_chunks))
    ahead = min(len(forward), in_flight("interleaved", num_groups, group, num_micro_batches, num_chunks))
    # ahead forwards first, then one backward, one forward, ... and the remaining backwards
    steps = [*((chunk, 1) for chunk in forward[:ahead])]
    for done, chunk in enumerate(forward):
        steps.append((num_chunks - 1 - chunk, -1))
        steps.extend((later, 1) for later in forward[ahead + done : ahead + done + 1])
    return tuple(max(accumulate(change for chunk, change in steps if chunk == own)) for own in range(num_chunks))


def _chunk_order(num_groups: int, num_micro_batches: int, num_chunks: int) -> Iterator[int]:
    """The chunk of each forward in turn: `num_groups` micro-batches through chunk 0, the same through chunk 1, and so on."""
    for start in range(0, num_micro_batches, num_groups):
        for chunk in range(num_chunks):
            yield from [chunk] * min(num_groups, num_micro_batches - start)
