"""The compiled loops of the bound over FASOP's costs: two dynamic programmes over pipelines of stages in forms."""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.systems.fasop.forms import Steps
from penstock.systems.fasop.rules import Case

__all__ = ["ahead", "bound", "warm"]


@njit(cache=True, nogil=True)
def ahead(case, steps, first, longest, value, after):  # type: ignore[no-untyped-def]
    """Fills value [layers + 1, states]: least time and hops of the first i layers with at most so many units, stages up to `longest`.

    `after` is the same with what comes after the first stage's last backward.
    """
    num_layers, num_states = value.shape[0] - 1, value.shape[1]
    value[:] = np.inf
    after[:] = np.inf
    for j in range(1, num_layers + 1):
        for x in range(len(steps.option)):
            c = steps.option[x]
            for i in range(j - 1, -1, -1):
                time = case.times[c, j] - case.times[c, i]
                if time > longest or case.inside[j] > case.inside[i + 1]:
                    break
                time += 2 * steps.half[x] if i > 0 else steps.half[x]
                for u in range(num_states - steps.shift[x]):
                    if not steps.room[x, u]:
                        continue
                    v = u + steps.shift[x]
                    if i == 0:
                        value[j, v] = min(value[j, v], time)
                        after[j, v] = min(after[j, v], time + first[x, j])
                    else:
                        value[j, v] = min(value[j, v], time + value[i, u])
                        after[j, v] = min(after[j, v], time + after[i, u])


@njit(cache=True, nogil=True)
def _keep(totals, pairs, row, num, total, pair):  # type: ignore[no-untyped-def]
    """Adds a label to a row unless another is nowhere worse; where there is no room, the nearest takes the better of both.

    Returns the number of labels. Whole arrays and a row instead of views: counting references to views takes longer than the rest.
    """
    n = 0
    while n < num:
        if totals[row, n] <= total and pairs[row, n] <= pair:
            return num
        if total <= totals[row, n] and pair <= pairs[row, n]:
            num -= 1
            totals[row, n], pairs[row, n] = totals[row, num], pairs[row, num]
        else:
            n += 1
    if num < totals.shape[1]:
        totals[row, num], pairs[row, num] = total, pair
        return num + 1
    near = 0
    for n in range(1, num):
        if abs(pairs[row, n] - pair) < abs(pairs[row, near] - pair):
            near = n
    totals[row, near], pairs[row, near] = min(totals[row, near], total), min(pairs[row, near], pair)
    return num


@njit(cache=True, nogil=True)
def bound(case, steps, last, first, tied, theta, start_at, known, most_work, totals, pairs, count):  # type: ignore[no-untyped-def]
    """(Time no plan is below whose paths beside its sum take from `start_at` to `theta`, or `known` if that is less; work done.)

    The time is zero where that would be more than `most_work`.

    The sum is that of all stages and hops there and back, which micro-batch 0 goes through before its last backward. The step takes
    that, what comes after the first stage's last backward (`first` [B, layers + 1]), and the longest path between: with k stages behind
    it, a stage has m - 1 backwards and m - 1 - k forwards left. A way up to another stage and back is a turn: over w stages it serves
    w micro-batches. Turns may be taken around this stage alone, this and the one behind, or all behind.

    A label holds the sum of the layers i.. in k stages and the time of the first of these; labels belong to the form of that stage and
    a state, the number of GPUs used. `last` [B] says which stages may be the last, `tied` is the least time of the tied embedding.
    `totals`, `pairs` [2 * (layers + 1) * states * X, labels] and `count` are room to work in, with anything in it.
    """
    num_layers, m, num_states, num_forms = len(case.gradient_bits) - 1, case.num_micro_batches, steps.room.shape[1], len(steps.base)
    longest = min(known / m, 3 * theta / (2 * (m - 1)) if m > 1 else np.inf)
    front, front_after = np.empty((num_layers + 1, num_states)), np.empty((num_layers + 1, num_states))
    ahead(case, steps, first, longest, front, front_after)
    num_labels = totals.shape[1]
    near_totals, near_pairs = np.empty((num_forms, num_labels)), np.empty((num_forms, num_labels))
    near = np.zeros(num_forms, np.int64)
    way_totals, way_pairs = np.empty((len(last), num_labels)), np.empty((len(last), num_labels))
    ways = np.zeros(len(last), np.int64)
    some = np.zeros((2, num_layers + 1, num_states), np.bool_)
    some[0, num_layers, 0] = True
    answer, work = known, num_layers * num_states
    for k in range(num_layers):
        now, new = k % 2, (k + 1) % 2
        going, held = False, min(k + 1, m)
        after = (2 * (m - 1) + max(0, m - 1 - k)) / 3
        turns, before_turn, twos = (m - 1) // (k + 1), m - 2 - k, max(0, m - k) // 2 if k > 0 else 0
        after_turns, after_twos = m - 1 - turns * (k + 1), 2 * (m - 1 - 2 * twos) / 3
        for j in range(num_layers, 0, -1):
            for u in range(num_states):
                if not some[now, j, u]:
                    continue
                some[now, j, u] = False
                near[:] = 0
                if k == 0:
                    for x in range(len(last)):
                        if last[x]:
                            near[x] = 1
                            near_totals[x, 0] = near_pairs[x, 0] = 0.0
                else:
                    ways[:] = 0
                    here = ((now * (num_layers + 1) + j) * num_states + u) * num_forms
                    slack = known - start_at - front_after[j, num_states - 1 - u]
                    for y in range(num_forms):
                        x, row = steps.base[y], here + y
                        for n in range(count[row]):
                            total, pair, useful = totals[row, n], pairs[row, n], True
                            for o in range(count[here + x] if y != x else 0):  # a run of one stage leaves more room
                                useful = useful and (totals[here + x, o] > total or pairs[here + x, o] > pair)
                            if useful:
                                work += 1 + steps.begin[y + 1] - steps.begin[y]
                                ways[x] = _keep(way_totals, way_pairs, x, ways[x], total, pair)
                                for e in range(steps.begin[y], steps.begin[y + 1]):
                                    z, hop = steps.target[e], steps.hop[e]
                                    if total + hop - steps.half[steps.base[z]] < slack:
                                        near[z] = _keep(near_totals, near_pairs, z, near[z], total + hop, pair + hop)
                    for y in range(len(ways)):
                        for n in range(ways[y]):
                            work += len(ways)
                            for x in range(len(ways)):
                                total, pair = way_totals[y, n] + steps.far[y, x], way_pairs[y, n] + steps.far[y, x]
                                if total - steps.half[x] < slack:
                                    near[x] = _keep(near_totals, near_pairs, x, near[x], total, pair)
                for z in range(num_forms):
                    x = steps.base[z]
                    if near[z] == 0 or not steps.room[x, u]:
                        continue
                    c, state = steps.option[x], u + steps.shift[x]
                    left = num_states - 1 - state
                    reduce = 2 * (case.dp[c] - 1) / case.dp[c] / steps.ring[x]
                    for n in range(near[z]):
                        behind, pair = near_totals[z, n], near_pairs[z, n]
                        for i in range(j - 1, -1, -1):
                            work += 1
                            time = case.times[c, j] - case.times[c, i]
                            total = behind + time
                            tail = max(after * time, twos * (time + pair) + after_twos * time)
                            if turns > 0:
                                some_turns = max(before_turn * time, before_turn // 2 * (time + pair) + before_turn % 2 * time)
                                tail = max(tail, total + some_turns, turns * total + after_turns * time)
                            path = max(start_at, tail)
                            if tail > theta or total + path >= known or m * time >= known:
                                break
                            if case.fixed[c, j] - case.fixed[c, i] + held * (case.flight[c, j] - case.flight[c, i]) > case.capacity[c]:
                                break
                            if case.inside[j] > case.inside[i + 1]:
                                if k > 0 or j < num_layers:
                                    break
                                if i > 0:
                                    continue
                            if i == 0:
                                answer = min(answer, first[x, j] + max(total + path, m * time))
                                continue
                            if steps.half[x] + front_after[i, left] + max(total + path, m * time) >= known:
                                continue
                            gradients = reduce * (case.gradient_bits[j] - case.gradient_bits[i]) + tied
                            if front[i, left] / 3 + gradients + max(m * time, total + tail) < known:
                                row = ((new * (num_layers + 1) + i) * num_states + state) * num_forms
                                if not some[new, i, state]:
                                    some[new, i, state] = True
                                    count[row : row + num_forms] = 0
                                count[row + z] = _keep(totals, pairs, row + z, count[row + z], total, time)
                                going = True
        if not going:
            break
        if work > most_work:
            return 0.0, work
    return answer, work


def warm() -> None:
    """Compiles every kernel for the types it is called with, on two layers and two GPUs."""
    one, prefix = np.ones(1, np.int64), np.arange(3.0)
    case = Case(
        one - 1, one, one, prefix[None], prefix[None], prefix[None], np.array([9.0]), prefix, np.zeros(3, np.int64),
        np.ones((1, 1), np.bool_), np.array([2]), np.ones(1), np.ones(1), 1, 2, 1.0, 1.0, 2,
    )  # fmt: skip
    room = np.array([[True, True, False]])
    steps = Steps(one - 1, one, room, np.ones(1), np.ones(1), np.ones((1, 1)), one - 1, np.array([0, 1]), one - 1, np.ones(1))
    bound(case, steps, room[:, 0], np.ones((1, 3)), 0.0, 9.0, 0.0, 99.0, 99, np.ones((18, 2)), np.ones((18, 2)), np.zeros(18, np.int64))
