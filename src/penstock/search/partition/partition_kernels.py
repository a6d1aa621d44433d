"""The compiled loops of the exact search: times of all stages, and the programmes over cuts and devices.

Lengths of arrays: N ops, B blocks, L price levels, T types of repeated blocks, K stages, C options. Amounts of memory are in any one unit.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.partition.programme import PoolArrays
from penstock.search.partition.stage_space import BlockArrays, MemoryRule, OpArrays, StageTable
from penstock.search.space.levels import Levels

__all__ = ["bound_stage", "count_blocks", "fit_stage", "partition", "priced", "sequence", "stage_times", "warm"]


@njit(cache=True, nogil=True)
def fit_stage(held, excess, low, head, tail, levels, inner, choice):  # type: ignore[no-untyped-def]
    """Least recomputation that makes a stage of head + `inner` blocks + tail fit; returns (time, level).

    `inner` are n0 and n1 whole blocks of types t0 and t1. `excess` is the memory above the limit without recomputation, `held` the
    micro-batches that hold what is kept. All pieces are at one price level or the one below it; what is still missing comes from one block
    with flags of its own. `choice` receives
    (level, head up, tail up, type filled first, blocks up of type 0, of type 1, units of the one block, its type).
    """
    full, least, unit = levels.full, levels.least, levels.unit
    n0, n1, t0, t1 = inner
    for level in range(low, head.shape[0]):
        peak = max(head[level, 2], tail[level, 2])
        if n0 > 0:
            peak = max(peak, full[level, t0, 2])
        if n1 > 0:
            peak = max(peak, full[level, t1, 2])
        goal = (excess + peak) / held
        if head[level, 0] + tail[level, 0] + n0 * full[level, t0, 0] + n1 * full[level, t1, 0] < goal:
            continue
        below = level - 1
        best = head[level, 1] + tail[level, 1] + n0 * full[level, t0, 1] + n1 * full[level, t1, 1]
        _note(choice, level, 1, 1, 0, n0, n1, -1, 0)
        for ends in range(4):
            h, t = ends // 2, ends % 2
            at_head, at_tail = (level if h else below), (level if t else below)
            time = head[at_head, 1] + tail[at_tail, 1] + n0 * full[below, t0, 1] + n1 * full[below, t1, 1]
            missing = goal - head[at_head, 0] - tail[at_tail, 0] - n0 * full[below, t0, 0] - n1 * full[below, t1, 0]
            for order in range(2 if n1 > 0 else 1):
                left, total, up0, up1, units, kind, enough = missing, time, 0, 0, -1, 0, missing <= 0
                for step in range(2):
                    second = (order + step) % 2
                    count, of = (n1, t1) if second else (n0, t0)
                    gain = full[level, of, 0] - full[below, of, 0]
                    if enough or count == 0 or gain <= 0:
                        continue
                    up = min(count, int(left / gain + 1e-12))
                    left -= up * gain
                    total += up * (full[level, of, 1] - full[below, of, 1])
                    if left > 1e-9 and up < count:
                        units = int(np.ceil((full[below, of, 0] + left) / unit[of]))
                        kind = second
                        if units < least.shape[1] and least[of, units] < full[level, of, 1]:
                            total += least[of, units] - full[below, of, 1]
                        else:
                            units = -1
                            up += 1
                            total += full[level, of, 1] - full[below, of, 1]
                        left = 0.0
                    if second:
                        up1 = up
                    else:
                        up0 = up
                    enough = left <= 1e-9
                if enough and total < best:
                    best = total
                    _note(choice, level, h, t, order, up0, up1, units, kind)
        return best, level
    return np.inf, head.shape[0]


@njit(cache=True, nogil=True, inline="always")
def _note(choice, level, head_up, tail_up, order, up0, up1, units, kind):  # type: ignore[no-untyped-def]
    """Fills `choice`; an array made for it would cost more than all else."""
    choice[0], choice[1], choice[2], choice[3] = level, head_up, tail_up, order
    choice[4], choice[5], choice[6], choice[7] = up0, up1, units, kind


@njit(cache=True, nogil=True)
def bound_stage(held, excess, low, head, tail, levels, inner):  # type: ignore[no-untyped-def]
    """A time below which no flags make the stage fit; returns (time, level): the best price's least time less price × saved.

    Peaks are left out. The value rises and then falls with the price, and its peak only moves up as `excess` grows. The last price is one
    at which only memory counts; what it does not save cannot be saved.
    """
    full, prices, need, best = levels.full, levels.prices, excess / held, 0.0
    n0, n1, t0, t1 = inner
    for level in range(low, len(prices)):
        time = head[level, 1] + tail[level, 1] + n0 * full[level, t0, 1] + n1 * full[level, t1, 1]
        saved = head[level, 0] + tail[level, 0] + n0 * full[level, t0, 0] + n1 * full[level, t1, 0]
        value = time + prices[level] * (need - saved)
        if value < best:
            return best, max(level - 1, 1)
        best = value
    most = len(prices) - 1
    saved = head[most, 0] + tail[most, 0] + n0 * full[most, t0, 0] + n1 * full[most, t1, 0]
    return best if saved >= need * (1 - 1e-9) else np.inf, max(most, 1)


@njit(cache=True, nogil=True)
def count_blocks(count, first, last):  # type: ignore[no-untyped-def]
    """(n0, n1, t0, t1): how many blocks of which two types lie from block `first` up to `last`."""
    n0 = n1 = t0 = t1 = 0
    for kind in range(count.shape[0]):
        n = count[kind, last] - count[kind, first] if last > first else 0
        if n > 0 and n0 == 0:
            n0, t0 = n, kind
        elif n > 0:
            n1, t1 = n, kind
    return n0, n1, t0, (t1 if n1 else t0)


@njit(cache=True, nogil=True)
def stage_times(ops, levels, blocks, memory, longest, cuts, twins, mode, in_flight, offset, width, times):  # type: ignore[no-untyped-def]
    """times[k, pair]: compute and recomputation of the ops between cuts a and b with k stages behind; infinite where it cannot fit.

    `cuts` are the ops at which a stage may begin, and the end. Mode 0 recomputes what it must, mode 1 gives a time that no recomputation
    can be below instead of one that is reached, mode 2 recomputes nothing. Stages above `longest` are left out: more stages behind
    only make them longer. Stages that `twins` (of `twin_cuts`) knows to be equal to earlier ones are copied from them.

    Memory is state × weights + (entering + kept - saved - passed of the last op) × (k + 1, or `in_flight` if more) + peak + reserve,
    where the reserve is the larger of floor × weights and of the greatest forward and backward reserves of all ops but the last.
    """
    compute, kept, passed, weights, forward_reserve, backward_reserve, entering = ops
    head, tail, block_of, block_start = levels.head, levels.tail, blocks.of_op, blocks.start
    limit, state, floor = memory
    choice = np.zeros(8, np.int64)
    for a in range(len(cuts) - 1):
        i, twin = cuts[a], twins[0, a]
        alike = min(twins[1, a], width[a], width[twin])
        for k in range(times.shape[0] if alike else 0):
            times[k, offset[a] : offset[a] + alike] = times[k, offset[twin] : offset[twin] + alike]
        time, held, weight, most_forward, most_backward = 0.0, entering[i], 0.0, 0.0, 0.0
        for d in range(width[a]):
            for op in range(cuts[a + d], cuts[a + d + 1]):
                time += compute[op]
                held += kept[op]
                weight += weights[op]
                if op > i:
                    most_forward = max(most_forward, forward_reserve[op - 1])
                    most_backward = max(most_backward, backward_reserve[op - 1])
            if d < alike:
                continue
            last = cuts[a + d + 1] - 1
            fixed = state * weight + max(most_forward + most_backward, floor * weight) - limit
            first_block, last_block, low = block_of[i], block_of[last], 1
            inner = count_blocks(blocks.counts, first_block + 1, last_block)
            for k in range(times.shape[0]):
                excess = fixed + (held - passed[last]) * max(k + 1, in_flight)
                if excess <= 0:
                    times[k, offset[a] + d] = time
                    continue
                if mode == 2:
                    break
                if first_block == last_block:
                    if mode == 1:
                        times[k, offset[a] + d] = time
                        continue
                    break
                whole = last + 1 == block_start[last_block + 1]
                end = head[:, block_start[last_block]] if whole else tail[:, last + 1]
                if mode == 1:
                    extra, low = bound_stage(k + 1.0, excess, low, head[:, i], end, levels, inner)
                else:
                    extra, low = fit_stage(k + 1.0, excess, low, head[:, i], end, levels, inner, choice)
                if time + extra > longest:
                    break
                times[k, offset[a] + d] = time + extra


@njit(cache=True, nogil=True)
def partition(tau, most, minimax, pools, left, need, ahead, table, best, option, cut):  # type: ignore[no-untyped-def]
    """best[k, u, a]: least sum (or, `minimax`, least maximum) of times of the stages from cut a on in k stages on the devices of u.

    u counts the devices taken of every pool in mixed radix, the first pool fastest. No stage takes more than `tau`. Built from
    the last stage, since what a stage holds in flight depends on the stages behind it. A stage lies inside one node or on whole
    nodes of one pool (`pools` are `PoolArrays`), and its messages go inside a node or across nodes.

    Ways that cannot be finished are left out: the ops before a cut take at least `need` [cuts] of device time, for which left[u] devices
    have `tau` each, and add at least `ahead` [cuts] to a sum that has to stay below `most`.

    Most u are met by no k stages. Of their rows only the first column is written, which is infinite.
    """
    offset, width, times, enter, leave, hidden = table
    counts, per_node, pool_of, devices_of = pools
    num_cuts = enter.shape[2] - 1
    stride = np.ones(len(counts), np.int64)
    for pool in range(1, len(counts)):
        stride[pool] = stride[pool - 1] * (counts[pool - 1] + 1)
    met, ends = np.zeros(best.shape[:2], np.bool_), np.zeros(num_cuts + 1, np.int64)
    best[:, :, 0], best[0, 0], met[0, 0] = np.inf, np.inf, True
    best[0, 0, num_cuts] = 0.0
    for k in range(best.shape[0] - 1):
        for u in range(best.shape[1]):
            num_ends = 0
            for j in range(num_cuts + 1 if met[k, u] else 0):
                if best[k, u, j] < np.inf:
                    ends[num_ends], num_ends = j, num_ends + 1
            if num_ends == 0:
                continue
            for c in range(len(devices_of)):
                pool, wanted = pool_of[c], devices_of[c]
                free, node = counts[pool] - u // stride[pool] % (counts[pool] + 1), per_node[pool]
                first = free - wanted
                inside = first // node == (free - 1) // node
                if first < 0 or not (inside or (free % node == 0 and wanted % node == 0)):
                    continue
                departs = 1 if free % node == 0 else 0
                v = u + wanted * stride[pool]
                if not met[k + 1, v]:
                    met[k + 1, v], best[k + 1, v] = True, np.inf
                low = 0
                reach = np.searchsorted(need, left[v] * tau, side="right") if left[v] > 0 else 1
                for i in range(min(ends[num_ends - 1], reach)):
                    while ends[low] <= i:
                        low += 1
                    arrives = 1 if first % node == 0 and i > 0 else 0
                    least, furthest = min(best[k + 1, v, i], most - ahead[i]), i + width[c, i]
                    for e in range(low, num_ends):
                        j = ends[e]
                        if j > furthest:
                            break
                        rest = best[k, u, j]
                        time = times[k, offset[c, i] + j - i - 1] + enter[c, arrives, i] + leave[c, departs, j]
                        value = max(rest, time) if minimax else rest + time - hidden[c, j] + hidden[c, i]
                        if time <= tau and value < least:
                            least = value
                            best[k + 1, v, i] = value
                            option[k + 1, v, i] = c
                            cut[k + 1, v, i] = j


@njit(cache=True, nogil=True)
def sequence(tau, minimax, options, arrives, departs, table, best, cut):  # type: ignore[no-untyped-def]
    """best[k, a]: least sum (or maximum) of times of the last k stages from cut a on, where stages are given from last to first and only
    their cuts are free."""
    offset, width, times, enter, leave, hidden = table
    num_cuts = enter.shape[2] - 1
    best[:] = np.inf
    best[0, num_cuts] = 0.0
    for k in range(len(options)):
        c = options[k]
        for i in range(num_cuts):
            for j in range(i + 1, min(i + width[c, i], num_cuts) + 1):
                rest = best[k, j]
                if rest == np.inf:
                    continue
                time = times[k, offset[c, i] + j - i - 1] + enter[c, arrives[k], i] + leave[c, departs[k], j]
                value = max(rest, time) if minimax else rest + time - hidden[c, j] + hidden[c, i]
                if time <= tau and value < best[k + 1, i]:
                    best[k + 1, i] = value
                    cut[k + 1, i] = j


@njit(cache=True, nogil=True)
def priced(tau, prices, devices, edges, after, table, best, option, cut, values, used):  # type: ignore[no-untyped-def]
    """values[k]: least sum over k stages of time + price of the option's devices + `after`, where no stage takes more than `tau`.

    Devices are not counted but paid for: prices [options] are those of all devices of a stage; used[k] receives how many of these weighted
    `devices` [options] the k stages take. `edges` tells how many of a stage's two messages go across nodes at least. `after`
    [options, cuts] are prefix sums.
    """
    offset, width, times, enter, leave, _ = table
    depth, num_cuts = times.shape[0], enter.shape[2] - 1
    best[:] = np.inf
    best[0, num_cuts] = 0.0
    for k in range(depth):
        for c in range(len(prices)):
            for i in range(num_cuts):
                inside, across = enter[c, 0, i], enter[c, 1, i]
                near, far = min(inside, across), max(inside, across)
                for j in range(i + 1, min(i + width[c, i], num_cuts) + 1):
                    rest = best[k, j]
                    if rest == np.inf:
                        continue
                    near_out, far_out = min(leave[c, 0, j], leave[c, 1, j]), max(leave[c, 0, j], leave[c, 1, j])
                    if edges[c] == 0:
                        messages = near + near_out
                    elif edges[c] == 1:
                        messages = min(near + far_out, far + near_out)
                    else:
                        messages = across + leave[c, 1, j]
                    time = times[k, offset[c, i] + j - i - 1] + messages
                    if time <= tau:
                        value = rest + time + prices[c] + after[c, j] - after[c, i]
                        if value < best[k + 1, i]:
                            best[k + 1, i] = value
                            option[k + 1, i] = c
                            cut[k + 1, i] = j
    for depth_here in range(1, depth + 1):
        values[depth_here] = best[depth_here, 0]
        used[depth_here] = 0.0
        i = 0
        for k in range(depth_here, 0, -1):
            if values[depth_here] < np.inf:
                used[depth_here] += devices[option[k, i]]
                i = cut[k, i]


def warm() -> None:
    """Compiles every kernel for the types it is called with, on a chain of two tiny blocks."""
    ones, head, tail = np.ones(6), np.zeros((2, 6, 3)), np.zeros((2, 7, 3))
    levels = Levels(np.array([0.0, 9.0]), head, tail, np.ascontiguousarray(head[:, :1]), np.full((1, 8), np.inf), np.ones(1))
    blocks = BlockArrays(np.array([0, 0, 0, 1, 1, 1]), np.array([0, 3, 6]), np.array([[0, 1, 2]]))
    offset, width, times = np.arange(6) * 6, np.arange(6, 0, -1), np.full((2, 36), np.inf)
    inner, choice = count_blocks(blocks.counts, 0, 1), np.zeros(8, np.int64)
    fit_stage(1.0, 1.0, 1, levels.head[:, 0], levels.tail[:, 1], levels, inner, choice)
    memory, twins = MemoryRule(9.0, 1.0, 1.0), np.zeros((2, 6), np.int64)
    stage_times(OpArrays(*[ones] * 7), levels, blocks, memory, np.inf, np.arange(7), twins, 0, 0, offset, width, times)
    messages, one, shape = np.zeros((1, 2, 7)), np.array([1]), (3, 3, 7)
    table = StageTable(offset[None], width[None], times, messages, messages, messages[0, :1])
    best, option, cut = np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    priced(np.inf, np.ones(1), np.ones(1), 0 * one, np.zeros((1, 7)), table, best[0], option[0], cut[0], np.zeros(3), np.zeros(3))
    pools, left = PoolArrays(2 * one, 2 * one, 0 * one, one), np.array([2.0, 1.0, 0.0])
    partition(np.inf, np.inf, True, pools, left, np.zeros(7), np.zeros(7), table, best, option, cut)
    sequence(np.inf, True, 0 * one, one, one, table, best[0], option[0])
