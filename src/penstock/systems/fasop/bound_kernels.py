"""The compiled loops of the bound over FASOP's costs: two dynamic programmes over pipelines of stages in forms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.kernels import borrowing
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


class _Labels(NamedTuple):
    """Rows of ways to go on, as many as `num` says; none is at least as good as another in both."""

    totals: Floats
    """[rows, labels] the sum of all stages and hops."""
    pairs: Floats
    """[rows, labels] the time of the stage that begins there, with the hop to the one before it where that is known."""
    num: NDArray[np.int64]
    """[rows]"""


class _Box(NamedTuple):
    """The plans that are bounded, see `bound`."""

    last: NDArray[np.bool_]
    first: Floats
    tied: float
    theta: float
    start_at: float
    known: float


class _Workspace(NamedTuple):
    """What `bound` works in."""

    kept: _Labels
    """By (turn of two, layer, state, form) where pipelines begin, without the layers before."""
    near: _Labels
    """By form: behind a stage of the form."""
    ways: _Labels
    """By base: runs of one stage and of several are alike to stages on other nodes."""
    some: NDArray[np.bool_]
    """[2, layers + 1, states] whether there are any in `kept`."""
    front: Floats
    front_after: Floats
    """[layers + 1, states] of `ahead`."""


class _Turns(NamedTuple):
    """Of a stage with so many behind it: what is left after micro-batch 0, in times of these stages."""

    held: int
    """Micro-batches whose activations it holds."""
    alone: float
    """Times that it works itself."""
    twos: int
    after_twos: float
    """Turns around it and the stage behind it, and times that it works afterwards."""
    turns: int
    after_turns: int
    """Turns around all stages behind it, and times that it works afterwards."""
    before_turn: int
    """Times that it works before the last turn."""


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
    near = _Labels(np.empty((num_forms, num_labels)), np.empty((num_forms, num_labels)), np.zeros(num_forms, np.int64))
    ways = _Labels(np.empty((len(last), num_labels)), np.empty((len(last), num_labels)), np.zeros(len(last), np.int64))
    some = np.zeros((2, num_layers + 1, num_states), np.bool_)
    space = _Workspace(_Labels(totals, pairs, count), near, ways, some, front, front_after)
    return _bound(case, steps, _Box(last, first, tied, theta, start_at, known), space, most_work)


@borrowing
def _bound(case, steps, box, space, most_work):  # type: ignore[no-untyped-def]
    """`bound`, with room to work in: stages are put before those of the last round, which have one less behind them."""
    _, num_layers, num_states = space.some.shape
    num_layers -= 1
    space.some[0, num_layers, 0] = True
    answer, work = box.known, num_layers * num_states
    for k in range(num_layers):
        turns, going = _turns(k, case.num_micro_batches), False
        for j in range(num_layers, 0, -1):
            for u in range(num_states):
                if not space.some[k % 2, j, u]:
                    continue
                space.some[k % 2, j, u] = False
                work += _gather_near(k, j, u, steps, box, space)
                for z in range(len(steps.base)):
                    if space.near.num[z] > 0 and steps.room[steps.base[z], u]:
                        least, more, kept = _put_before(k, j, u, z, case, steps, box, turns, space)
                        answer, work, going = min(answer, least), work + more, going or kept
        if not going:
            break
        if work > most_work:
            return 0.0, work
    return answer, work


@borrowing
def _turns(k, m):  # type: ignore[no-untyped-def]
    """Of a stage with k stages behind it, of m micro-batches."""
    turns, twos = (m - 1) // (k + 1), max(0, m - k) // 2 if k > 0 else 0
    alone, after_twos = (2 * (m - 1) + max(0, m - 1 - k)) / 3, 2 * (m - 1 - 2 * twos) / 3
    return _Turns(min(k + 1, m), alone, twos, after_twos, turns, m - 1 - turns * (k + 1), m - 2 - k)


@borrowing
def _path_s(time, pair, total, turns):  # type: ignore[no-untyped-def]
    """The longest path beside the sum through a stage: around it alone, around it and the stage behind, or around all behind."""
    path = max(turns.alone * time, turns.twos * (time + pair) + turns.after_twos * time)
    if turns.turns > 0:
        before = max(turns.before_turn * time, turns.before_turn // 2 * (time + pair) + turns.before_turn % 2 * time)
        path = max(path, total + before, turns.turns * total + turns.after_turns * time)
    return path


@borrowing
def _gather_near(k, j, u, steps, box, space):  # type: ignore[no-untyped-def]
    """Fills `near` with what may be behind a stage that ends before layer j, all behind having taken state u; returns the work."""
    near, ways = space.near, space.ways
    near.num[:] = 0
    if k == 0:
        for x in range(len(box.last)):
            if box.last[x]:
                near.num[x], near.totals[x, 0], near.pairs[x, 0] = 1, 0.0, 0.0
        return 0
    ways.num[:] = 0
    here = _row(k % 2, j, u, steps, space)
    slack = box.known - box.start_at - space.front_after[j, space.some.shape[2] - 1 - u]
    work = 0
    for y in range(len(steps.base)):
        for n in range(space.kept.num[here + y]):
            total, pair = space.kept.totals[here + y, n], space.kept.pairs[here + y, n]
            if _is_useful(y, total, pair, here, steps, space.kept):
                work += 1 + steps.begin[y + 1] - steps.begin[y]
                _keep(ways, steps.base[y], total, pair)
                for e in range(steps.begin[y], steps.begin[y + 1]):
                    z, hop = steps.target[e], steps.hop[e]
                    if total + hop - steps.half[steps.base[z]] < slack:
                        _keep(near, z, total + hop, pair + hop)
    for y in range(len(ways.num)):
        for n in range(ways.num[y]):
            work += len(ways.num)
            for x in range(len(ways.num)):
                total, pair = ways.totals[y, n] + steps.far[y, x], ways.pairs[y, n] + steps.far[y, x]
                if total - steps.half[x] < slack:
                    _keep(near, x, total, pair)
    return work


@borrowing
def _row(side, layer, state, steps, space):  # type: ignore[no-untyped-def]
    """Where the rows of `kept` begin that hold the forms at a layer and state."""
    _, layers, states = space.some.shape
    return ((side * layers + layer) * states + state) * len(steps.base)


@borrowing
def _is_useful(y, total, pair, here, steps, kept):  # type: ignore[no-untyped-def]
    """Whether a run of several stages beats all runs of one, which leave more room."""
    x = steps.base[y]
    useful = True
    for o in range(kept.num[here + x] if y != x else 0):
        useful = useful and (kept.totals[here + x, o] > total or kept.pairs[here + x, o] > pair)
    return useful


@borrowing
def _put_before(k, j, u, z, case, steps, box, turns, space):  # type: ignore[no-untyped-def]
    """Puts stages of a form, of the layers up to j, before what `near` has for it; returns the least time of a plan that one of them
    begins, the work, and whether any label was kept."""
    num_layers, m, x = len(case.gradient_bits) - 1, case.num_micro_batches, steps.base[z]
    c, state = steps.option[x], u + steps.shift[x]
    left, reduce = space.some.shape[2] - 1 - state, 2 * (case.dp[c] - 1) / case.dp[c] / steps.ring[x]
    least, work, going = box.known, 0, False
    for n in range(space.near.num[z]):
        behind, pair = space.near.totals[z, n], space.near.pairs[z, n]
        for i in range(j - 1, -1, -1):
            work += 1
            time = case.times[c, j] - case.times[c, i]
            total = behind + time
            path = _path_s(time, pair, total, turns)
            longest = max(box.start_at, path)
            if path > box.theta or total + longest >= box.known or m * time >= box.known:
                break
            if case.fixed[c, j] - case.fixed[c, i] + turns.held * (case.flight[c, j] - case.flight[c, i]) > case.capacity[c]:
                break
            if case.inside[j] > case.inside[i + 1]:
                if k > 0 or j < num_layers:
                    break
                if i > 0:
                    continue
            step = max(total + longest, m * time)
            if i == 0:
                least = min(least, box.first[x, j] + step)
                continue
            if steps.half[x] + space.front_after[i, left] + step >= box.known:
                continue
            gradients = reduce * (case.gradient_bits[j] - case.gradient_bits[i]) + box.tied
            if space.front[i, left] / 3 + gradients + max(m * time, total + path) < box.known:
                row = _row((k + 1) % 2, i, state, steps, space)
                if not space.some[(k + 1) % 2, i, state]:
                    space.some[(k + 1) % 2, i, state] = True
                    space.kept.num[row : row + len(steps.base)] = 0
                _keep(space.kept, row + z, total, time)
                going = True
    return least, work, going


@borrowing
def _keep(labels, row, total, pair):  # type: ignore[no-untyped-def]
    """Adds a label to a row unless another is nowhere worse; where there is no room, the nearest takes the better of both."""
    totals, pairs, num, n = labels.totals, labels.pairs, labels.num[row], 0
    while n < num:
        if totals[row, n] <= total and pairs[row, n] <= pair:
            labels.num[row] = num
            return
        if total <= totals[row, n] and pair <= pairs[row, n]:
            num -= 1
            totals[row, n], pairs[row, n] = totals[row, num], pairs[row, num]
        else:
            n += 1
    if num < totals.shape[1]:
        totals[row, num], pairs[row, num] = total, pair
        labels.num[row] = num + 1
        return
    near = 0
    for n in range(1, num):
        if abs(pairs[row, n] - pair) < abs(pairs[row, near] - pair):
            near = n
    totals[row, near], pairs[row, near] = min(totals[row, near], total), min(pairs[row, near], pair)
    labels.num[row] = num


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
