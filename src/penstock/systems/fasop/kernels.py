"""The compiled loops of the search over FASOP's costs: placement, 1F1B, moves of a plan, and a dynamic programme for rough ones.

A plan of D stages is five things: layers [D], option [D], spread [D], how many of the last stages share the nodes of the first one, and
how nodes are picked (the fullest or the emptiest that fit). A spread w deals a stage's replicas to w nodes, the same number to each,
neighbours together; -w deals them in turn; 0 fills node after node, however many replicas each takes. `Case` holds the costs.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.systems.fasop.rules import INTER_OVERHEAD, INTRA_OVERHEAD, Case, Counted, Sketches
from penstock.timing.special_clocks import run_alike

__all__ = ["climb", "deal", "improve", "judge", "messages", "narrowest", "sketch", "start", "warm"]

_PASSES = 6
"""Over all pairs of stages, when layers are moved."""


@njit(cache=True, nogil=True)
def deal(case, option, spread, tail, fullest, nodes):  # type: ignore[no-untyped-def]
    """Fills nodes [D, dp] with the node of each replica; False where the GPUs do not suffice.

    Stages in a row that spread over equally many nodes share them while there is room: each node then holds the same share of the
    samples, and what they send each other stays inside it. The last `tail` stages join the first one's nodes.
    """
    depth, free = len(option), case.node_size.copy()
    group = np.zeros(max(len(free), nodes.shape[1]), np.int64)
    last, owner = 0, -1
    for turn in range(depth):
        s = 0 if turn == 0 else depth - turn if turn <= tail else turn - tail
        c, wide = option[s], abs(spread[s])
        dp, tp = case.dp[c], case.tp[c]
        per = dp // wide if wide > 0 else 1
        joins = wide > 0 and spread[s] == last and case.pool[c] == owner
        if joins:
            for x in range(wide):
                if free[group[x]] < per * tp:
                    joins = False
        if not joins:
            if 0 < turn <= tail:
                return False
            last, owner = spread[s], case.pool[c]
            for x in range(wide if wide > 0 else dp):
                pick = group[x - 1] if wide == 0 and x > 0 and free[group[x - 1]] >= tp else -1
                for node in range(len(free) if pick < 0 else 0):
                    taken = not case.members[owner, node] or free[node] < per * tp
                    for y in range(x if wide > 0 else 0):
                        taken = taken or group[y] == node
                    if not taken and (pick < 0 or (free[node] < free[pick] if fullest else free[node] > free[pick])):
                        pick = node
                if pick < 0:
                    return False
                group[x] = pick
                if wide == 0:
                    free[pick] -= tp
        for x in range(wide):
            free[group[x]] -= per * tp
        for r in range(dp):
            nodes[s, r] = group[r if wide == 0 else r % wide if spread[s] < 0 else r // per]
    return True


@njit(cache=True, nogil=True)
def messages(case, option, nodes, hops, ring):  # type: ignore[no-untyped-def]
    """Fills the seconds of each hop and the bandwidth of each stage's ring; returns the seconds of the tied embedding."""
    depth = len(option)
    for s in range(depth):
        c = option[s]
        dp = case.dp[c]
        slowest = np.inf
        for r in range(dp):
            a, b = nodes[s, r], nodes[s, (r + 1) % dp]
            slowest = min(slowest, case.intra[a] if a == b else min(case.inter[a], case.inter[b]))
        ring[s] = slowest
        if s + 1 == depth:
            continue
        d = option[s + 1]
        mine, theirs = case.samples // dp, case.samples // case.dp[d]
        flows = max(dp, case.dp[d]) * max(case.tp[c], case.tp[d])
        worst, i, j = 0.0, 0, 0
        while i < dp and j < case.dp[d]:
            shared = min((i + 1) * mine, (j + 1) * theirs) - max(i * mine, j * theirs)
            a, b = nodes[s, i], nodes[s + 1, j]
            if a == b:
                took = shared * case.sample_bits / (case.intra[a] / INTRA_OVERHEAD)
            else:
                took = shared * case.sample_bits / (min(case.inter[a], case.inter[b]) / flows / INTER_OVERHEAD)
            worst = max(worst, took)
            if (i + 1) * mine <= (j + 1) * theirs:
                if (i + 1) * mine == (j + 1) * theirs:
                    j += 1
                i += 1
            else:
                j += 1
        hops[s] = worst
    if depth == 1 or case.tied_bits == 0.0:
        return 0.0
    c, d = option[0], option[depth - 1]
    dp = max(case.dp[c], case.dp[d])
    slowest = np.inf
    for r in range(dp):
        a, b = nodes[0, r * case.dp[c] // dp], nodes[depth - 1, r * case.dp[d] // dp]
        slowest = min(slowest, case.intra[a] if a == b else min(case.inter[a], case.inter[b]))
    return case.tied_bits / min(case.tp[c], case.tp[d]) * min(dp, case.per_node) / slowest


@njit(cache=True, nogil=True)
def judge(case, layers, option, hops, ring, tied, limit, compute, ends):  # type: ignore[no-untyped-def]
    """Seconds of a step, infinite for a plan that is not legal, does not fit or is surely not below `limit`."""
    depth, m = len(layers), case.num_micro_batches
    first, total = 0, 0.0
    for s in range(depth):
        c, last = option[s], first + layers[s]
        if depth > 1 and case.inside[last] > case.inside[first + 1]:
            return np.inf
        held = min(depth - s, m)
        if case.fixed[c, last] - case.fixed[c, first] + held * (case.flight[c, last] - case.flight[c, first]) > case.capacity[c]:
            return np.inf
        compute[s] = case.times[c, last] - case.times[c, first]
        total += compute[s]
        if s + 1 < depth:
            total += 2 * hops[s]
        first = last
    dp = case.dp[option[0]]
    after = tied + 2 * (dp - 1) / dp * case.gradient_bits[layers[0]] / ring[0]
    before = after
    for s in range(depth):
        k = depth - 1 - s
        if before + m * compute[s] >= limit or after + total + (2 * (m - 1) + max(0, m - 1 - k)) * compute[s] / 3 >= limit:
            return np.inf
        before += compute[s] + 2 * hops[s] if s + 1 < depth else 0.0
    run_alike(compute, hops, m, ends)
    first, step = 0, 0.0
    for s in range(depth):
        dp = case.dp[option[s]]
        bits = case.gradient_bits[first + layers[s]] - case.gradient_bits[first]
        step = max(step, ends[s] + 2 * (dp - 1) / dp * bits / ring[s])
        first += layers[s]
    return step + tied


@njit(cache=True, nogil=True)
def spread_evenly(case, option, hops, layers):  # type: ignore[no-untyped-def]
    """Fills `layers` so that no stage stands out: least sum of eighth powers of each stage's time with its hops. False if none fits.

    The fewer micro-batches there are, the more the plain sum counts beside that.
    """
    depth, num_layers, m = len(option), len(case.gradient_bits) - 1, case.num_micro_batches
    value = np.full((depth + 1, num_layers + 1), np.inf)
    cut = np.zeros((depth, num_layers + 1), np.int64)
    value[depth, num_layers] = 0.0
    fair = 0.0
    for s in range(depth):
        fair += case.times[option[s], num_layers] / depth / depth
    for s in range(depth - 1, -1, -1):
        c, k = option[s], depth - 1 - s
        extra = (hops[s] if k > 0 else 0.0) + (hops[s - 1] if s > 0 else 0.0)
        weight = (2 * (m - 1) + max(0, m - 1 - k) + 3) / (3 * m) / fair
        held = min(depth - s, m)
        for j in range(s + 1, num_layers - k + 1):
            rest = value[s + 1, j]
            if rest == np.inf:
                continue
            for i in range(j - 1, s - 1, -1):
                if depth > 1 and case.inside[j] > case.inside[i + 1]:
                    break
                if case.fixed[c, j] - case.fixed[c, i] + held * (case.flight[c, j] - case.flight[c, i]) > case.capacity[c]:
                    break
                x = (case.times[c, j] - case.times[c, i] + extra) * weight
                plain = 4 * x / m
                x *= x
                x *= x
                x = x * x + plain + rest
                if x < value[s, i]:
                    value[s, i] = x
                    cut[s, i] = j
                if i < j - 1 and x > 1e6:
                    break
    if value[0, 0] == np.inf:
        return False
    first = 0
    for s in range(depth):
        layers[s] = cut[s, first] - first
        first = cut[s, first]
    return True


@njit(cache=True, nogil=True)
def climb(case, layers, option, hops, ring, tied, best):  # type: ignore[no-untyped-def]
    """Moves layers from any stage to any other while that helps, in short pipelines several at once; the stages between shift."""
    depth = len(layers)
    most = 8 if depth <= 4 else 1
    compute, ends = np.zeros(depth), np.zeros(depth)
    for _ in range(_PASSES):
        found = False
        for s in range(depth):
            for t in range(depth):
                for count in range(1, most + 1):
                    if s == t or layers[s] <= count:
                        break
                    layers[s] -= count
                    layers[t] += count
                    time = judge(case, layers, option, hops, ring, tied, best, compute, ends)
                    if time < best * (1 - 1e-12):
                        best, found = time, True
                    else:
                        layers[s] += count
                        layers[t] -= count
        if not found:
            break
    return best


@njit(cache=True, nogil=True)
def start(case, layers, option, spread, tail, fullest, best, nearly):  # type: ignore[no-untyped-def]
    """Seconds of a plan, its layers filled in if the first stage has none; polished if within a factor `nearly` of `best`."""
    depth, width = len(option), 1
    for s in range(depth):
        width = max(width, case.dp[option[s]])
    nodes = np.zeros((depth, width), np.int64)
    if not deal(case, option, spread, tail, fullest, nodes):
        return np.inf
    hops, ring = np.zeros(depth), np.zeros(depth)
    tied = messages(case, option, nodes, hops, ring)
    if layers[0] == 0 and not spread_evenly(case, option, hops, layers):
        return np.inf
    compute, ends = np.zeros(depth), np.zeros(depth)
    time = judge(case, layers, option, hops, ring, tied, best * nearly, compute, ends)
    return climb(case, layers, option, hops, ring, tied, time) if time < best * nearly else time


@njit(cache=True, nogil=True)
def narrowest(case, c):  # type: ignore[no-untyped-def]
    """The fewest nodes that hold a stage of this option with the same share on each; 0 if the shares must differ."""
    for wide in range(1, case.dp[c] + 1):
        if case.dp[c] % wide == 0:
            roomy = 0
            for node in range(len(case.node_size)):
                if case.members[case.pool[c], node] and case.node_size[node] >= case.dp[c] // wide * case.tp[c]:
                    roomy += 1
            if roomy >= wide:
                return wide
    return 0


@njit(cache=True, nogil=True)
def _attempt(case, now, new, shape, trial, best):  # type: ignore[no-untyped-def]
    """Takes the trial plan `new` over into `now` if it is better; returns the better time.

    `shape` is (depth, tail, fullest, work left): work is counted in steps, not in seconds, so that answers are the same everywhere.
    """
    depth = trial[0]
    if shape[3] <= 0:
        return best
    shape[3] -= depth * (depth + len(case.gradient_bits) + case.num_micro_batches)
    nearly = 1.01 + 0.24 / depth
    time = start(case, new[0, :depth], new[1, :depth], new[2, :depth], min(trial[1], depth - 1), trial[2] > 0, best, nearly)
    if time < best * (1 - 1e-9):
        now[:, :depth] = new[:, :depth]
        shape[:3] = trial[:3]
        shape[1] = min(trial[1], depth - 1)
        return time
    return best


@njit(cache=True, nogil=True)
def _spreads(case, now, shape, best, new, trial, narrow):  # type: ignore[no-untyped-def]
    """Tries every run of stages over more or fewer nodes, more or fewer last stages beside the first, and the other way to pick nodes."""
    depth, backs = shape[0], False  # dealing in turn, a ring never stays inside a node: of use where the network is the faster one
    for node in range(len(case.intra)):
        backs = backs or case.inter[node] > case.intra[node]
    for first in range(depth):
        for last in range(depth, first, -1):
            for wide in (1, 2, 3, 4, 8, 16, -2, -4, -8, 0):
                if wide <= 0 and last - first > 1 and not backs:
                    continue
                new[:] = now
                trial[:] = shape
                changed = False
                for s in range(first, last):
                    c = now[1, s]
                    even = wide == 0 or (case.dp[c] % wide == 0 and abs(wide) >= narrow[c] > 0)
                    if even and now[2, s] != wide and case.dp[c] > 1:
                        new[2, s] = wide
                        changed = True
                if changed:
                    best = _attempt(case, now, new, shape, trial, best)
    for tail in range(min(depth, 5)):
        for fullest in range(2):
            if tail != shape[1] or fullest != shape[2]:
                new[:] = now
                trial[0], trial[1], trial[2] = depth, tail, fullest
                new[0, 0] = 0
                best = _attempt(case, now, new, shape, trial, best)
    return best


@njit(cache=True, nogil=True)
def _swaps(case, now, shape, best, new, trial, narrow):  # type: ignore[no-untyped-def]
    """Tries to exchange what two stages run on, and to run a stage on something else."""
    depth = shape[0]
    for s in range(depth):
        for t in range(s + 1, depth):
            if now[1, s] != now[1, t]:
                new[:] = now
                trial[:] = shape
                for row in range(1, 3):
                    new[row, s], new[row, t] = now[row, t], now[row, s]
                new[0, 0] = 0
                best = _attempt(case, now, new, shape, trial, best)
    for s in range(depth):
        for c in range(len(narrow)):
            if now[1, s] != c:
                new[:] = now
                trial[:] = shape
                new[1, s], new[2, s] = c, narrow[c]
                new[0, 0] = 0
                best = _attempt(case, now, new, shape, trial, best)
    return best


@njit(cache=True, nogil=True)
def _pairs(case, now, shape, best, new, trial, narrow):  # type: ignore[no-untyped-def]
    """Tries to give two stages other options that together take as many GPUs of the same pools as before."""
    depth = shape[0]
    for s in range(depth):
        for t in range(depth):
            if s == t:
                continue
            for c in range(len(narrow)):
                for d in range(len(narrow)):
                    a, b = now[1, s], now[1, t]
                    if c == a or d == b or (c == b and d == a) or (c > d and abs(s - t) > 1):
                        continue
                    if case.pool[c] != case.pool[a] or case.pool[d] != case.pool[b]:
                        continue
                    had, has = case.tp[a] * case.dp[a] + case.tp[b] * case.dp[b], case.tp[c] * case.dp[c] + case.tp[d] * case.dp[d]
                    if has != had:
                        continue
                    new[:] = now
                    trial[:] = shape
                    new[1, s], new[2, s], new[1, t], new[2, t] = c, narrow[c], d, narrow[d]
                    new[0, 0] = 0
                    best = _attempt(case, now, new, shape, trial, best)
    return best


@njit(cache=True, nogil=True)
def _depths(case, now, shape, best, new, trial, narrow):  # type: ignore[no-untyped-def]
    """Tries to merge neighbours, to split a stage in two and to move a stage elsewhere."""
    num_layers = len(case.gradient_bits) - 1
    s = 0
    while s < shape[0]:
        depth = shape[0]
        for c in range(len(narrow)):
            if s + 1 >= shape[0]:
                break
            depth = shape[0]
            new[:, :s] = now[:, :s]
            new[:, s : depth - 1] = now[:, s + 1 : depth]
            new[1, s], new[2, s] = c, narrow[c]
            trial[:] = shape
            trial[0] = depth - 1
            new[0, 0] = 0
            best = _attempt(case, now, new, shape, trial, best)
        for t in range(shape[0]):
            if t == s or s >= shape[0]:
                continue
            new[:] = now
            trial[:] = shape
            step = 1 if t > s else -1
            for x in range(s, t, step):
                new[1, x], new[2, x] = now[1, x + step], now[2, x + step]
            new[1, t], new[2, t] = now[1, s], now[2, s]
            new[0, 0] = 0
            best = _attempt(case, now, new, shape, trial, best)
        for c in range(len(narrow)):
            for d in range(len(narrow)):
                depth = shape[0]
                if s >= depth or depth >= num_layers or depth >= now.shape[1]:
                    break
                new[:, : s + 1] = now[:, : s + 1]
                new[:, s + 1 : depth + 1] = now[:, s:depth]
                new[1, s], new[2, s], new[1, s + 1], new[2, s + 1] = c, narrow[c], d, narrow[d]
                trial[:] = shape
                trial[0] = depth + 1
                new[0, 0] = 0
                best = _attempt(case, now, new, shape, trial, best)
        s += 1
    return best


@njit(cache=True, nogil=True)
def _ends(case, now, shape, best, new, trial, narrow):  # type: ignore[no-untyped-def]
    """Tries other options for the first and the last stage together, in place of the old ones or beside them."""
    num_layers = len(case.gradient_bits) - 1
    for c in range(len(narrow)):
        for d in range(len(narrow)):
            for way in range(4):
                depth, front, back = shape[0], way % 2, way // 2
                deeper = depth + front + back
                if deeper > num_layers or deeper > now.shape[1] or deeper < 2:
                    continue
                for tail in range(2):
                    if shape[0] != depth:
                        break
                    new[:, front : front + depth] = now[:, :depth]
                    new[1, 0], new[2, 0], new[1, deeper - 1], new[2, deeper - 1] = c, narrow[c], d, narrow[d]
                    trial[0], trial[1], trial[2] = deeper, tail, shape[2]
                    new[0, 0] = 0
                    best = _attempt(case, now, new, shape, trial, best)
    return best


@njit(cache=True, nogil=True)
def improve(case, now, shape, best, rounds, deep):  # type: ignore[no-untyped-def]
    """Changes the plan now [3, most stages] (layers, option, spread) and its shape in place while some move helps; returns its seconds."""
    new, trial = now.copy(), shape.copy()
    narrow = np.array([narrowest(case, c) for c in range(len(case.tp))])
    for _ in range(rounds):
        before = best
        best = _spreads(case, now, shape, best, new, trial, narrow)
        best = _swaps(case, now, shape, best, new, trial, narrow)
        best = _ends(case, now, shape, best, new, trial, narrow)
        best = _depths(case, now, shape, best, new, trial, narrow)
        if deep:
            best = _pairs(case, now, shape, best, new, trial, narrow)
        if best >= before * (1 - 1e-9):
            break
    return best


@njit(cache=True, nogil=True)
def _least_work(case, kind, units, num_kinds):  # type: ignore[no-untyped-def]
    """(weight of a unit of each kind by its speed, least weighed time of the first i layers), which the GPUs left must cover."""
    num_layers = len(case.gradient_bits) - 1
    own, need = np.zeros((num_kinds, num_layers)), np.zeros(num_layers + 1)
    for k in range(num_kinds):
        for i in range(num_layers):
            own[k, i] = np.inf
            for c in range(len(kind)):
                if kind[c] == k:
                    own[k, i] = min(own[k, i], units[c] * (case.times[c, i + 1] - case.times[c, i]))
    weight = np.zeros(num_kinds)
    for k in range(num_kinds):
        total = own[k].sum()
        weight[k] = 1 / total if 0 < total < np.inf else 0.0
    for i in range(num_layers):
        least = np.inf
        for k in range(num_kinds):
            if weight[k] > 0:
                least = min(least, weight[k] * own[k, i])
        need[i + 1] = need[i] + least
    return weight, need


@njit(cache=True, nogil=True)
def sketch(case, counted, tau, found):  # type: ignore[no-untyped-def]
    """Fills `found` with rough plans: the least sum of times and hops of layers i.. with GPUs of each kind used.

    No stage takes more than `tau` with its hop there and back. GPUs of a kind fill node after node; whether a hop stays inside a node
    follows from how many are used.
    """
    kind, units, limit, node = counted.kind, counted.units, counted.limit, counted.node
    intra_s, inter_s, tied_s, ring = counted.intra_s, counted.inter_s, counted.tied_s, counted.ring
    value, depth, back = found.value, found.depth, found.back
    num_kinds, num_layers, num_states = len(limit), len(case.gradient_bits) - 1, value.shape[2]
    weight, need = _least_work(case, kind, units, num_kinds)
    stride = np.ones(num_kinds, np.int64)
    for k in range(1, num_kinds):
        stride[k] = stride[k - 1] * (limit[k - 1] + 1)
    left, used = np.zeros(num_states), np.zeros((num_states, num_kinds), np.int64)
    for u in range(num_states):
        for k in range(num_kinds):
            used[u, k] = u // stride[k] % (limit[k] + 1)
            left[u] += weight[k] * (limit[k] - used[u, k]) * tau * (1 + 1e-9)
    value[:] = np.inf
    value[num_kinds, num_layers, 0] = 0.0
    depth[num_kinds, num_layers, 0] = 0
    for j in range(num_layers, 0, -1):
        for behind in range(num_kinds + 1):
            for u in range(num_states):
                rest = value[behind, j, u]
                if rest == np.inf or need[j] > left[u]:
                    continue
                held = min(depth[behind, j, u] + 1, case.num_micro_batches)
                for c in range(len(kind)):
                    k = kind[c]
                    if k < 0 or used[u, k] + units[c] > limit[k]:
                        continue
                    hop = 0.0
                    if j < num_layers:
                        at = used[u, k] % node[k]
                        hop = 2 * (intra_s[c] if behind == k and at != 0 and at + units[c] <= node[k] else inter_s[c])
                    state = u + units[c] * stride[k]
                    reduce = 2 * (case.dp[c] - 1) / case.dp[c] / ring[c]
                    for i in range(j - 1, -1, -1):
                        time = case.times[c, j] - case.times[c, i] + hop
                        if time > tau or case.inside[j] > case.inside[i + 1]:
                            break
                        if case.fixed[c, j] - case.fixed[c, i] + held * (case.flight[c, j] - case.flight[c, i]) > case.capacity[c]:
                            break
                        if need[i] > left[state]:
                            continue
                        if i == 0:
                            time += tied_s[c] + reduce * case.gradient_bits[j]
                        if j == num_layers:
                            time += tied_s[c]
                        if rest + time < value[k, i, state]:
                            value[k, i, state] = rest + time
                            depth[k, i, state] = depth[behind, j, u] + 1
                            back[k, i, state] = ((behind * num_states + u) * (num_layers + 1) + j) * len(kind) + c


def warm() -> None:
    """Compiles every kernel for the types it is called with, on two layers and two GPUs."""
    one = np.ones(1, np.int64)
    prefix = np.arange(3.0)
    case = Case(
        one - 1, one, one, prefix[None], prefix[None], prefix[None], np.array([9.0]), prefix, np.zeros(3, np.int64),
        np.ones((1, 1), np.bool_), np.array([2]), np.ones(1), np.ones(1), 1, 2, 1.0, 1.0, 2,
    )  # fmt: skip
    plan = np.ones((3, 2), np.int64)
    plan[1] = 0
    narrowest(case, plan[1, 0])
    start(case, plan[0], plan[1], plan[2], 0, False, np.inf, 1.0)
    improve(case, plan, np.array([2, 0, 0, 1000]), np.inf, 1, True)
    deal(case, plan[1], plan[2], 0, False, np.zeros((2, 1), np.int64))
    two, ones = np.array([2]), np.ones(1)
    sketch(case, Counted(one - 1, one, two, two, ones, ones, ones, ones), 9.0, Sketches.empty(1, 2, 3))
