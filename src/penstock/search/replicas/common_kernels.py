"""The compiled loop that cuts a chain once for replicas of several classes, each with its own times.

A class of replicas has a slowest stage and a sum of stages, and the stage with the most weights is the last to reduce gradients; one set
of cuts gives all of these. No single number says which of two sets is better before they are complete, so all that could be are kept:
labels of (slowest, sum) of each class and what follows the last micro-batch.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from penstock.search.partition.stage_space import StageTable
from penstock.search.replicas.common_cuts import ClassArrays, CutLabels

__all__ = ["common_cuts", "warm"]


@njit(cache=True, nogil=True)
def _least_time(most, total, copies, count):  # type: ignore[no-untyped-def]
    """The time in which classes of replicas with these slowest stages and sums could run `count` micro-batches, if those could be divided.

    No shares of whole micro-batches, at least one each, are faster; nor are larger slowest stages or sums.
    """
    rate, ahead, longest = 0.0, 0.0, 0.0
    for c in range(len(copies)):
        rate += copies[c] / most[c]
        ahead += copies[c] * (1.0 - total[c] / most[c])
        longest = max(longest, total[c])
    return max((count - ahead) / rate, longest)


@njit(cache=True, nogil=True)
def common_cuts(count, limit, tolerance, grain, classes, after, weights, table, labels):  # type: ignore[no-untyped-def]
    """Fills the labels of every (stages behind, cut) that may lead to less than `limit`; returns how many found no room.

    All replicas of the `classes` (`ClassArrays`) run `count` micro-batches together. A stage with k behind takes `after[k]` for each of the
    `weights` [cuts] (prefix sums) in the end. `table` is that of `StageSpace`, `labels` are `CutLabels`. One that is no better than another
    by more than the tolerance in anything, or `grain` in what follows, is dropped.
    """
    copies, option, arrives, departs, rest = classes
    number, most, total, late, _, _, _ = labels
    offset, width, times, enter, leave, hidden = table
    num_classes, depth, num_cuts = len(copies), option.shape[1], rest.shape[1] - 1
    slow, whole, low_slow, low_whole = np.zeros(num_classes), np.zeros(num_classes), np.zeros(num_classes), np.zeros(num_classes)
    lost, slack = 0, 1.0 + tolerance
    number[:] = 0
    number[0, num_cuts] = 1
    most[0, num_cuts, 0], total[0, num_cuts, 0], late[0, num_cuts, 0] = 0.0, 0.0, 0.0
    for k in range(depth):
        ahead = depth - 1 - k
        share = 1.0 / (1.0 / after[k + 1 :]).sum() if ahead and after[k + 1 :].min() > 0 else 0.0  # of a weight, on the best stages
        for a in range(ahead, 1 if ahead == 0 else num_cuts - k):
            reach = num_cuts - a
            for c in range(num_classes):
                reach = min(reach, width[option[c, k], a])
            for b in range(a + 1, a + reach + 1):
                for j in range(number[k, b]):
                    possible = True
                    for c in range(num_classes):
                        o = option[c, k]
                        time = times[k, offset[o, a] + b - a - 1] + enter[o, arrives[c, k], a] + leave[o, departs[c, k], b]
                        if time == np.inf:
                            possible = False
                            break
                        slow[c] = max(most[k, b, j, c], time)
                        whole[c] = total[k, b, j, c] + time - (hidden[o, b] - hidden[o, a])
                        low_slow[c] = max(slow[c], rest[c, a] / ahead) if ahead else slow[c]
                        low_whole[c] = whole[c] + rest[c, a]
                    if not possible:
                        continue
                    end = max(late[k, b, j], after[k] * (weights[b] - weights[a]))
                    worth = _least_time(low_slow, low_whole, copies, count) + max(end, share * weights[a])
                    if worth < limit:
                        lost += _keep(labels, k + 1, a, slow, whole, end, worth, b, j, slack, grain)
    return lost


@njit(cache=True, nogil=True)
def _keep(labels, k, a, slow, whole, end, worth, b, j, slack, grain):  # type: ignore[no-untyped-def]
    """Enters a label, drops those that it makes needless; returns 1 if one that may be needed had to go."""
    number, most, total, late, score, cut, label = labels
    at, classes, room = 0, len(slow), most.shape[2]
    for i in range(number[k, a]):
        better, worse = late[k, a, i] <= end + grain, end <= late[k, a, i]
        for c in range(classes):
            if most[k, a, i, c] > slow[c] * slack or total[k, a, i, c] > whole[c] * slack:
                better = False
            if slow[c] > most[k, a, i, c] or whole[c] > total[k, a, i, c]:
                worse = False
        if better:
            return 0
        if not worse:
            if at != i:
                most[k, a, at], total[k, a, at], late[k, a, at] = most[k, a, i], total[k, a, i], late[k, a, i]
                cut[k, a, at], label[k, a, at], score[k, a, at] = cut[k, a, i], label[k, a, i], score[k, a, i]
            at += 1
    lost = 0
    if at == room:
        worst = 0
        for i in range(room):
            if score[k, a, i] > score[k, a, worst]:
                worst = i
        lost, at = 1, worst
        number[k, a] = room
        if worth >= score[k, a, worst]:
            return 1
    else:
        number[k, a] = at + 1
    for c in range(classes):
        most[k, a, at, c], total[k, a, at, c] = slow[c], whole[c]
    late[k, a, at], cut[k, a, at], label[k, a, at], score[k, a, at] = end, b, j, worth
    return lost


def warm() -> None:
    """Compiles the kernels for the types they are called with."""
    one, messages = np.zeros((1, 1), np.int64), np.ones((1, 2, 2))
    table = StageTable(one, one + 1, np.ones((1, 1)), messages, messages, np.zeros((1, 2)))
    classes = ClassArrays(np.ones(1), one, one, one, np.zeros((1, 2)))
    common_cuts(2.0, np.inf, 0.0, 0.0, classes, np.zeros(1), np.zeros(2), table, CutLabels.empty(1, 2, 1))
