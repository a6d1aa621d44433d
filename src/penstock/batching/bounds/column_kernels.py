"""The compiled loops of the bound by columns: what the dearest samples of each rectangle of lengths would pay above its price."""

from __future__ import annotations

import numpy as np

from penstock.batching.kernels import _along, _cell, _derive, _entry, _inner

__all__ = ["column_loads", "price_columns", "warm"]


@_inner
def _load(tables, cost, tokens, tokens_dec, time_price, room_price, loads):  # type: ignore[no-untyped-def]
    """Least price of a micro-batch over kinds of replicas and modes; `loads` [2, S] gets its stages' seconds, and room · seconds held as a
    share of the room, in the modes that make it so cheap."""
    stages, modes = tables.stage_class.shape[1], tables.sizes[1]
    mine = np.empty((2, stages))
    least = np.inf
    for r in tables.kinds:
        total, away = 0.0, 0.0  # away: from the end of the forward to the start of the backward pass
        for back in range(stages):
            s = stages - 1 - back
            c, room = tables.stage_class[r, s], tables.room[r, s]
            if back > 0:
                for way in range(2):
                    hop = tables.hops[r, way, s]
                    away += hop[0] + tokens * hop[1] + tokens_dec * hop[2]
            best, quickest = np.inf, np.inf
            for m in range(modes):
                own = cost[c, m]
                if not (own[3] <= room and own[4] <= room):
                    continue
                time = own[0] + own[1]
                held = (own[3] * own[0] + own[4] * own[1] + min(own[2], own[3]) * away) / room
                quickest = min(quickest, time)
                price = time_price[s] * time + room_price[s] * held
                if price < best:
                    best = price
                    mine[0, s], mine[1, s] = time, held
            total += best
            away += quickest
        if total < least:
            least = total
            loads[:] = mine
    return least


@_entry
def price_columns(tables, enc, dec, worth, lines, lines_dec, time_price, room_price, least, ratio, count):  # type: ignore[no-untyped-def]
    """Of each rectangle of lengths, the number of its first samples that are worth most of their price, and what part of it that is; where
    it is below `least`, or below what another rectangle of the same `lines` has, this may be left out.

    Samples come by falling worth. Rectangle i holds lengths up to lines[1, i] and pays for rows of lines[0, i], the shortest on its line.
    """
    raw, other = np.empty(tables.values0.shape[3]), np.empty(tables.values0.shape[3])
    cost = np.empty((tables.sizes[0], tables.sizes[1], 5))
    x, knots = tables.x0, len(tables.x0)
    line, known = np.empty((knots, len(raw))), np.zeros(knots, np.bool_)
    loads = np.empty((2, tables.stage_class.shape[1]))
    sums, narrow, narrow_worth = np.empty(len(enc) + 1), np.empty_like(dec), np.empty_like(worth)
    sums[0] = 0.0
    for i in range(lines.shape[1]):
        inside, first_dec = 0, np.inf
        for p in range(len(enc)):
            if enc[p] <= lines[1, i]:
                narrow[inside], narrow_worth[inside] = dec[p], worth[p]
                inside += 1
                if enc[p] >= lines[0, i]:
                    first_dec = min(first_dec, dec[p])
        best_of_line = least
        for j in range(lines_dec.shape[1]):
            ratio[i, j], count[i, j] = 0.0, 0
            if lines_dec[1, j] < first_dec:
                continue  # what it holds is in a smaller rectangle
            row, row_dec = float(lines[0, i]), float(lines_dec[0, j])
            n = min(inside, tables.sizes[5], int(tables.sizes[6] / (row + row_dec)))
            in_y, in_z = _cell(tables.y0, row), _cell(tables.z0, row_dec)
            known[:] = False
            k, rows, step, at, have = 0, 1, 1, 0, 0
            while rows <= n:
                while k < knots - 2 and x[k + 1] <= rows:
                    k += 1
                end = min(n, rows + step, int(x[k + 1])) if k < knots - 2 else min(n, rows + step)
                _along(tables.values0, x, in_y, in_z, float(rows), line, known, raw)
                if end > rows:  # between two knots a quantity is nowhere below the lower of two ends
                    _along(tables.values0, x, in_y, in_z, float(end), line, known, other)
                    for q in range(len(raw)):
                        raw[q] = min(raw[q], other[q])
                _derive(raw, tables.sizes[1], cost)
                price = _load(tables, cost, rows * row, rows * row_dec, time_price, room_price, loads)
                if price < np.inf:  # only then it matters who comes next
                    while have < end and at < inside:
                        if narrow[at] <= lines_dec[1, j]:
                            have += 1
                            sums[have] = sums[have - 1] + narrow_worth[at]
                        at += 1
                    if have < end:
                        n = have
                        continue
                if price == np.inf or sums[end] <= best_of_line * price:
                    rows, step = end + 1, 2 * step + 1
                elif end > rows:
                    step //= 2
                else:
                    best_of_line = ratio[i, j] = sums[rows] / price
                    count[i, j] = rows
                    rows += 1


@_entry
def column_loads(tables, rows, row, row_dec, time_price, room_price, loads):  # type: ignore[no-untyped-def]
    """`_load` of micro-batches of this many rows of these lengths."""
    raw = np.empty(tables.values0.shape[3])
    cost = np.empty((tables.sizes[0], tables.sizes[1], 5))
    knots = len(tables.x0)
    line, known = np.empty((knots, len(raw))), np.zeros(knots, np.bool_)
    for i in range(len(rows)):
        known[:] = False
        in_y, in_z = _cell(tables.y0, float(row[i])), _cell(tables.z0, float(row_dec[i]))
        _along(tables.values0, tables.x0, in_y, in_z, float(rows[i]), line, known, raw)
        _derive(raw, tables.sizes[1], cost)
        _load(tables, cost, rows[i] * row[i], rows[i] * row_dec[i], time_price, room_price, loads[i])


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    from penstock.batching.bounds.lower_bound import lower_bound_s
    from penstock.batching.example import small_costs

    lower_bound_s(small_costs(), np.array([3, 5], dtype=np.int64), np.array([1, 2], dtype=np.int64), exact=True)
