"""The compiled loops for stages whose ops have degrees of their own.

Q configurations of an op, each recomputed or not, make S = 2 Q states (state 2 q + f). Costs are arrays [Q, N]; `reshard` [Q, Q, N] is
what moving an op's input from one configuration to another takes. `edge` [N] marks ops whose result stays although they and the next op
are recomputed, since a segment begins there.
"""

from __future__ import annotations

import numpy as np
from numba import njit

__all__ = ["best_chain", "bound_table", "warm"]


@njit(cache=True, nogil=True)
def bound_table(  # type: ignore[no-untyped-def]
    prices, limit, state, compute, forward, kept, weights, entering, enter, leave, reshard, edge, allowed, offset, width, low
):
    """low[k, pair]: a time that ops i..j with k stages behind cannot be below, the largest over some prices of memory.

    At a price, every choice is paid by its time and its memory (state × weights + weights, which the reserve is at least, and what all
    micro-batches hold); the cheapest chain less the price of the whole limit bounds all chains that fit.
    """
    num_ops, states = compute.shape[1], 2 * compute.shape[0]
    cost, fresh = np.empty(states), np.empty(states)
    for k in range(low.shape[0]):
        held = k + 1.0
        for level in range(len(prices)):
            price = prices[level] / held
            for i in range(num_ops):
                for s in range(states):
                    q, f = s // 2, s % 2
                    memory = (state + 1) * weights[q, i] + held * (entering[q, i] + kept[q, i])
                    cost[s] = compute[q, i] + f * forward[q, i] + enter[q, i] + price * memory if allowed[q, i] else np.inf
                for last in range(i, i + width[i]):
                    best = np.inf
                    for s in range(states):
                        best = min(best, cost[s] + leave[s // 2, last])
                    pair = offset[i] + last - i
                    low[k, pair] = max(low[k, pair], best - price * limit)
                    op = last + 1
                    if op == i + width[i]:
                        break
                    for s in range(states):
                        q, f, least = s // 2, s % 2, np.inf
                        if allowed[q, op]:
                            for r in range(states):
                                value = cost[r] + reshard[r // 2, q, op]
                                if f and r % 2 and not edge[last]:
                                    value -= price * held * kept[r // 2, last]
                                least = min(least, value)
                        own = compute[q, op] + f * forward[q, op] + price * ((state + 1) * weights[q, op] + held * kept[q, op])
                        fresh[s] = least + own
                    cost, fresh = fresh, cost


@njit(cache=True, nogil=True)
def best_chain(  # type: ignore[no-untyped-def]
    first, last, held, limit, buckets, state, compute, forward, kept, forward_reserve, backward_reserve, weights, entering, enter, leave,
    reshard, edge, allowed, chosen,
):  # fmt: skip
    """Fast states of ops first..last that fit; returns their time, infinite if none was found. `chosen` receives the state of each op.

    Labels are kept for each state and bucket of memory, the fastest of each, with all their memory exactly; a slower one in the same
    bucket that would have had the smaller peak in the end is lost.
    """
    states, n = 2 * compute.shape[0], last - first
    # Of a label: time, weights, held by one micro-batch, open segment, largest segment, largest reserves.
    now, new = np.full((states, buckets, 7), np.inf), np.full((states, buckets, 7), np.inf)
    back = np.full((n, states, buckets, 2), -1, np.int16)
    for s in range(states):
        q, f = s // 2, s % 2
        if allowed[q, first]:
            time = compute[q, first] + f * forward[q, first] + enter[q, first]
            mine = entering[q, first] + kept[q, first]
            _keep(now, back, 0, s, time, weights[q, first], mine, 0.0, 0.0, 0.0, 0.0, state, held, limit, -1, -1, held * kept[q, first])
    for step in range(1, n):
        op, before = first + step, first + step - 1
        new[:] = np.inf
        for r in range(states):
            for bucket in range(buckets):
                if now[r, bucket, 0] == np.inf:
                    continue
                label = now[r, bucket]
                p, again = r // 2, r % 2
                most_forward, most_backward = max(label[5], forward_reserve[p, before]), max(label[6], backward_reserve[p, before])
                for s in range(states):
                    q, f = s // 2, s % 2
                    if not allowed[q, op]:
                        continue
                    time = label[0] + reshard[p, q, op] + compute[q, op] + f * forward[q, op]
                    mine, segment, peak = label[2] + kept[q, op], 0.0, label[4]
                    if f and again:
                        segment = label[3] + kept[p, before]
                        peak = max(peak, segment)
                        if edge[before]:
                            segment = 0.0
                        else:
                            mine -= kept[p, before]
                    weight, hope = label[1] + weights[q, op], held * kept[q, op]
                    _keep(new, back, step, s, time, weight, mine, segment, peak, most_forward, most_backward, state, held, limit, r, bucket,
                          hope)  # fmt: skip
        now, new = new, now
    best, at, slot = np.inf, -1, -1
    for s in range(states):
        for bucket in range(buckets):
            label = now[s, bucket]
            if label[0] == np.inf:
                continue
            memory = state * label[1] + held * label[2] + label[4] + max(label[5] + label[6], label[1])
            if memory <= limit and label[0] + leave[s // 2, last - 1] < best:
                best, at, slot = label[0] + leave[s // 2, last - 1], s, bucket
    if at < 0:
        return np.inf
    for step in range(n - 1, -1, -1):
        chosen[step] = at
        at, slot = back[step, at, slot]
    return best


@njit(cache=True, nogil=True, inline="always")
def _keep(  # type: ignore[no-untyped-def]
    table, back, step, s, time, weight, mine, segment, peak, most_forward, most_backward, state, held, limit, r, bucket, hope
):
    """Enters a label unless it cannot fit any more (`hope` may still be saved) or a faster one has its bucket."""
    memory = state * weight + held * mine + peak + max(most_forward + most_backward, weight)
    if memory - hope > limit:
        return
    into = min(int(memory / limit * (table.shape[1] - 1)), table.shape[1] - 1)
    if time < table[s, into, 0]:
        label = table[s, into]
        label[0], label[1], label[2], label[3] = time, weight, mine, segment
        label[4], label[5], label[6] = peak, most_forward, most_backward
        back[step, s, into, 0], back[step, s, into, 1] = r, bucket


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    ones, free = np.ones((1, 3)), np.ones((1, 3), np.bool_)
    edge, reshard = np.zeros(3, np.bool_), np.zeros((1, 1, 3))
    offset, width = np.array([0, 3, 5]), np.array([3, 2, 1])
    bound_table(np.array([0.0, 1.0]), 99.0, 4.0, *[ones] * 7, reshard, edge, free, offset, width, np.zeros((1, 6)))
    best_chain(0, 3, 1.0, 99.0, 8, 4.0, *[ones] * 9, reshard, edge, free, np.zeros(3, np.int64))
