"""The compiled loops of batch planning: prices of micro-batches, the splitting programme, fitting into memory, running a replica.

Lengths of arrays: N samples, R replicas, S stages, C classes of stages with equal costs, M recomputation modes. A priced micro-batch
is a table [C, M, 5] of forward time, backward time, bytes kept between them, and the highest points of the two passes above the
level without this micro-batch. All that is infeasible is infinite.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.batching.costs import QUANTITIES
from penstock.timing.recorded import LEAST_STEP, PACKED_BITS
from penstock.timing.special_clocks import run_ahead

__all__ = [
    "PACKED", "PADDED", "Tables", "charge", "fit_stage", "hilbert_distances", "lookup", "price_set", "price_windows", "run_replica",
    "split", "warm",
]  # fmt: skip

FORWARD, BACKWARD, STORED, PEAK, BACKWARD_PEAK = range(5)
PADDED, PACKED = 0, 1
_HUGE = 1e300
_Q = len(QUANTITIES)

_entry = njit(cache=True, nogil=True, error_model="numpy")
_inner = njit(cache=True, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""What only kernels call needs no way in from Python, which would take most of the time to compile."""


class Tables(NamedTuple):
    """What the kernels know of a pipeline, see `costs.PipelineCosts`; [·]₀ is the padded grid, [·]₁ the packed one."""

    values0: NDArray[np.float64]
    """[axis 1, axis 2, axis 0, C · M · quantities]"""
    x0: NDArray[np.float64]
    y0: NDArray[np.float64]
    z0: NDArray[np.float64]
    values1: NDArray[np.float64]
    x1: NDArray[np.float64]
    y1: NDArray[np.float64]
    z1: NDArray[np.float64]
    stage_class: NDArray[np.int64]
    """[R, S]"""
    room: NDArray[np.float64]
    """[R, S] bytes for activations"""
    hops: NDArray[np.float64]
    """[R, 2, S - 1, 3] latency, seconds per token, per decoder token; forward and backward"""
    sizes: NDArray[np.int64]
    """C, M, rows are padded to a multiple of this, padded allowed, packed allowed, most samples and most positions together"""
    kinds: NDArray[np.int64]
    """One replica of each kind: those of a kind have equal costs"""
    filler: NDArray[np.float64]
    """Which packed micro-batches are filled up, see `timing.recorded.FewShapes.packed`"""


@_inner
def _cell(axis, x):  # type: ignore[no-untyped-def]
    """(lower knot, weight of the upper one); below the first knot the first cell is extended."""
    last = len(axis) - 2
    if last < 0:
        return 0, 0.0
    low, high = 0, last
    while low < high:
        middle = (low + high + 1) // 2
        if axis[middle] <= x:
            low = middle
        else:
            high = middle - 1
    return low, (x - axis[low]) / (axis[low + 1] - axis[low])


@_inner
def lookup(values, ax, ay, az, x, y, z, out):  # type: ignore[no-untyped-def]
    """Multilinear interpolation of all quantities at once into `out`; corners of no weight may be infinite."""
    i, u = _cell(ax, x)
    j, v = _cell(ay, y)
    k, w = _cell(az, z)
    out[:] = 0.0
    for corner in range(8):
        a, b, c = corner & 1, (corner >> 1) & 1, corner >> 2
        weight = (u if a else 1.0 - u) * (v if b else 1.0 - v) * (w if c else 1.0 - w)
        if weight == 0.0:
            continue
        row = values[j + b, k + c, i + a]
        for q in range(len(out)):
            out[q] += weight * row[q]


@_inner
def _derive(raw, modes, cost):  # type: ignore[no-untyped-def]
    """From interpolated quantities to the five of a micro-batch; a mode with anything missing is infinite as a whole."""
    for at in range(len(raw) // _Q):
        c, m, base = at // modes, at % modes, at * _Q
        ok = True
        for q in range(_Q):
            if not abs(raw[base + q]) < _HUGE:
                ok = False
        if ok:
            cost[c, m, 0] = raw[base]
            cost[c, m, 1] = raw[base + 1]
            cost[c, m, 2] = raw[base + 2]
            cost[c, m, 3] = max(raw[base + 3], raw[base + 4])
            cost[c, m, 4] = raw[base + 5]
        else:
            cost[c, m, :] = np.inf


@_inner
def charge(cost, tables, r, alone):  # type: ignore[no-untyped-def]
    """Time of the slowest stage, each in the fastest mode that fits with as many such micro-batches in flight as 1F1B holds, or
    with no other (`alone`)."""
    stages, modes = tables.stage_class.shape[1], tables.sizes[1]
    worst = 0.0
    for s in range(stages):
        c, others, room = tables.stage_class[r, s], 0 if alone else stages - s - 1, tables.room[r, s]
        best = np.inf
        for m in range(modes):
            if others * cost[c, m, 2] + max(cost[c, m, 3], cost[c, m, 4]) <= room:
                best = min(best, cost[c, m, 0] + cost[c, m, 1])
        worst = max(worst, best)
    return worst


@_inner
def filled(filler, tokens, keys):  # type: ignore[no-untyped-def]
    """Tokens of a packed micro-batch that see so many keys on average, with the filler behind them."""
    per_token, per_key, busy, ranks = filler[0], filler[1], filler[2], filler[3]
    if tokens * (per_token + per_key * keys) >= busy:
        return tokens
    share, step = np.ceil(tokens / ranks), float(LEAST_STEP)
    while 2 ** (PACKED_BITS + 1) * step <= share:
        step *= 2.0
    return ranks * np.ceil(share / step) * step


@_inner
def _price(tables, layout, x, y, z, raw, cost):  # type: ignore[no-untyped-def]
    if layout == PADDED:
        lookup(tables.values0, tables.x0, tables.y0, tables.z0, x, y, z, raw)
    else:
        run = filled(tables.filler, x, y)
        lookup(tables.values1, tables.x1, tables.y1, tables.z1, run, x * y / max(run, 1.0), z, raw)
    _derive(raw, tables.sizes[1], cost)


@_inner
def worst_charge(cost, tables, count):  # type: ignore[no-untyped-def]
    """The largest charge over replicas; a single sample that is too large to have its like in flight may still run among small ones."""
    worst = 0.0
    for r in tables.kinds:
        worst = max(worst, charge(cost, tables, r, count < 0))
    if worst == np.inf and count == 1:
        worst = 0.0
        for r in tables.kinds:
            worst = max(worst, charge(cost, tables, r, count == 1))
    return worst


@_inner
def _along(values, ax, in_y, in_z, x, line, known, out):  # type: ignore[no-untyped-def]
    """`lookup` at x for a fixed (y, z) in the cells given; knots on that line are filled in as they are asked for."""
    j, v = in_y
    k, w = in_z
    i, u = _cell(ax, x)
    for knot in range(i, i + 2):
        if known[knot] or (knot > i and u == 0.0):
            continue
        known[knot] = True
        line[knot, :] = 0.0
        for corner in range(4):
            b, c = corner & 1, corner >> 1
            weight = (v if b else 1.0 - v) * (w if c else 1.0 - w)
            if weight != 0.0:
                for q in range(len(out)):
                    line[knot, q] += weight * values[j + b, k + c, knot, q]
    if u == 0.0:
        out[:] = line[i]
    else:
        for q in range(len(out)):
            out[q] = (1.0 - u) * line[i, q] + u * line[i + 1, q]


@_entry
def price_set(tables, enc, dec, members, count, raw, other, cost, shape):  # type: ignore[no-untyped-def]
    """Prices samples as one micro-batch in the cheaper layout; fills `cost` and `shape` (layout, length, decoder length, tokens,
    decoder tokens) and returns the charge."""
    unit = tables.sizes[2]
    longest = longest_dec = total = total_dec = 0
    squares = 0.0
    for p in range(count):
        i = members[p]
        e, d = enc[i], dec[i]
        longest, longest_dec = max(longest, e), max(longest_dec, d)
        total += e
        total_dec += d
        squares += float(e) * e
    best = np.inf
    if tables.sizes[3]:
        row, row_dec = -(-longest // unit) * unit, -(-longest_dec // unit) * unit
        _price(tables, PADDED, float(count), float(row), float(row_dec), raw, cost)
        best = worst_charge(cost, tables, count) if count * (row + row_dec) <= tables.sizes[6] else np.inf
        shape[0], shape[1], shape[2], shape[3], shape[4] = PADDED, row, row_dec, count * row, count * row_dec
    if tables.sizes[4]:
        _price(tables, PACKED, float(total), squares / max(total, 1), 0.0, raw, other)
        found = worst_charge(other, tables, count) if total + total_dec <= tables.sizes[6] else np.inf
        if found < best:
            best = found
            cost[:] = other
            shape[0], shape[1], shape[2], shape[3], shape[4] = PACKED, 0, 0, total, total_dec
    if count > tables.sizes[5]:
        best = np.inf
    return best


@_entry
def price_windows(tables, enc, dec, order, sizes, cap, start, charges):  # type: ignore[no-untyped-def]
    """Charges of padded windows of the order that begin at each place and have the sizes listed, until one is infeasible or above
    `cap`; window k of place i is `charges[start[i] + k]`. A sample that fits only without the padding of its row is charged as packed.
    Returns how many there are, or -1 - i where place i has none at all."""
    n, modes, unit = len(order), tables.sizes[1], tables.sizes[2]
    raw = np.empty(tables.values0.shape[3])
    cost = np.empty((tables.sizes[0], modes, 5))
    line, known = np.empty((len(tables.x0), len(raw))), np.zeros(len(tables.x0), np.bool_)
    rows, charge = np.full((2, len(sizes)), -1), np.empty(len(sizes))  # the last window of each size
    last_row = last_row_dec = -1
    in_y, in_z = (0, 0.0), (0, 0.0)
    falling = True  # then the first of a window is its longest
    for i in range(1, n):
        falling = falling and enc[order[i]] <= enc[order[i - 1]] and dec[order[i]] <= dec[order[i - 1]]
    used = 0
    for i in range(n):
        start[i] = used
        longest = longest_dec = 0
        size = 0
        for k in range(len(sizes)):
            if i + sizes[k] > n or sizes[k] > tables.sizes[5]:
                break
            while size < sizes[k]:
                sample = order[i + size]
                longest, longest_dec = max(longest, enc[sample]), max(longest_dec, dec[sample])
                size = sizes[k] if falling else size + 1
            row, row_dec = -(-longest // unit) * unit, -(-longest_dec // unit) * unit
            if row != rows[0, k] or row_dec != rows[1, k]:  # neighbours mostly have the same windows
                if row != last_row or row_dec != last_row_dec:
                    last_row, last_row_dec = row, row_dec
                    known[:] = False
                    in_y, in_z = _cell(tables.y0, float(row)), _cell(tables.z0, float(row_dec))
                _along(tables.values0, tables.x0, in_y, in_z, float(size), line, known, raw)
                _derive(raw, modes, cost)
                rows[0, k], rows[1, k], charge[k] = row, row_dec, worst_charge(cost, tables, size)
            found = charge[k] if size * (row + row_dec) <= tables.sizes[6] else np.inf
            if found == np.inf and size == 1 and tables.sizes[4] and longest <= tables.sizes[6]:
                _price(tables, PACKED, float(longest), float(longest), 0.0, raw, cost)
                found = worst_charge(cost, tables, 1)
            if (found > cap and k > 0) or found == np.inf:
                break
            charges[used] = found
            used += 1
        if start[i] == used:
            return -1 - i
    start[n] = used
    return used


@_entry
def split(start, charges, sizes, limit, total, back):  # type: ignore[no-untyped-def]
    """Cuts the order into windows of charge ≤ `limit` with the least sum: total[n] is it, back[n] the size of the last window."""
    n = len(start) - 1
    total[:] = np.inf
    total[0] = 0.0
    for i in range(n):
        here = total[i]
        if here == np.inf:
            continue
        first, last = start[i], start[i + 1]
        for w in range(first, last):
            if charges[w] <= limit:
                end = i + sizes[w - first]
                value = here + charges[w]
                if value < total[end]:
                    total[end] = value
                    back[end] = sizes[w - first]
    return total[n]


@_entry
def hilbert_distances(x, y, bits):  # type: ignore[no-untyped-def]
    """Place of each point along the Hilbert curve of this order."""
    distance = np.zeros(len(x), np.int64)
    for p in range(len(x)):
        a, b = x[p], y[p]
        for level in range(bits - 1, -1, -1):
            side = 1 << level
            right, upper = int((a & side) > 0), int((b & side) > 0)
            distance[p] += side * side * ((3 * right) ^ upper)
            a, b = a & (side - 1), b & (side - 1)
            if upper == 0:
                if right == 1:
                    a, b = side - 1 - a, side - 1 - b
                a, b = b, a
    return distance


@_entry
def fit_stage(ids, n, cost, c, room, ahead, mode):  # type: ignore[no-untyped-def]
    """Chooses modes of a stage so that it fits, walking its order: every micro-batch in its fastest mode, and at each overflow the
    one in flight is changed that frees most bytes of those needed per second added. Returns whether it fits.

    The order is that of `run_ahead`: `ahead` forward passes, then a backward and a forward pass in turn. A change never raises a
    peak, so that what was checked before stays true.
    """
    modes = cost.shape[2]
    for k in range(n):
        best, time = 0, np.inf
        for m in range(modes):
            t = cost[ids[k], c, m, 0] + cost[ids[k], c, m, 1]
            if t < time and cost[ids[k], c, m, 3] <= room and cost[ids[k], c, m, 4] <= room:
                best, time = m, t
        if time == np.inf:
            return False
        mode[k] = best
    used = 0.0
    for step in range(n + ahead):
        j = step - ahead
        if 0 <= j < n:  # backward pass of j; its own part of `used` gives way to its peak
            own = cost[ids[j], c, mode[j]]
            need = used - own[2] + own[4] - room
            if need > 0.0:
                used = _make_room(ids, j, min(step, n), j, True, cost, c, need, used, mode)
                own = cost[ids[j], c, mode[j]]
                if used - own[2] + own[4] > room:
                    return False
            used -= cost[ids[j], c, mode[j], 2]
        if step < n:
            need = used + cost[ids[step], c, mode[step], 3] - room
            if need > 0.0:
                used = _make_room(ids, max(j + 1, 0), step, step, False, cost, c, need, used, mode)
                if used + cost[ids[step], c, mode[step], 3] > room:
                    return False
            used += cost[ids[step], c, mode[step], 2]
    return True


@_inner
def _make_room(ids, first, last, active, is_backward, cost, c, need, used, mode):  # type: ignore[no-untyped-def]
    """Changes modes of the micro-batches held (places first..last) and of the active one until `need` bytes are freed or none is left;
    returns what is held then."""
    modes = cost.shape[2]
    while need > 0.0:
        best, at, to = 0.0, -1, -1
        for k in range(first, max(last, active + 1)):
            now = cost[ids[k], c, mode[k]]
            for m in range(modes):
                new = cost[ids[k], c, m]
                if m == mode[k] or not new[2] <= now[2] or new[3] > now[3] or new[4] > now[4]:
                    continue
                freed = now[2] - new[2]
                if k == active:
                    freed = now[4] - new[4] if is_backward else now[3] - new[3]
                if freed <= 0.0:
                    continue
                added = max(new[0] + new[1] - now[0] - now[1], 1e-12)
                gain = min(freed, need) / added
                if gain > best:
                    best, at, to = gain, k, m
        if at < 0:
            break
        now, new = cost[ids[at], c, mode[at]], cost[ids[at], c, to]
        if at == active:
            need -= now[4] - new[4] if is_backward else now[3] - new[3]
        else:
            need -= now[2] - new[2]
        if at < last:
            used -= now[2] - new[2]
        mode[at] = to
    return used


@_inner
def run_replica(tables, r, ids, n, cost, shape, ahead, mode, scratch, hop):  # type: ignore[no-untyped-def]
    """Makespan of replica r with these micro-batches in this order; infinite if they do not fit. Fills mode [S, n].

    scratch is [n, 4, S]: durations and arrivals; hop is [n, 2, S - 1].
    """
    stages = tables.stage_class.shape[1]
    for s in range(stages):
        c = tables.stage_class[r, s]
        if not fit_stage(ids, n, cost, c, tables.room[r, s], min(ahead[s], n), mode[s]):
            return np.inf
        for k in range(n):
            scratch[k, 0, s] = cost[ids[k], c, mode[s, k], 0]
            scratch[k, 1, s] = cost[ids[k], c, mode[s, k], 1]
    for k in range(n):
        for way in range(2):
            for s in range(stages - 1):
                line = tables.hops[r, way, s]
                hop[k, way, s] = line[0] + line[1] * shape[ids[k], 3] + line[2] * shape[ids[k], 4]
    return run_ahead(n, ahead, scratch[:, 0], scratch[:, 1], hop, scratch[:, 2:])


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    from penstock.batching.example import small_costs
    from penstock.batching.split import best_splits

    best_splits(small_costs(), np.array([3, 5], dtype=np.int64), np.array([1, 2], dtype=np.int64))
