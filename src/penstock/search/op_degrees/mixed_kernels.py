"""The compiled loops for stages whose ops have degrees of their own.

`costs` are `ChainArrays`, `memory` is a `MemoryRule`. An op has Q configurations (degrees and split) and may be recomputed: it is in one
of S = 2 Q states, in state s of configuration s // 2, and recomputed where s is odd. Costs are arrays [Q, N]. Between an op before in one
configuration and an op in another [Q, Q, N], `reshard` is the time that moving the op's input takes and `moved` the memory that the moved
input holds; `edge` tells whether the result of the op before stays although both are recomputed, since a segment begins there. The last op
of a recomputed segment takes `ending` instead of its forward time. Memory is state × weights, what is held by all micro-batches, and a
reserve of at least floor × weights.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.kernels import borrowing
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


@borrowing
def _bound_from(i, price, held, limit, per_weight, by_ops, costs, low, cost, fresh):  # type: ignore[no-untyped-def]
    """`bound_table` of the stages from one op on, as many as `low` has room for, at one price."""
    own_forward = own_backward = 0.0
    for s in range(len(cost)):
        q, f = s // 2, s % 2
        memory = per_weight * costs.weights[q, i] + held * (costs.entering[q, i] + costs.kept[q, i])
        time = costs.compute[q, i] + f * costs.ending[q, i] + costs.enter[q, i]
        cost[s] = time + price * memory if costs.allowed[q, i] else np.inf
    for last in range(i, i + len(low)):
        best = np.inf
        for s in range(len(cost)):
            best = min(best, cost[s] + costs.leave[s // 2, last])
        low[last - i] = max(low[last - i], best - price * (limit - by_ops * (own_forward + own_backward)))
        op = last + 1
        if op == i + len(low):
            break
        if by_ops:
            own_forward = max(own_forward, _least(costs.forward_reserve, last))
            own_backward = max(own_backward, _least(costs.backward_reserve, last))
        for s in range(len(cost)):
            q, f = s // 2, s % 2
            least, _ = _cheapest_before(s, op, price, held, cost, costs)
            own = costs.compute[q, op] + f * costs.ending[q, op]
            fresh[s] = least + (own + price * (per_weight * costs.weights[q, op] + held * costs.kept[q, op]))
        cost, fresh = fresh, cost


@borrowing
def _least(values, op):  # type: ignore[no-untyped-def]
    """The least of an op's configurations."""
    least = np.inf
    for q in range(len(values)):
        least = min(least, values[q, op])
    return least


class _Run(NamedTuple):
    """Ops in a row, each in some state: what they take together."""

    time: float
    weights: float
    held: float
    """By one micro-batch."""
    segment: float
    """Kept by the ops of the recomputed segment at the end, if it may grow."""
    peak: float
    """Kept by the largest segment of several ops, which is brought back at once."""
    forward_reserve: float
    backward_reserve: float


_NUM_FIELDS = 7
"""Of a `_Run`."""


@borrowing
def _read(row):  # type: ignore[no-untyped-def]
    """The run in a row of a table."""
    return _Run(row[0], row[1], row[2], row[3], row[4], row[5], row[6])


@borrowing
def _write(row, run):  # type: ignore[no-untyped-def]
    """Puts a run into a row of a table."""
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = run


@borrowing
def _begun(s, op, costs):  # type: ignore[no-untyped-def]
    """The run of one op, the first of a stage."""
    q, f = s // 2, s % 2
    time = costs.compute[q, op] + f * costs.ending[q, op] + costs.enter[q, op]
    return _Run(time, costs.weights[q, op], costs.entering[q, op] + costs.kept[q, op], 0.0, 0.0, 0.0, 0.0)


@borrowing
def _longer(run, time, held, r, s, op, costs):  # type: ignore[no-untyped-def]
    """A run whose last op has state r, with another op in state s, after which they take so much time and hold so much unless the op
    before is recomputed in the same segment."""
    p, q, segment, peak = r // 2, s // 2, 0.0, run.peak
    if r % 2 and s % 2:
        segment = run.segment + costs.kept[p, op - 1]
        peak = max(peak, segment)
        if costs.edge[p, q, op]:
            segment = 0.0
        else:
            held -= costs.kept[p, op - 1]
            time += costs.forward[p, op - 1] - costs.ending[p, op - 1]
    forward = max(run.forward_reserve, costs.forward_reserve[p, op - 1])
    backward = max(run.backward_reserve, costs.backward_reserve[p, op - 1])
    return _Run(time, run.weights + costs.weights[q, op], held, segment, peak, forward, backward)


@borrowing
def _used(run, held, memory):  # type: ignore[no-untyped-def]
    """Memory that a run takes with so many micro-batches held."""
    reserve = max(run.forward_reserve + run.backward_reserve, memory.floor * run.weights)
    return memory.state * run.weights + held * run.held + run.peak + reserve


@njit(cache=True, nogil=True)
def reached_table(prices, memory, costs, is_cut, offset, width, high):  # type: ignore[no-untyped-def]
    """high[k, pair]: the time of some states of ops i..j between two cuts that fit with k stages behind; unchanged where none was met.

    They are the cheapest chains at some prices of memory, as in `bound_table`, with all their memory exactly.
    """
    states = 2 * costs.compute.shape[0]
    cost, fresh = np.empty(states), np.empty(states)
    now, new = np.zeros((states, _NUM_FIELDS)), np.zeros((states, _NUM_FIELDS))
    for k in range(high.shape[0]):
        for level in range(len(prices)):
            for i in range(len(is_cut) - 1):
                if is_cut[i]:
                    reached = high[k, offset[i] : offset[i] + width[i]]
                    _reach_from(i, prices[level] / (k + 1.0), k + 1.0, memory, costs, is_cut, cost, fresh, now, new, reached)


@borrowing
def _reach_from(i, price, held, memory, costs, is_cut, cost, fresh, now, new, reached):  # type: ignore[no-untyped-def]
    """`reached_table` of the stages from one op on, as many as `reached` has room for, at one price."""
    states, per_weight = len(cost), memory.state + memory.floor
    for s in range(states):
        run = _begun(s, i, costs)
        _write(now[s], run)
        cost[s] = run.time + price * (per_weight * run.weights + held * run.held) if costs.allowed[s // 2, i] else np.inf
    for last in range(i, i + len(reached)):
        for s in range(states if is_cut[last + 1] else 0):
            run = _read(now[s])
            if cost[s] < np.inf and _used(run, held, memory) <= memory.limit:
                reached[last - i] = min(reached[last - i], run.time + costs.leave[s // 2, last])
        op = last + 1
        if op == i + len(reached):
            break
        for s in range(states):
            q, f = s // 2, s % 2
            least, before = _cheapest_before(s, op, price, held, cost, costs)
            run, own = _read(now[before]), costs.compute[q, op] + f * costs.ending[q, op]
            fresh[s] = least + own + price * (per_weight * costs.weights[q, op] + held * costs.kept[q, op])
            time = run.time + (own + costs.reshard[before // 2, q, op])
            kept = run.held + (costs.kept[q, op] + costs.moved[before // 2, q, op])
            _write(new[s], _longer(run, time, kept, before, s, op, costs))
        cost, fresh = fresh, cost
        now, new = new, now


@borrowing
def _cheapest_before(s, op, price, held, cost, costs):  # type: ignore[no-untyped-def]
    """Least cost of all ops before one in state s, by the states of the last of them, and that state."""
    q, f, least, best = s // 2, s % 2, np.inf, 0
    for r in range(len(cost) if costs.allowed[q, op] else 0):
        p = r // 2
        value = cost[r] + costs.reshard[p, q, op] + price * held * costs.moved[p, q, op]
        if f and r % 2 and not costs.edge[p, q, op]:
            value += costs.forward[p, op - 1] - costs.ending[p, op - 1] - price * held * costs.kept[p, op - 1]
        if value < least:
            least, best = value, r
    return least, best


class _Labels(NamedTuple):
    """Runs by the state of their last op and by their memory, see `_keep`."""

    now: Floats
    """[S, buckets, 7] up to one op,"""
    new: Floats
    """and up to the next."""
    back: NDArray[np.int16]
    """[ops, S, buckets, 2] the state and bucket of the label before; -1 at first."""


@njit(cache=True, nogil=True)
def best_chain(first, last, most, held, memory, buckets, costs, chosen):  # type: ignore[no-untyped-def]
    """Fast states of ops first..last that fit with so many micro-batches held, if they take at most `most`; returns their time, infinite if
    none was found. `chosen` receives the state of each op.

    Labels are kept for each state and bucket of memory, the fastest of each, with all their memory exactly; of those in a bucket one
    that would have had the smaller peak in the end may be lost.
    """
    num, n = costs.compute.shape[0], last - first
    labels = _Labels(
        np.full((2 * num, buckets, _NUM_FIELDS), np.inf), np.full((2 * num, buckets, _NUM_FIELDS), np.inf),
        np.full((n, 2 * num, buckets, 2), -1, np.int16),
    )  # fmt: skip
    left = np.full((n, num), np.inf)
    _fill_time_left(first, last, costs, left)
    return _best_chain(first, last, most, held, memory, costs, left, labels, chosen)


@borrowing
def _best_chain(first, last, most, held, memory, costs, left, labels, chosen):  # type: ignore[no-untyped-def]
    """`best_chain`: labels are made longer op by op."""
    now, new, back = labels
    for s in range(len(now)):
        if costs.allowed[s // 2, first]:
            hope = s % 2 * held * costs.kept[s // 2, first]
            _keep(now, back, (0, s, -1, -1), _begun(s, first, costs), memory, held, hope)
    for step in range(1, last - first):
        new[:] = np.inf
        for r in range(len(now)):
            _lengthen(r, step, first + step, most, held, memory, costs, left, now, new, back)
        now, new = new, now
    best, state, bucket = _fastest_fitting(last - 1, held, memory, costs, now)
    if state < 0:
        return np.inf
    for step in range(last - first - 1, -1, -1):
        chosen[step] = state
        state, bucket = back[step, state, bucket, 0], back[step, state, bucket, 1]
    return _without_lone_ops(best, first, costs, chosen)


@borrowing
def _lengthen(r, step, op, most, held, memory, costs, left, now, new, back):  # type: ignore[no-untyped-def]
    """Adds an op in every state to the labels whose last op has state r, unless another is as good in all respects."""
    best, best_segment, best_kept, best_base, best_memory = np.inf, np.inf, np.inf, np.inf, np.inf
    for bucket in range(now.shape[1]):
        if now[r, bucket, 0] == np.inf:
            continue
        run = _read(now[r, bucket])
        own = memory.state * run.weights + held * run.held
        base = own + max(run.forward_reserve + run.backward_reserve, memory.floor * run.weights)
        worse = run.time >= best and run.segment >= best_segment
        if worse and own >= best_kept and base >= best_base and base + run.peak >= best_memory:
            continue  # one that takes no more memory, with and without its peak and reserve, is as fast
        if run.time < best:
            best, best_segment, best_kept, best_base, best_memory = run.time, run.segment, own, base, base + run.peak
        for s in range(len(now)):
            p, q, f = r // 2, s // 2, s % 2
            if costs.allowed[q, op]:
                time = run.time + costs.reshard[p, q, op] + costs.compute[q, op] + f * costs.ending[q, op]
                longer = _longer(run, time, run.held + costs.kept[q, op] + costs.moved[p, q, op], r, s, op, costs)
                if longer.time + left[step, q] <= most:
                    _keep(new, back, (step, s, r, bucket), longer, memory, held, f * held * costs.kept[q, op])


@borrowing
def _fastest_fitting(last, held, memory, costs, labels):  # type: ignore[no-untyped-def]
    """Time, state and bucket of the fastest label that fits; state -1 if none does."""
    best, state, bucket = np.inf, -1, -1
    for s in range(labels.shape[0]):
        for b in range(labels.shape[1]):
            if labels[s, b, 0] == np.inf:
                continue
            run = _read(labels[s, b])
            if _used(run, held, memory) <= memory.limit and run.time + costs.leave[s // 2, last] < best:
                best, state, bucket = run.time + costs.leave[s // 2, last], s, b
    return best, state, bucket


@borrowing
def _without_lone_ops(time, first, costs, chosen):  # type: ignore[no-untyped-def]
    """The time where no op is recomputed whose neighbours are not, which would save nothing."""
    for step in range(len(chosen)):
        before, after = step > 0 and chosen[step - 1] % 2, step + 1 < len(chosen) and chosen[step + 1] % 2
        if chosen[step] % 2 and not before and not after:
            chosen[step] -= 1
            time -= costs.ending[chosen[step] // 2, first + step]
    return time


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


@borrowing
def _fill_time_left(first, last, costs, left):  # type: ignore[no-untyped-def]
    """left [ops, Q]: the least time of all that comes after an op in a configuration, whatever memory it takes."""
    for q in range(left.shape[1]):
        left[last - first - 1, q] = costs.leave[q, last - 1]
    for step in range(last - first - 2, -1, -1):
        op = first + step + 1
        for p in range(left.shape[1]):
            for q in range(left.shape[1]):
                if costs.allowed[q, op]:
                    left[step, p] = min(left[step, p], costs.reshard[p, q, op] + costs.compute[q, op] + left[step + 1, q])


@borrowing
def _keep(table, back, place, run, memory, held, hope):  # type: ignore[no-untyped-def]
    """Enters a label unless it cannot fit any more (`hope` may still be saved) or faster ones have its buckets.

    Buckets go by all memory. Where one micro-batch is held, only half of them do, and a label that is not the fastest there has another
    chance in the other half, which goes by memory without the peak: there the first segment that is recomputed saves no more than its
    own peak, but the next one does.
    """
    step, s, r, bucket = place
    used = _used(run, held, memory)
    if used - hope > memory.limit:
        return
    half = table.shape[1] // 2 if held < 2 else table.shape[1]
    into = int((used - hope) / memory.limit * (half - 1))
    if run.time < table[s, into, 0]:
        if table[s, into, 0] < np.inf and held < 2:
            other = _read(table[s, into])
            reserve = max(other.forward_reserve + other.backward_reserve, memory.floor * other.weights)
            base = memory.state * other.weights + held * other.held + reserve
            second = half + int(max(base - hope, 0.0) / memory.limit * (half - 1))
            if other.time < table[s, second, 0]:
                _write(table[s, second], other)
                back[step, s, second, 0], back[step, s, second, 1] = back[step, s, into, 0], back[step, s, into, 1]
    elif held < 2:
        into = half + int(max(used - run.peak - hope, 0.0) / memory.limit * (half - 1))
        if run.time >= table[s, into, 0]:
            return
    else:
        return
    _write(table[s, into], run)
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
