"""The compiled search over whole batch plans: a state, moves that change it, and annealing counted in steps.

A move writes changed micro-batches into free slots and leaves the old ones as they are, so that it is taken back by restoring the
lines of the replicas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.batching.kernels import charge, price_set, price_windows, run_replica, split

__all__ = ["Annealing", "BestState", "State", "anneal", "compact", "deal", "evaluate", "fill", "warm"]

_REORDER, _REPLICA, _AHEAD, _SHIFT, _TRANSFER, _SWAP, _SPLIT, _MERGE, _POOL = range(9)
"""Kinds of moves, in the order of their weights."""
_MOST = 24
"""Micro-batches that one move may make."""
_POOLED = 1024
"""Samples that one move may split anew."""
_FEW = 4
"""Micro-batches that one move may take apart."""

_entry = njit(cache=True, nogil=True, error_model="numpy")
_inner = njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""What only kernels call needs no way in from Python, which would take most of the time to compile."""


class State(NamedTuple):
    """Micro-batches in slots, and which slots each replica runs in which order."""

    members: NDArray[np.int64]
    """[slots, width]"""
    filled: NDArray[np.int64]
    """[slots] samples; 0 for a free slot"""
    cost: NDArray[np.float64]
    """[slots, C, M, 5]"""
    shape: NDArray[np.int64]
    """[slots, 5] layout, row length, decoder row length, tokens, decoder tokens"""
    charge: NDArray[np.float64]
    """[slots]"""
    seq: NDArray[np.int64]
    """[R, slots]"""
    num: NDArray[np.int64]
    """[R]"""
    ahead: NDArray[np.int64]
    """[R, S] forward passes before the first backward pass"""
    mode: NDArray[np.int64]
    """[R, S, slots]"""


class Annealing(NamedTuple):
    """How to search."""

    weights: NDArray[np.float64]
    """How often each kind of move is tried, from reordering to making micro-batches of a pool anew."""
    two_sided: bool
    """Whether samples have a second length."""
    steps: int
    hot: float
    """The first temperature."""
    cold: float
    random: NDArray[np.uint64]
    """[1] state of the random numbers."""


class BestState(NamedTuple):
    """Receives the best plan found: pieces of an order, and how replicas run them."""

    order: NDArray[np.int64]
    cuts: NDArray[np.int64]
    seq: NDArray[np.int64]
    num: NDArray[np.int64]
    ahead: NDArray[np.int64]


class _Work(NamedTuple):
    """Arrays that moves share."""

    random: NDArray[np.uint64]
    pool: NDArray[np.int64]
    """Samples of the micro-batches that a move takes apart; piece p of the new ones ends at ends[p]."""
    keys: NDArray[np.float64]
    ends: NDArray[np.int64]
    at: NDArray[np.int64]
    """[few, 2] replica and place of those taken apart"""
    gone: NDArray[np.int64]
    made: NDArray[np.int64]
    raw: NDArray[np.float64]
    other: NDArray[np.float64]
    sizes: NDArray[np.int64]
    begins: NDArray[np.int64]
    charges: NDArray[np.float64]
    sums: NDArray[np.float64]
    back: NDArray[np.int64]


@_inner
def _copy(target, at, source, first, count):  # type: ignore[no-untyped-def]
    for p in range(count):
        target[at + p] = source[first + p]


@_entry
def fill(state, tables, enc, dec, order, cuts):  # type: ignore[no-untyped-def]
    """Puts the pieces of an order into slots 0, 1, … and prices them; returns how many are infeasible."""
    raw, other = np.empty(tables.values0.shape[3]), np.empty(state.cost.shape[1:])
    state.filled[:] = 0
    state.num[:] = 0
    bad = 0
    for k in range(len(cuts) - 1):
        size = cuts[k + 1] - cuts[k]
        _copy(state.members[k], 0, order, cuts[k], size)
        state.filled[k] = size
        state.charge[k] = price_set(tables, enc, dec, state.members[k], size, raw, other, state.cost[k], state.shape[k])
        bad += state.charge[k] == np.inf
    return bad


@_entry
def deal(state, tables, pieces):  # type: ignore[no-untyped-def]
    """Deals slots 0..pieces to the replicas, the largest first to the one that would end earliest; small ones enter and leave a
    pipeline, large ones run in the middle."""
    replicas = len(state.num)
    keys, largest = np.empty(pieces), np.arange(pieces)
    _copy(keys, 0, state.charge, 0, pieces)
    _sort(keys, largest, 0, pieces)
    load = np.zeros(replicas)
    state.num[:] = 0
    for slot in largest:
        best, at = np.inf, 0
        for r in range(replicas):
            found = load[r] + charge(state.cost[slot], tables, r, state.filled[slot] == 1)
            if found < best:
                best, at = found, r
        load[at] = best
        state.seq[at, state.num[at]] = slot
        state.num[at] += 1
    for r in range(replicas):
        n = state.num[r]
        _copy(largest, 0, state.seq[r], 0, n)
        for k in range(n):  # from the smallest on, by turns to the front and to the back
            state.seq[r, k // 2 if k % 2 == 0 else n - 1 - k // 2] = largest[n - 1 - k]


@_entry
def evaluate(state, tables, r, scratch, hop):  # type: ignore[no-untyped-def]
    """Makespan of one replica; 0 if it has no work."""
    n = state.num[r]
    if n == 0:
        return 0.0
    return run_replica(tables, r, state.seq[r], n, state.cost, state.shape, state.ahead[r], state.mode[r], scratch, hop)


@_inner
def compact(state, order, cuts, seq):  # type: ignore[no-untyped-def]
    """Writes the plan as pieces of an order, numbered replica by replica in their order; returns the number of pieces."""
    piece = at = 0
    cuts[0] = 0
    for r in range(len(state.num)):
        for k in range(state.num[r]):
            slot = state.seq[r, k]
            _copy(order, at, state.members[slot], 0, state.filled[slot])
            at += state.filled[slot]
            seq[r, k] = piece
            piece += 1
            cuts[piece] = at
    return piece


@_inner
def _next(random):  # type: ignore[no-untyped-def]
    """Uniform in [0, 1): splitmix64, so that a seed gives the same plan on every machine."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@_inner
def _below(random, n):  # type: ignore[no-untyped-def]
    return min(int(_next(random) * n), n - 1)


@_inner
def _sort(keys, items, first, last):  # type: ignore[no-untyped-def]
    """Shell sort of places first..last by key, largest first; quick on what is nearly in order."""
    gap = 1
    while gap < (last - first) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(first + gap, last):
            key, item, j = keys[i], items[i], i
            while j >= first + gap and keys[j - gap] < key:
                keys[j], items[j] = keys[j - gap], items[j - gap]
                j -= gap
            keys[j], items[j] = key, item
        gap //= 3


@_inner
def _locate(state, random):  # type: ignore[no-untyped-def]
    """A random (replica, place) that holds a micro-batch."""
    total = 0
    for r in range(len(state.num)):
        total += state.num[r]
    k = _below(random, total)
    for r in range(len(state.num)):
        if k < state.num[r]:
            return r, k
        k -= state.num[r]
    return 0, 0


@_inner
def _near(state, r, k, random):  # type: ignore[no-untyped-def]
    """(replica, place) of the micro-batch nearest in both lengths of a few taken at random; (-1, -1) if none is another."""
    own = state.seq[r, k]
    found_r, found_k, best = -1, -1, np.inf
    for _ in range(12):
        q, p = _locate(state, random)
        its = state.seq[q, p]
        far = 0.0
        for side in range(1, 3):
            far += abs(np.log((state.shape[own, side] + 16.0) / (state.shape[its, side] + 16.0)))
        if its != own and far < best:
            found_r, found_k, best = q, p, far
    return found_r, found_k


@_inner
def _next_longer(state, r, k, random):  # type: ignore[no-untyped-def]
    """(replica, place) of the micro-batch with the next longer or shorter rows; (-1, -1) if there is none."""
    own = state.seq[r, k]
    sign = 1 if _next(random) < 0.5 else -1
    found_r, found_k, best = -1, -1, 2**62
    for q in range(len(state.num)):
        for p in range(state.num[q]):
            its = state.seq[q, p]
            gap = sign * (state.shape[its, 1] - state.shape[own, 1])
            if gap < 0 or (gap == 0 and sign * (its - own) <= 0):  # slots order those of equal length
                continue
            if gap < best:
                found_r, found_k, best = q, p, gap
    return found_r, found_k


@_inner
def _put(state, tables, enc, dec, work, first, last):  # type: ignore[no-untyped-def]
    """A new micro-batch of pool[first:last]; returns its slot, or -1 if it is infeasible."""
    size, slot = last - first, 0
    while slot < len(state.filled) and state.filled[slot] > 0:
        slot += 1
    if slot == len(state.filled) or size < 1 or size > state.members.shape[1]:
        return -1
    _copy(state.members[slot], 0, work.pool, first, size)
    found = price_set(tables, enc, dec, state.members[slot], size, work.raw, work.other, state.cost[slot], state.shape[slot])
    if found == np.inf:
        return -1
    state.charge[slot] = found
    state.filled[slot] = size
    return slot


@_inner
def _remove(state, r, k):  # type: ignore[no-untyped-def]
    for p in range(k, state.num[r] - 1):
        state.seq[r, p] = state.seq[r, p + 1]
    state.num[r] -= 1


@_inner
def _insert(state, r, k, slot):  # type: ignore[no-untyped-def]
    for p in range(state.num[r], k, -1):
        state.seq[r, p] = state.seq[r, p - 1]
    state.seq[r, k] = slot
    state.num[r] += 1


@_inner
def _reorder(state, r, k, random):  # type: ignore[no-untyped-def]
    """Moves a micro-batch to another place of its line, or swaps it with the one there; near places more often."""
    n = state.num[r]
    p = _below(random, n)
    if _next(random) < 0.5:
        p = min(max(k + _below(random, 7) - 3, 0), n - 1)
    slot = state.seq[r, k]
    if _next(random) < 0.5:
        state.seq[r, k] = state.seq[r, p]
        state.seq[r, p] = slot
    else:
        _remove(state, r, k)
        _insert(state, r, p, slot)
    return p != k


@_inner
def _to_replica(state, r, k, q, random):  # type: ignore[no-untyped-def]
    """Moves a micro-batch to replica q, or swaps it with one of its."""
    slot = state.seq[r, k]
    if state.num[q] > 0 and _next(random) < 0.6:
        p = _below(random, state.num[q])
        state.seq[r, k] = state.seq[q, p]
        state.seq[q, p] = slot
    else:
        _remove(state, r, k)
        _insert(state, q, _below(random, state.num[q] + 1), slot)


@_inner
def _change_ahead(state, r, random):  # type: ignore[no-untyped-def]
    """One forward pass more or fewer ahead on one stage; the depths never grow along the pipe, and never beyond the micro-batches."""
    stages = state.ahead.shape[1]
    s = _below(random, stages - 1)
    depth = min(state.ahead[r, s], max(state.num[r], 1))
    state.ahead[r, s] = max(depth + (1 if _next(random) < 0.5 else -1), 1)
    for t in range(s - 1, -1, -1):
        state.ahead[r, t] = max(state.ahead[r, t], state.ahead[r, t + 1])
    for t in range(s + 1, stages):
        state.ahead[r, t] = min(state.ahead[r, t], state.ahead[r, t - 1])


@_inner
def _line_up(work, n, enc, dec, two_sided):  # type: ignore[no-untyped-def]
    """Sorts the pool by length, or with two lengths by one of them or a random mixture."""
    a, b = 1.0, 0.0
    if two_sided:
        angle = _next(work.random) * 1.5707963267948966
        if _next(work.random) < 0.5:
            angle = 0.0 if _next(work.random) < 0.5 else 1.5707963267948966
        a, b = np.cos(angle), 4.0 * np.sin(angle)
        if _next(work.random) < 0.3:
            b = -b
    for p in range(n):
        work.keys[p] = a * enc[work.pool[p]] + b * dec[work.pool[p]]
    _sort(work.keys, work.pool, 0, n)


@_inner
def _snake(work, n, along, across):  # type: ignore[no-untyped-def]
    """Orders the pool in bands of one length, to and fro along the other."""
    for p in range(n):
        work.keys[p] = across[work.pool[p]]
    _sort(work.keys, work.pool, 0, n)
    bands, first = 2 + _below(work.random, 3), 0
    for band in range(bands):
        last = n if band == bands - 1 else first + _below(work.random, n - first + 1)
        for p in range(first, last):
            work.keys[p] = along[work.pool[p]] if band % 2 == 0 else -along[work.pool[p]]
        _sort(work.keys, work.pool, first, last)
        first = last


@_inner
def _take(state, work, r, k, index, n):  # type: ignore[no-untyped-def]
    """Adds the micro-batch at (r, k) to the pool, which holds n samples, as number `index`; returns how many it holds then."""
    slot = state.seq[r, k]
    work.at[index, 0], work.at[index, 1], work.gone[index] = r, k, slot
    _copy(work.pool, n, state.members[slot], 0, state.filled[slot])
    return n + state.filled[slot]


@_inner
def _split_one(state, work, r, k, enc, dec, two_sided):  # type: ignore[no-untyped-def]
    """Cuts a micro-batch in two; returns the number of pieces, 0 if it has one sample only."""
    n = _take(state, work, r, k, 0, 0)
    if n < 2:
        return 0
    _line_up(work, n, enc, dec, two_sided)
    work.ends[0] = n // 2 if _next(work.random) < 0.5 else 1 + _below(work.random, n - 1)
    work.ends[1] = n
    return 2


@_inner
def _exchange(state, work, r, k, q, p, move, enc, dec, two_sided):  # type: ignore[no-untyped-def]
    """Two micro-batches exchange samples or become one; returns the number of pieces, 0 if the move is not possible."""
    if state.shape[state.seq[r, k], 1] < state.shape[state.seq[q, p], 1]:  # the longer one first
        r, k, q, p = q, p, r, k
    na = _take(state, work, r, k, 0, 0)
    n = _take(state, work, q, p, 1, na)
    random = work.random
    work.ends[0], work.ends[1] = na, n
    if move == _MERGE:
        work.ends[0] = n
        return 1
    if move == _SHIFT:
        _line_up(work, n, enc, dec, two_sided)
        step = 1 + _below(random, 8 if n > 16 else max(n // 2, 1))
        work.ends[0] += step if _next(random) < 0.5 else -step
        return 2 if 0 < work.ends[0] < n else 0
    i, j = _below(random, na), na + _below(random, n - na)
    if move == _SWAP:
        work.pool[i], work.pool[j] = work.pool[j], work.pool[i]
        return 2
    if _next(random) < 0.5:  # one from the first to the second
        work.pool[i], work.pool[na - 1] = work.pool[na - 1], work.pool[i]
        work.ends[0] = na - 1
    else:
        work.pool[j], work.pool[na] = work.pool[na], work.pool[j]
        work.ends[0] = na + 1
    return 2 if 0 < work.ends[0] < n else 0


@_inner
def _pool_again(state, tables, work, r, k, enc, dec, two_sided):  # type: ignore[no-untyped-def]
    """Pools a few similar micro-batches, orders their samples anew and splits them at best; returns (pieces, how many were pooled)."""
    few = 2 + _below(work.random, _FEW - 1)
    n, taken = _take(state, work, r, k, 0, 0), 1
    limit = state.charge[state.seq[r, k]]
    for _ in range(3 * few):
        q, p = _near(state, r, k, work.random)
        fresh = q >= 0
        for g in range(taken):
            fresh = fresh and (work.at[g, 0] != q or work.at[g, 1] != p)
        if fresh and taken < few and n + state.filled[state.seq[q, p]] <= _POOLED:
            n = _take(state, work, q, p, taken, n)
            limit = max(limit, state.charge[state.seq[q, p]])
            taken += 1
    if n > _POOLED:
        return 0, 0
    if two_sided and _next(work.random) < 0.6:
        if _next(work.random) < 0.6:
            _snake(work, n, enc, dec)
        else:
            _snake(work, n, dec, enc)
    else:
        _line_up(work, n, enc, dec, two_sided)
    limit = np.inf if state.ahead.shape[1] == 1 else 1.1 * limit
    return _resplit(tables, work, enc, dec, n, limit), taken


@_inner
def _resplit(tables, work, enc, dec, n, limit):  # type: ignore[no-untyped-def]
    """Cuts the pool into padded pieces of least total charge, each ≤ limit; returns how many, 0 if that is impossible."""
    begins, sums, back = work.begins[: n + 1], work.sums[: n + 1], work.back[: n + 1]
    used = price_windows(tables, enc, dec, work.pool[:n], work.sizes, limit, begins, work.charges)
    if used < 0 or split(begins, work.charges, work.sizes, limit, sums, back) == np.inf:
        return 0
    pieces, at = 0, n
    while at > 0:
        pieces += 1
        at -= back[at]
    if pieces > _MOST:
        return 0
    at = n
    for p in range(pieces - 1, -1, -1):
        work.ends[p] = at
        at -= back[at]
    return pieces


@_inner
def _replace(state, tables, enc, dec, work, taken, pieces):  # type: ignore[no-untyped-def]
    """Makes the pieces of the pool and puts them where those taken apart were; False, with nothing changed, if one is infeasible."""
    first = work.ends[0] * 0
    for p in range(pieces):
        work.made[p] = _put(state, tables, enc, dec, work, first, work.ends[p])
        if work.made[p] < 0:
            for earlier in range(p):
                state.filled[work.made[earlier]] = 0
            return False
        first = work.ends[p]
    both = min(pieces, taken)
    for p in range(both):
        state.seq[work.at[p, 0], work.at[p, 1]] = work.made[p]
    for p in range(both, pieces):
        r = work.at[0, 0]
        if _next(work.random) < 0.3:
            r = _below(work.random, len(state.num))
        _insert(state, r, _below(work.random, state.num[r] + 1), work.made[p])
    for g in range(both, taken):
        r = work.at[g, 0]
        for k in range(state.num[r]):
            if state.seq[r, k] == work.gone[g]:
                _remove(state, r, k)
                break
    return True


@_inner
def _pool_sizes():  # type: ignore[no-untyped-def]
    """Sizes of pieces that a pool may be cut into."""
    sizes = np.empty(_POOLED, np.int64)
    count, size = 0, 1
    while size <= _POOLED:
        sizes[count] = size
        count += 1
        size += max(1, size // 24)
    return sizes[:count].copy()


@_inner
def _new_work(state, tables, random):  # type: ignore[no-untyped-def]
    size, sizes = 2 * state.members.shape[1] + _POOLED, _pool_sizes()
    return _Work(
        random, np.empty(size, np.int64), np.empty(size), np.empty(_MOST, np.int64), np.empty((_FEW, 2), np.int64),
        np.empty(_FEW, np.int64), np.empty(_MOST, np.int64), np.empty(tables.values0.shape[3]), np.empty(state.cost.shape[1:]),
        sizes, np.empty(_POOLED + 1, np.int64), np.empty(_POOLED * len(sizes)), np.empty(_POOLED + 1), np.empty(_POOLED + 1, np.int64),
    )  # fmt: skip


@_inner
def _energy(spans):  # type: ignore[no-untyped-def]
    """The slowest replica and a little of all, so that faster ones keep improving; also the slowest alone."""
    slowest = total = 0.0
    for span in spans:
        slowest = max(slowest, span)
        total += span
    return slowest + 0.1 * total / len(spans), slowest


@_inner
def _draw(cumulative, random):  # type: ignore[no-untyped-def]
    draw, move = _next(random), 0
    while move < len(cumulative) - 1 and draw >= cumulative[move]:
        move += 1
    return move


@_inner
def _move(state, tables, enc, dec, work, move, two_sided):  # type: ignore[no-untyped-def]
    """Makes one move; returns (done, replica, other replica, micro-batches taken apart, made)."""
    random, replicas = work.random, len(state.num)
    r, k = _locate(state, random)
    if move == _REORDER:
        return _reorder(state, r, k, random), r, r, 0, 0
    if move == _REPLICA:
        q = (r + 1 + _below(random, replicas - 1)) % replicas if replicas > 1 else r
        if q != r:
            _to_replica(state, r, k, q, random)
        return q != r, r, q, 0, 0
    if move == _AHEAD:
        if state.ahead.shape[1] > 1:
            _change_ahead(state, r, random)
        return state.ahead.shape[1] > 1, r, r, 0, 0
    if move == _SPLIT:
        pieces, taken = _split_one(state, work, r, k, enc, dec, two_sided), 1
    elif move == _POOL:
        pieces, taken = _pool_again(state, tables, work, r, k, enc, dec, two_sided)
    else:
        anywhere = tables.sizes[4] > 0 and move in (_TRANSFER, _SWAP) and _next(random) < 0.7
        if anywhere:  # packed micro-batches need not be alike
            q, p = _locate(state, random)
        elif two_sided:
            q, p = _near(state, r, k, random)
        else:
            q, p = _next_longer(state, r, k, random)
        if q < 0 or (q == r and p == k):
            return False, r, r, 0, 0
        pieces, taken = _exchange(state, work, r, k, q, p, move, enc, dec, two_sided), 2
    if pieces == 0 or not _replace(state, tables, enc, dec, work, taken, pieces):
        return False, r, r, 0, 0
    return True, r, r, taken, pieces


@_entry
def anneal(state, tables, enc, dec, annealing, kept):  # type: ignore[no-untyped-def]
    """Improves the state for a number of steps at falling temperatures; `kept` receives the best state found.

    Returns (its makespan, its number of micro-batches).
    """
    weights, two_sided, steps, hot, cold, random = annealing
    replicas, stages, slots = len(state.num), state.ahead.shape[1], len(state.filled)
    scratch, hop = np.empty((slots, 4, stages)), np.empty((slots, 2, max(stages - 1, 1)))
    work = _new_work(state, tables, random)
    old_seq, old_num, old_ahead = np.empty_like(state.seq), np.empty_like(state.num), np.empty_like(state.ahead)
    spans, old_spans = np.empty(replicas), np.empty(replicas)
    cumulative = np.cumsum(weights)
    cumulative /= cumulative[-1]
    for r in range(replicas):
        spans[r] = evaluate(state, tables, r, scratch, hop)
    energy, best = _energy(spans)
    pieces = _keep(state, kept)
    fall, temperature = (cold / hot) ** (1.0 / max(steps, 1)), hot
    for _ in range(steps):
        temperature *= fall
        for r in range(replicas):
            old_num[r], old_spans[r] = state.num[r], spans[r]
            _copy(old_seq[r], 0, state.seq[r], 0, state.num[r])
            _copy(old_ahead[r], 0, state.ahead[r], 0, stages)
        done, one, two, taken, made = _move(state, tables, enc, dec, work, _draw(cumulative, random), two_sided)
        if not done:
            continue
        for r in range(replicas):
            changed = state.num[r] != old_num[r] or (taken == 0 and r in (one, two))
            for g in range(taken):
                changed = changed or work.at[g, 0] == r
            if changed:
                spans[r] = evaluate(state, tables, r, scratch, hop)
        found, slowest = _energy(spans)
        if found <= energy or _next(random) < np.exp((energy - found) / temperature):
            energy = found
            for g in range(taken):
                state.filled[work.gone[g]] = 0
            if slowest < best:
                best = slowest
                pieces = _keep(state, kept)
        else:
            for r in range(replicas):
                state.num[r], spans[r] = old_num[r], old_spans[r]
                _copy(state.seq[r], 0, old_seq[r], 0, old_num[r])
                _copy(state.ahead[r], 0, old_ahead[r], 0, stages)
            for p in range(made):
                state.filled[work.made[p]] = 0
    return best, pieces


@_inner
def _keep(state, kept):  # type: ignore[no-untyped-def]
    order, cuts, seq, num, ahead = kept
    for r in range(len(num)):
        num[r] = state.num[r]
        _copy(ahead[r], 0, state.ahead[r], 0, ahead.shape[1])
    return compact(state, order, cuts, seq)


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    from penstock.batching.example import small_costs
    from penstock.batching.plan import SampleLengths
    from penstock.batching.planner import plan_batch

    plan_batch([SampleLengths(0, 3, 1), SampleLengths(1, 5, 2)], small_costs(), steps=2)
