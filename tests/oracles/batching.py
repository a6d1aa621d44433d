"""Batch planning as slow plain Python: prices, splits, memory and time of a replica, each written as its definition reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.batching.costs import PipelineCosts
from penstock.models.shapes import Shape


def interpolate(axes: Sequence[Sequence[float]], values: np.ndarray, point: Sequence[float]) -> np.ndarray:
    """Multilinear, axis order (x, y, z) against values [y, z, x, …]; infinite if a corner that counts is."""
    corners = []
    for axis, x in zip(axes, point, strict=True):
        if len(axis) == 1:
            corners.append([(0, 1.0)])
            continue
        low = max([i for i in range(len(axis) - 1) if axis[i] <= x], default=0)
        w = (x - axis[low]) / (axis[low + 1] - axis[low])
        corners.append([(low, 1 - w), (low + 1, w)])
    total = np.zeros(values.shape[3:])
    for (i, u), (j, v), (k, w) in itertools.product(*corners):
        if u * v * w:
            with np.errstate(invalid="ignore"):  # infinite less infinite is infinite here
                total = total + u * v * w * values[j, k, i]
    return np.where(np.isfinite(total), total, np.inf)


def price(costs: PipelineCosts, lengths: Sequence[tuple[int, int]], layout: str = "padded") -> np.ndarray:
    """[C, M, 5] of samples with these positions."""
    grid = costs.layouts[layout]
    if layout == "padded":
        row, row_dec = (-(-max(pair[side] for pair in lengths) // costs.round_to) * costs.round_to for side in (0, 1))
        point = (len(lengths), row, row_dec)
    else:
        shape = Shape.packed(n for n, _ in lengths)
        tokens = shape.tokens if costs.few_shapes is None else costs.few_shapes.num_tokens(shape)
        point = (tokens, shape.squares / tokens, 0)
    raw = interpolate(grid.axes, grid.values, point)
    cost = np.concatenate([raw[..., :3], raw[..., 3:5].max(axis=-1, keepdims=True), raw[..., 5:]], axis=-1)
    return np.where(np.isfinite(cost).all(axis=-1, keepdims=True), cost, np.inf)


def charge(costs: PipelineCosts, cost: np.ndarray, count: int) -> float:
    """Slowest stage of the slowest replica, as many in flight as 1F1B holds; one sample may also be alone."""
    room = costs.limit_bytes - costs.state_bytes

    def slowest(others: bool) -> float:
        times = []
        for r, s in np.ndindex(costs.stage_class.shape):
            table = cost[costs.stage_class[r, s]]
            flight = (costs.num_stages - s - 1) if others else 0
            fitting = [f + b for f, b, kept, up, down in table if np.isfinite(f) and flight * kept + max(up, down) <= room[r, s]]
            times.append(min(fitting, default=np.inf))
        return max(0.0, *times)

    found = slowest(True)
    return slowest(False) if found == np.inf and count == 1 else found


def splits(count: int) -> Iterator[list[tuple[int, int]]]:
    """Every way to cut 0..count into consecutive pieces."""
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, count), k) for k in range(count)):
        ends = [0, *cuts, count]
        yield list(itertools.pairwise(ends))


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to put items into unordered groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for groups in partitions(rest):
        for at in range(len(groups)):
            yield [*groups[:at], [first, *groups[at]], *groups[at + 1 :]]
        yield [[first], *groups]


def warm_up_order(ahead: int, count: int) -> list[tuple[int, int]]:
    """(kind, micro-batch): `ahead` forwards, then backward and forward in turn."""
    ahead = min(ahead, count)
    order = [(0, m) for m in range(ahead)]
    for m in range(count):
        order += [(1, m), *([(0, m + ahead)] if m + ahead < count else [])]
    return order


def memory_peak(order: Sequence[tuple[int, int]], chosen: Sequence[Sequence[float]]) -> float:
    """Fullest moment of a stage; chosen[m] = (forward, backward, stored, peak, backward peak)."""
    used = peak = 0.0
    for kind, m in order:
        _, _, stored, up, down = chosen[m]
        if kind == 0:
            peak = max(peak, used + up)
            used += stored
        else:
            used -= stored
            peak = max(peak, used + down)
    return peak


def makespan(ahead: Sequence[int], forward: np.ndarray, backward: np.ndarray, hop: np.ndarray) -> float:
    """Devices run their lists; one sending channel per device, used in the order of results; forward [n, S], hop [n, 2, S - 1]."""
    count, stages = forward.shape
    lists = [warm_up_order(depth, count) for depth in ahead]
    position, free, channel = [0] * stages, [0.0] * stages, [0.0] * stages
    arrived = {(0, 0, m): 0.0 for m in range(count)} | {(1, stages - 1, m): 0.0 for m in range(count)}
    progress = True
    while progress:
        progress = False
        for s in range(stages):
            while position[s] < len(lists[s]) and (lists[s][position[s]][0], s, lists[s][position[s]][1]) in arrived:
                kind, m = lists[s][position[s]]
                end = max(free[s], arrived[kind, s, m]) + (backward if kind else forward)[m, s]
                free[s] = end
                position[s] += 1
                progress = True
                peer = s - 1 if kind else s + 1
                if 0 <= peer < stages:
                    channel[s] = max(channel[s], end) + hop[m, kind, min(s, peer)]
                    arrived[kind, peer, m] = channel[s]
    assert position == [len(order) for order in lists], "deadlock"
    return max(free)


def column_price(
    costs: PipelineCosts, lengths: Sequence[tuple[int, int]], time_price: Sequence[float], room_price: Sequence[float]
) -> float:
    """What a padded micro-batch costs at prices of seconds and of held room on each stage, on the replica and in the modes that suit it
    best: its peaks while it runs, and what it keeps while later stages run it both ways."""
    cost, best = price(costs, lengths), np.inf
    positions = [len(lengths) * -(-max(pair[side] for pair in lengths) // costs.round_to) * costs.round_to for side in (0, 1)]
    for r in range(costs.num_replicas):
        rooms = costs.limit_bytes[r] - costs.state_bytes[r]
        stages = []
        for s, room in enumerate(rooms):
            stages.append([one for one in cost[costs.stage_class[r, s]] if np.isfinite(one).all() and max(one[3], one[4]) <= room])
        if not all(stages):
            continue
        hops = [sum(hop @ [1.0, *positions] for hop in costs.hops[r, :, s]) for s in range(costs.num_stages - 1)]
        away = [sum(min(f + b for f, b, *_ in stages[t]) + hops[t - 1] for t in range(s + 1, len(stages))) for s in range(len(stages))]
        total = 0.0
        for s, modes in enumerate(stages):
            held = [(up * f + down * b + min(kept, up) * away[s]) / rooms[s] for f, b, kept, up, down in modes]
            total += min(time_price[s] * (f + b) + room_price[s] * h for (f, b, *_), h in zip(modes, held, strict=True))
        best = min(best, total)
    return best
