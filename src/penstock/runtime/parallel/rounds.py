"""Passes that several ranks must run side by side, though one of them has fewer micro-batches than another.

Where weights are gathered, or gradients summed, in every pass (ZeRO-2 and 3), all ranks that hold the same weights take part in each. A
rank that has no micro-batch for it joins without:

    rank 0    F0 F1 F2 B0 B1 B2
    rank 1    F0 F1 ·  B0 B1 ·         · joins
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.programs.instructions import Backward, Forward, Program
from penstock.runtime.transport.world import World

__all__ = ["joined_passes", "rounds_of"]


def joined_passes(passes: Sequence[Sequence[bool]], own: int) -> list[list[bool]]:
    """Which passes rank `own` joins before each of its own, and after the last; True is a backward pass.

    `passes` has those of all ranks. In each round all ranks whose next pass is a forward one run it, else all run a backward one: no
    rank is held up by one that has less to do.
    """
    places = [0] * len(passes)
    found: list[list[bool]] = [[]]
    while any(place < len(its) for place, its in zip(places, passes, strict=True)):
        backward = all(its[place] for place, its in zip(places, passes, strict=True) if place < len(its))
        for rank, its in enumerate(passes):
            if places[rank] < len(its) and its[places[rank]] == backward:
                places[rank] += 1
                if rank == own:
                    found.append([])
            elif rank == own:
                found[-1].append(backward)
    return found


def rounds_of(program: Program, world: World) -> list[list[bool]]:
    """The passes of other ranks that this rank joins in one iteration (`joined_passes`); the ranks tell each other theirs."""
    mine = [isinstance(step, Backward) for step in program.instructions if isinstance(step, Forward | Backward)]
    counts = world.gather(torch.tensor([len(mine)], device=world.device)).flatten().tolist()
    padded = torch.tensor(mine + [False] * (max(counts) - len(mine)), dtype=torch.int64, device=world.device)
    table = world.gather(padded).tolist()
    passes = [[bool(kind) for kind in row[:count]] for row, count in zip(table, counts, strict=True)]
    return joined_passes(passes, world.place)
