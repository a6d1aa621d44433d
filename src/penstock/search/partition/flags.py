"""From a stage that the programme chose to the flags of its ops: which are recomputed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.search.partition.stage_space import StageChoice, StageSpace
from penstock.search.space.levels import UNITS

__all__ = ["Flags", "recompute_flags"]

Flags = NDArray[np.int8]


def recompute_flags(space: StageSpace, stage: StageChoice, margin: float = 0.0) -> Flags:
    """[ops of the stage] 1 where an op is recomputed, as the stage's time was reckoned; `margin` is memory to leave free."""
    from penstock.search.partition.partition_kernels import count_blocks, fit_stage
    from penstock.search.space.recompute_kernels import cheapest_flags

    costs, levels, blocks = space.costs[stage.option], space.levels[stage.option], space.repeats
    first, last = stage.first, stage.last
    flags = np.zeros(last - first, np.int8)
    excess = _excess(space, stage) + margin
    if excess <= 0:
        return flags
    block_a, block_b = int(blocks.of_op[first]), int(blocks.of_op[last - 1])
    whole = last == blocks.start[block_b + 1]
    counts = count_blocks(blocks.count, block_a + 1, block_b)
    end = levels.head[:, blocks.start[block_b]] if whole else levels.tail[:, last]
    choice = np.zeros(8, np.int64)
    fit_stage(stage.behind + 1.0, excess, 1, levels.head[:, first], end, levels, counts, choice)
    level, head_up, tail_up, _, up0, up1, units, kind = map(int, choice)

    def put(start: int, stop: int, at: int, free: bool) -> None:
        cheapest_flags(costs.forward, costs.ending, costs.kept, start, stop, free, levels.prices[at], flags[start - first : stop - first])

    free_head = bool(blocks.first_free[block_a]) or first > blocks.start[block_a]
    put(first, int(blocks.start[block_a + 1]), level if head_up else level - 1, free_head)
    put(int(blocks.start[block_b]), last, level if tail_up else level - 1, bool(blocks.first_free[block_b]))
    up = {counts[2]: up0} if counts[0] else {}
    if counts[1]:
        up[counts[3]] = up1
    single = counts[3] if kind else counts[2]
    for block in range(block_a + 1, block_b):
        of = int(blocks.kind[block])
        if of < 0:
            continue
        start, stop, free = int(blocks.start[block]), int(blocks.start[block + 1]), bool(blocks.first_free[block])
        if up.get(of, 0) > 0:  # the programme counts on two types of blocks in a stage, and on others as little
            up[of] -= 1
            put(start, stop, level, free)
        elif units >= 0 and of == single:
            flags[start - first : stop - first] = _flags_saving(space, stage.option, start, stop, free, of, units)
            units = -1
        else:
            put(start, stop, level - 1, free)
    return flags


def _excess(space: StageSpace, stage: StageChoice) -> float:
    """Memory of the stage above the limit when nothing is recomputed."""
    c, machine, ops = space.costs[stage.option], space.machine, slice(stage.first, stage.last)
    but_last = slice(stage.first, stage.last - 1)
    weights = float(c.weights[ops].sum())
    reserves = float(c.forward_reserve[but_last].max(initial=0.0) + c.backward_reserve[but_last].max(initial=0.0))
    reserve = max(reserves, machine.least_reserve * weights)
    held = float(c.entering[stage.first] + c.kept[ops].sum() - c.not_kept[stage.last - 1])
    return machine.state_factor * weights + reserve + held * (stage.behind + 1) - machine.pools[c.option.pool].memory_limit


def _flags_saving(space: StageSpace, option: int, start: int, stop: int, free: bool, kind: int, units: int) -> Flags:
    """The fastest flags of one block that save at least this many units."""
    from penstock.search.space.recompute_kernels import least_times

    costs, levels = space.costs[option], space.levels[option]
    least, parents = np.full(UNITS, np.inf), np.zeros((stop - start, 2, UNITS), np.int8)
    least_times(costs.forward, costs.ending, costs.kept, start, stop, free, levels.unit[kind], least, parents)
    while units + 1 < UNITS and least[units + 1] == least[units]:
        units += 1
    flags = np.zeros(stop - start, np.int8)
    state = int(parents[0, 0, units])
    for p in range(stop - start - 1, -1, -1):
        flags[p] = state
        if p == 0:
            break
        before = int(parents[p, state, units])
        if state and before:
            units -= int(costs.kept[start + p - 1] / levels.unit[kind])
        state = before
    return flags
