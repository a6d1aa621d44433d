"""Every way to cut a small chain into stages, and every set of recomputed ops of a small stage, tried one by one."""

from __future__ import annotations

import itertools

import numpy as np

from penstock.search.partition.stage_space import StageSpace


def best_by_trying(space: StageSpace, num_micro_batches: int) -> float:
    """Least (m - 1) × slowest + sum over all cuts, depths and devices of each stage."""
    num_cuts, best = len(space.cuts) - 1, np.inf
    options = range(len(space.costs))
    for depth in range(1, space.times.shape[0] + 1):
        for cuts in itertools.combinations(range(1, num_cuts), depth - 1):
            edges = (0, *cuts, num_cuts)
            for chosen in itertools.product(options, repeat=depth):
                times = _times(space, edges, chosen)
                if times:
                    best = min(best, (num_micro_batches - 1) * max(times) + sum(times))
    return best


def _times(space: StageSpace, edges: tuple[int, ...], chosen: tuple[int, ...]) -> list[float]:
    """Stage by stage; the devices that are left out are the first of their pool."""
    machine, ranks = space.machine, []
    for pool, held in enumerate(machine.pools):
        taken = sum(space.costs[c].option.num_devices for c in chosen if space.costs[c].option.pool == pool)
        if taken > held.num_devices or (taken < held.num_devices and not machine.idle):
            return []
        ranks.append(held.num_devices - taken)
    times = []
    for stage, c in enumerate(chosen):
        option, first, last = space.costs[c].option, edges[stage], edges[stage + 1]
        node, rank = machine.pools[option.pool].per_node, ranks[option.pool]
        end = ranks[option.pool] = rank + option.num_devices
        whole_nodes = rank % node == 0 and end % node == 0
        if (rank // node != (end - 1) // node and not whole_nodes) or last - first > space.width[c, first]:
            return []
        arrives, departs = int(rank % node == 0 and first > 0), int(end % node == 0)
        time = space.times[len(chosen) - 1 - stage, space.offset[c, first] + last - first - 1]
        times.append(float(time + space.enter[c, arrives, first] + space.leave[c, departs, last]))
    return times


def least_recompute_by_trying(space: StageSpace, first: int, last: int, behind: int, spare: float = 0.0) -> float:
    """Least time of recomputed ops that makes a stage fit, with memory to spare beside the limit, over all flags; infinite if none does."""
    best = np.inf
    for flags in itertools.product((0, 1), repeat=last - first):
        if stage_memory(space, first, last, behind, flags) <= space.machine.pools[0].memory_limit + spare + 1e-9:
            best = min(best, recompute_time(space, first, last, flags))
    return best


def recompute_time(space: StageSpace, first: int, last: int, flags: tuple[int, ...]) -> float:
    """The rule in plain words: the last op of a recomputed run, which ends with its block, takes its `ending` time."""
    c, blocks, time = space.costs[0], space.blocks, 0.0
    for position, op in enumerate(range(first, last)):
        goes_on = op + 1 < last and flags[position + 1] and op + 1 not in blocks.start
        time += flags[position] * float(c.forward[op] if goes_on else c.ending[op])
    return time


def stage_memory(space: StageSpace, first: int, last: int, behind: int, flags: tuple[int, ...]) -> float:
    """The rule in plain words: an op saves what it keeps if it and the next op of its block are recomputed."""
    c, blocks = space.costs[0], space.blocks
    saved = peak = run = 0.0
    for position, op in enumerate(range(first, last)):
        starts_block = op in blocks.start
        if blocks.kind[blocks.of_op[op]] < 0 and flags[position]:
            return np.inf
        if starts_block and flags[position] and not blocks.first_free[blocks.of_op[op]]:
            return np.inf
        run = (0.0 if starts_block else run) + c.kept[op] if flags[position] else 0.0
        peak = max(peak, run)
        together = op + 1 < last and flags[position] and flags[position + 1] and op + 1 not in blocks.start
        saved += c.kept[op] if together else 0.0
    but_last = slice(first, last - 1)
    weights = c.weights[first:last].sum()
    reserve = max(c.forward_reserve[but_last].max(initial=0.0) + c.backward_reserve[but_last].max(initial=0.0), weights)
    held = c.entering[first] + c.kept[first:last].sum() - saved
    return float(space.machine.state_factor * weights + held * (behind + 1) + peak + reserve)
