"""The compiled loops for stages whose ops have degrees of their own.

`costs` are `ChainArrays`, `memory` is a `MemoryRule`. Q configurations of an op, each recomputed or not, make S = 2 Q states
(state 2 q + f). Costs are arrays [Q, N]. Between an op before in
one configuration and an op in another [Q, Q, N], `reshard` is the time that moving the op's input takes and `moved` the memory that the
moved input holds; `edge` tells whether the result of the op before stays although both are recomputed, since a segment begins there.
The last op of a recomputed segment takes `ending` instead of its forward time. Memory is state × weights, what is held by all
micro-batches, and a reserve of at least floor × weights.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.op_degrees.lazy_stages import ChainArrays
from penstock.search.partition.stage_space import MemoryRule

__all__ = ["best_chain", "bound_table", "mixing_gain", "peak_bounds", "reached_table", "warm"]


@njit(cache=True, nogil=True)
def bound_table(prices, memory, costs, offset, width, low):  # type: ignore[no-untyped-def]
    """low[k, pair]: a time that ops i..j with k stages behind cannot be below, the largest over some prices of memory.

    At a price, every choice is paid by its time and its memory (weights, and what all micro-batches hold); the cheapest chain less the
    price of the whole limit bounds all chains that fit. The reserve counts once by the weights, and once by the least that the ops keep for
    themselves, where that may be more.
    """
    weights, forward_reserve, backward_reserve = costs.weights, costs.forward_reserve, costs.backward_reserve
    limit, state, floor = memory
    configurations, num_ops = weights.shape
    cost, fresh = np.empty(2 * configurations), np.empty(2 * configurations)
    for i in range(num_ops):
        low[:, offset[i] : offset[i] + width[i]] = 0.0
        weight = by_weights = reserve = own_forward = own_backward = 0.0
        for op in range(i, i + width[i]):
            weight += weights[:, op].min()
            if op == i:
                by_weights = floor * weight
            own_forward, own_backward = max(own_forward, forward_reserve[:, op].min()), max(own_backward, backward_reserve[:, op].min())
            if op == i + width[i] // 2:
                reserve = own_forward + own_backward
        more_by_ops = own_forward + own_backward > by_weights
        for by_ops in range(2):
            if (by_ops and not more_by_ops) or (not by_ops and more_by_ops and floor * weight <= reserve):
                continue
            per_weight = state if by_ops else state + floor
            for k in range(low.shape[0]):
                for level in range(len(prices)):
                    price, span = prices[level] / (k + 1.0), slice(offset[i], offset[i] + width[i])
                    _bound_from(i, price, k + 1.0, limit, per_weight, by_ops, costs, low[k, span], cost, fresh)


@njit(cache=True, nogil=True)
def _bound_from(i, price, held, limit, per_weight, by_ops, costs, low, cost, fresh):  # type: ignore[no-untyped-def]
    """`bound_table` of the stages from one op on, as many as `low` has room for, at one price."""
    (compute, forward, ending, kept, forward_reserve, backward_reserve, weights, entering, enter, leave, reshard, moved, edge,
     allowed) = costs  # fmt: skip
    states, own_forward, own_backward = len(cost), 0.0, 0.0
    for s in range(states):
        q, f = s // 2, s % 2
        memory = per_weight * weights[q, i] + held * (entering[q, i] + kept[q, i])
        cost[s] = compute[q, i] + f * ending[q, i] + enter[q, i] + price * memory if allowed[q, i] else np.inf
    for last in range(i, i + len(low)):
        best = np.inf
        for s in range(states):
            best = min(best, cost[s] + leave[s // 2, last])
        low[last - i] = max(low[last - i], best - price * (limit - by_ops * (own_forward + own_backward)))
        op = last + 1
        if op == i + len(low):
            break
        if by_ops:
            own_forward = max(own_forward, forward_reserve[:, last].min())
            own_backward = max(own_backward, backward_reserve[:, last].min())
        for s in range(states):
            q, f, least = s // 2, s % 2, np.inf
            if allowed[q, op]:
                for r in range(states):
                    value = cost[r] + reshard[r // 2, q, op] + price * held * moved[r // 2, q, op]
                    if f and r % 2 and not edge[r // 2, q, op]:
                        value += forward[r // 2, last] - ending[r // 2, last] - price * held * kept[r // 2, last]
                    least = min(least, value)
            own = compute[q, op] + f * ending[q, op] + price * (per_weight * weights[q, op] + held * kept[q, op])
            fresh[s] = least + own
        cost, fresh = fresh, cost


@njit(cache=True, nogil=True)
def reached_table(prices, memory, costs, is_cut, offset, width, high):  # type: ignore[no-untyped-def]
    """high[k, pair]: the time of some states of ops i..j between two cuts that fit with k stages behind; unchanged where none was met.

    They are the cheapest chains at some prices of memory, as in `bound_table`, with all their memory exactly.
    """
    (compute, forward, ending, kept, forward_reserve, backward_reserve, weights, entering, enter, leave, reshard, moved, edge,
     allowed) = costs  # fmt: skip
    limit, state, floor = memory
    num_ops, states = compute.shape[1], 2 * compute.shape[0]
    cost, fresh = np.empty(states), np.empty(states)
    # Of a chain: time, weights, held by one micro-batch, open segment, largest segment, largest reserves.
    now, new = np.zeros((states, 7)), np.zeros((states, 7))
    for k in range(high.shape[0]):
        held = k + 1.0
        for level in range(len(prices)):
            price = prices[level] / held
            for i in range(num_ops):
                if not is_cut[i]:
                    continue
                for s in range(states):
                    q, f = s // 2, s % 2
                    now[s] = 0.0
                    now[s, 0] = compute[q, i] + f * ending[q, i] + enter[q, i]
                    now[s, 1], now[s, 2] = weights[q, i], entering[q, i] + kept[q, i]
                    mine = (state + floor) * weights[q, i] + held * now[s, 2]
                    cost[s] = now[s, 0] + price * mine if allowed[q, i] else np.inf
                for last in range(i, i + width[i]):
                    if is_cut[last + 1]:
                        pair = offset[i] + last - i
                        for s in range(states):
                            reserve = max(now[s, 5] + now[s, 6], floor * now[s, 1])
                            if cost[s] < np.inf and state * now[s, 1] + held * now[s, 2] + now[s, 4] + reserve <= limit:
                                high[k, pair] = min(high[k, pair], now[s, 0] + leave[s // 2, last])
                    op = last + 1
                    if op == i + width[i]:
                        break
                    for s in range(states):
                        q, f, least, came = s // 2, s % 2, np.inf, 0
                        if allowed[q, op]:
                            for r in range(states):
                                value = cost[r] + reshard[r // 2, q, op] + price * held * moved[r // 2, q, op]
                                if f and r % 2 and not edge[r // 2, q, op]:
                                    value += forward[r // 2, last] - ending[r // 2, last] - price * held * kept[r // 2, last]
                                if value < least:
                                    least, came = value, r
                        own = compute[q, op] + f * ending[q, op]
                        fresh[s] = least + own + price * ((state + floor) * weights[q, op] + held * kept[q, op])
                        p = came // 2
                        new[s] = now[came]
                        new[s, 0] += own + reshard[p, q, op]
                        new[s, 1] += weights[q, op]
                        new[s, 2] += kept[q, op] + moved[p, q, op]
                        new[s, 3] = 0.0
                        new[s, 5], new[s, 6] = max(new[s, 5], forward_reserve[p, last]), max(new[s, 6], backward_reserve[p, last])
                        if f and came % 2:
                            segment = now[came, 3] + kept[p, last]
                            new[s, 4] = max(new[s, 4], segment)
                            if not edge[p, q, op]:
                                new[s, 3] = segment
                                new[s, 2] -= kept[p, last]
                                new[s, 0] += forward[p, last] - ending[p, last]
                    cost, fresh = fresh, cost
                    now, new = new, now


@njit(cache=True, nogil=True)
def best_chain(first, last, most, held, memory, buckets, costs, chosen):  # type: ignore[no-untyped-def]
    """Fast states of ops first..last that fit with so many micro-batches held, if they take at most `most`; returns their time, infinite if
    none was found. `chosen` receives the state of each op.

    Labels are kept for each state and bucket of memory, the fastest of each, with all their memory exactly; of those in a bucket one
    that would have had the smaller peak in the end may be lost.
    """
    (compute, forward, ending, kept, forward_reserve, backward_reserve, weights, entering, enter, leave, reshard, moved, edge,
     allowed) = costs  # fmt: skip
    limit, state, floor = memory
    states, n = 2 * compute.shape[0], last - first
    # Of a label: time, weights, held by one micro-batch, open segment, largest segment, largest reserves.
    now, new = np.full((states, buckets, 7), np.inf), np.full((states, buckets, 7), np.inf)
    back = np.full((n, states, buckets, 2), -1, np.int16)
    left = _time_left(first, last, compute, leave, reshard, allowed)
    for s in range(states):
        q, f = s // 2, s % 2
        if allowed[q, first]:
            time = compute[q, first] + f * ending[q, first] + enter[q, first]
            mine = entering[q, first] + kept[q, first]
            begun = (time, weights[q, first], mine, 0.0, 0.0, 0.0, 0.0)
            _keep(now, back, (0, s, -1, -1), begun, memory, held, f * held * kept[q, first])
    for step in range(1, n):
        op, before = first + step, first + step - 1
        new[:] = np.inf
        for r in range(states):
            best, best_segment, best_kept, best_base, best_memory = np.inf, np.inf, np.inf, np.inf, np.inf
            for bucket in range(buckets):
                if now[r, bucket, 0] == np.inf:
                    continue
                label = now[r, bucket]
                own = state * label[1] + held * label[2]
                base = own + max(label[5] + label[6], floor * label[1])
                worse = label[0] >= best and label[3] >= best_segment
                if worse and own >= best_kept and base >= best_base and base + label[4] >= best_memory:
                    continue  # one that takes no more memory, with and without its peak and reserve, is as fast
                if label[0] < best:
                    best, best_segment, best_kept, best_base, best_memory = label[0], label[3], own, base, base + label[4]
                p, again = r // 2, r % 2
                most_forward, most_backward = max(label[5], forward_reserve[p, before]), max(label[6], backward_reserve[p, before])
                for s in range(states):
                    q, f = s // 2, s % 2
                    if not allowed[q, op]:
                        continue
                    time = label[0] + reshard[p, q, op] + compute[q, op] + f * ending[q, op]
                    mine, segment, peak = label[2] + kept[q, op] + moved[p, q, op], 0.0, label[4]
                    if f and again:
                        segment = label[3] + kept[p, before]
                        peak = max(peak, segment)
                        if edge[p, q, op]:
                            segment = 0.0
                        else:
                            mine -= kept[p, before]
                            time += forward[p, before] - ending[p, before]
                    if time + left[step, q] > most:
                        continue
                    longer = (time, label[1] + weights[q, op], mine, segment, peak, most_forward, most_backward)
                    _keep(new, back, (step, s, r, bucket), longer, memory, held, f * held * kept[q, op])
        now, new = new, now
    best, at, slot = np.inf, -1, -1
    for s in range(states):
        for bucket in range(buckets):
            label = now[s, bucket]
            if label[0] == np.inf:
                continue
            used = state * label[1] + held * label[2] + label[4] + max(label[5] + label[6], floor * label[1])
            if used <= limit and label[0] + leave[s // 2, last - 1] < best:
                best, at, slot = label[0] + leave[s // 2, last - 1], s, bucket
    if at < 0:
        return np.inf
    for step in range(n - 1, -1, -1):
        chosen[step] = at
        at, slot = back[step, at, slot]
    for step in range(n):  # alone, a recomputed op saves nothing
        before, after = step > 0 and chosen[step - 1] % 2, step + 1 < n and chosen[step + 1] % 2
        if chosen[step] % 2 and not before and not after:
            chosen[step] -= 1
            best -= ending[chosen[step] // 2, first + step]
    return best


@njit(cache=True, nogil=True)
def peak_bounds(first, held, prices, peaks, memory, costs, low):  # type: ignore[no-untyped-def]
    """low[j] is raised to a time that ops first..first + j cannot be below if they fit with so many micro-batches held.

    As `bound_table`, with the segments that are brought back at once. Either nothing is recomputed, or the largest segment is in one of
    the ranges between `peaks` (0 the first of them): then there is room for all but the least of the range, and no segment is above it.
    """
    limit, num_ops = memory[0], len(low)
    found, value = np.full(num_ops, np.inf), np.empty(num_ops)
    for r in range(-1, len(peaks)):
        spare, most = peaks[max(r, 0)], peaks[r + 1] if r + 1 < len(peaks) else np.inf
        if spare > limit:
            break
        value[:] = 0.0
        for by_ops in range(2):
            for level in range(len(prices)):
                _peak_bound_from(first, prices[level] / held, held, spare, -1.0 if r < 0 else most, memory, by_ops, costs, value)
        found = np.minimum(found, value)
    for j in range(num_ops):
        low[j] = max(low[j], found[j])


_RUN = 12
"""Ops of a recomputed segment that are counted at most; longer ones count as so many."""


@njit(cache=True, nogil=True)
def _peak_bound_from(first, price, held, spare, most, memory, by_ops, costs, low):  # type: ignore[no-untyped-def]
    """`peak_bounds` at one price, for segments of at most `most`; none at all if that is negative."""
    (compute, forward, ending, kept, forward_reserve, backward_reserve, weights, entering, enter, leave, reshard, moved, edge,
     allowed) = costs  # fmt: skip
    limit, state, floor = memory
    per_weight = state if by_ops else state + floor
    num, own_forward, own_backward = compute.shape[0], 0.0, 0.0
    plain, again = np.full(num, np.inf), np.full((num, _RUN + 1), np.inf)  # the cheapest chains by how many ops their last segment has
    new_plain, new_again = plain.copy(), again.copy()
    least_kept = np.zeros(len(low) + 1)  # before each op, of the cheapest configurations
    for q in range(num):
        if allowed[q, first]:
            mine = per_weight * weights[q, first] + held * (entering[q, first] + kept[q, first])
            plain[q] = compute[q, first] + enter[q, first] + price * mine
            if most >= 0:
                again[q, 0] = plain[q] + ending[q, first]
    for step in range(len(low)):
        last, best = first + step, np.inf
        smallest = np.inf
        for q in range(num):
            best = min(best, min(plain[q], again[q].min()) + leave[q, last])
            if allowed[q, last]:
                smallest = min(smallest, kept[q, last])
        least_kept[step + 1] = least_kept[step] + smallest
        low[step] = max(low[step], best - price * (limit - spare - by_ops * (own_forward + own_backward)))
        if step + 1 == len(low):
            break
        if by_ops:
            own_forward = max(own_forward, forward_reserve[:, last].min())
            own_backward = max(own_backward, backward_reserve[:, last].min())
        op = last + 1
        new_plain[:], new_again[:] = np.inf, np.inf
        for q in range(num):
            if not allowed[q, op]:
                continue
            own = compute[q, op] + price * (per_weight * weights[q, op] + held * kept[q, op])
            for p in range(num):
                move = own + reshard[p, q, op] + price * held * moved[p, q, op]
                new_plain[q] = min(new_plain[q], plain[p] + move, again[p].min() + move)
                if most < 0:
                    continue
                move += ending[q, op]
                new_again[q, 0] = min(new_again[q, 0], plain[p] + move)
                saved = forward[p, last] - ending[p, last] - price * held * kept[p, last]
                for run in range(_RUN + 1):
                    if least_kept[step + 1] - least_kept[max(step - run, 0)] > most:
                        break
                    if edge[p, q, op]:
                        new_again[q, 0] = min(new_again[q, 0], again[p, run] + move)
                    else:
                        longer = min(run + 1, _RUN)
                        new_again[q, longer] = min(new_again[q, longer], again[p, run] + move + saved)
        plain, new_plain = new_plain, plain
        again, new_again = new_again, again


@njit(cache=True, nogil=True)
def _time_left(first, last, compute, leave, reshard, allowed):  # type: ignore[no-untyped-def]
    """[ops, Q] the least time of all that comes after an op in a configuration, whatever memory it takes."""
    num, n = compute.shape[0], last - first
    left = np.full((n, num), np.inf)
    left[n - 1] = leave[:, last - 1]
    for step in range(n - 2, -1, -1):
        op = first + step + 1
        for p in range(num):
            for q in range(num):
                if allowed[q, op]:
                    left[step, p] = min(left[step, p], reshard[p, q, op] + compute[q, op] + left[step + 1, q])
    return left


@njit(cache=True, nogil=True, inline="always")
def _keep(table, back, place, entry, memory, held, hope):  # type: ignore[no-untyped-def]
    """Enters a label unless it cannot fit any more (`hope` may still be saved) or faster ones have its buckets.

    Buckets go by all memory. Where one micro-batch is held, only half of them do, and a label that is not the fastest there has another
    chance in the other half, which goes by memory without the peak: there the first segment that is recomputed saves no more than its
    own peak, but the next one does.
    """
    limit, state, floor = memory
    step, s, r, bucket = place
    time, weight, mine, _, peak, most_forward, most_backward = entry
    used = state * weight + held * mine + peak + max(most_forward + most_backward, floor * weight)
    if used - hope > limit:
        return
    half = table.shape[1] // 2 if held < 2 else table.shape[1]
    into = int((used - hope) / limit * (half - 1))
    if time < table[s, into, 0]:
        label = table[s, into]
        if label[0] < np.inf and held < 2:
            base = state * label[1] + held * label[2] + max(label[5] + label[6], floor * label[1])
            second = half + int(max(base - hope, 0.0) / limit * (half - 1))
            if label[0] < table[s, second, 0]:
                table[s, second] = label
                back[step, s, second] = back[step, s, into]
    elif held < 2:
        into = half + int(max(used - peak - hope, 0.0) / limit * (half - 1))
        if time >= table[s, into, 0]:
            return
    else:
        return
    label = table[s, into]
    label[0], label[1], label[2], label[3], label[4], label[5], label[6] = entry
    back[step, s, into, 0], back[step, s, into, 1] = r, bucket


@njit(cache=True, nogil=True)
def mixing_gain(time, reshard, plain, firsts):  # type: ignore[no-untyped-def]
    """The largest share of its time that a run of ops from one of `firsts` saves if each op may have a configuration of its own instead
    of all the same of the `plain` ones."""
    num, num_ops = time.shape
    path, fresh, alone, gain = np.empty(num), np.empty(num), np.empty(num), 0.0
    for first in firsts:
        path[:], alone[:] = time[:, first], time[:, first]
        for op in range(first + 1, num_ops):
            best = np.inf
            for q in range(num):
                least = path[q]
                for r in range(num):
                    least = min(least, path[r] + reshard[r, q, op])
                fresh[q] = least + time[q, op]
                alone[q] += time[q, op]
                if plain[q]:
                    best = min(best, alone[q])
            path, fresh = fresh, path
            if best < np.inf:
                gain = max(gain, 1 - path.min() / best)
    return gain


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    ones, free, reshard = np.ones((1, 3)), np.ones((1, 3), np.bool_), np.zeros((1, 1, 3))
    edge, memory = np.zeros((1, 1, 3), np.bool_), MemoryRule(99.0, 4.0, 1.0)
    costs = ChainArrays(ones, ones, ones, ones, ones, ones, ones, ones, ones, ones, reshard, reshard, edge, free)
    offset, width = np.array([0, 3, 5]), np.array([3, 2, 1])
    bound_table(np.array([0.0, 1.0]), memory, costs, offset, width, np.zeros((1, 6)))
    reached_table(np.array([0.0, 1.0]), memory, costs, np.ones(4, np.bool_), offset, width, np.zeros((1, 6)))
    peak_bounds(0, 1.0, np.array([0.0, 1.0]), np.array([0.0, 1.0]), memory, costs, np.zeros(3))
    best_chain(0, 3, 99.0, 1.0, memory, 8, costs, np.zeros(3, np.int64))
    mixing_gain(ones, reshard, np.ones(1, np.bool_), np.array([0, 1]))
