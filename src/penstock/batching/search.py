"""Finds a plan for one batch: the best of a few splits at once, then annealing over everything, counted in steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.batching.costs import Floats, PipelineCosts
from penstock.batching.ordering import Ints, by_length
from penstock.errors import InfeasibleError

if TYPE_CHECKING:
    from penstock.batching.anneal_kernels import State
    from penstock.batching.split import BatchSplit

__all__ = ["Found", "improve", "new_state", "scratch_of", "start", "usual_steps", "warm_ups"]

HOT = 0.006
"""First temperature, of the mean charge of a micro-batch; a hotter start forgets the plan it started from."""
COOLING = 60.0
"""First temperature over the last."""
_ALIKE = 0.005
"""Makespans closer than this are the same: a tenth of what costs are known to."""


@dataclass(frozen=True)
class Found:
    """Micro-batches as pieces of an order, and how the replicas run them."""

    makespan_s: float
    order: Ints
    cuts: Ints
    lines: tuple[Ints, ...]
    """For each replica, its pieces in the order in which they enter the pipeline."""
    ahead: Ints
    """[R, S] forward passes before the first backward pass."""


def usual_steps(costs: PipelineCosts, num_samples: int) -> int:
    """Steps worth their time: well under a second on one core, more for small batches, whose steps are cheap."""
    if costs.num_stages == 1 and costs.has_decoder:
        return min(3_000, 1_500 + num_samples)
    return min(40_000, 80_000_000 // max(num_samples, 1))


def start(costs: PipelineCosts, enc: Ints, dec: Ints, splits: Sequence[BatchSplit]) -> Found:
    """The best of the splits, dealt to the replicas; one sample per micro-batch where none of them fits."""
    found = [run for split in splits if (run := _run(costs, enc, dec, split.order, split.cuts)) is not None]
    if not found:
        single = _run(costs, enc, dec, by_length(enc, dec), np.arange(len(enc) + 1))
        found = [single] if single is not None else []
    if not found:
        raise InfeasibleError("samples fit alone but not in a pipeline with others in flight. Allow more recomputation or memory.")
    return _least_held(found) if costs.num_stages == 1 else min(found, key=lambda run: run.makespan_s)


def _least_held(found: Sequence[Found]) -> Found:
    """The most micro-batches among splits that take the same time. In one stage their number changes little but the memory they hold, and
    costs, measured at sizes far from each other, do not tell one micro-batch of 64k tokens from four of 16k."""
    enough = (1 + _ALIKE) * min(run.makespan_s for run in found)
    return max((run for run in found if run.makespan_s <= enough), key=lambda run: (len(run.cuts), -run.makespan_s))


def _run(costs: PipelineCosts, enc: Ints, dec: Ints, order: Ints, cuts: Ints) -> Found | None:
    """Deals the pieces to the replicas and tries a few warm-up depths; None if nothing fits."""
    from penstock.batching.anneal_kernels import deal, evaluate, fill

    pieces = len(cuts) - 1
    state = new_state(costs, pieces, int(np.diff(cuts).max()))
    scratch, hop = scratch_of(state)
    if fill(state, costs.tables, enc, dec, order, cuts):
        return None
    deal(state, costs.tables, pieces)
    best: Found | None = None
    for ahead in warm_ups(costs.num_stages):
        if best is not None and ahead[0] < costs.num_stages:
            break  # fewer in flight only for want of room
        state.ahead[:] = ahead
        makespan = max(evaluate(state, costs.tables, r, scratch, hop) for r in range(costs.num_replicas))
        if makespan < (best.makespan_s if best else np.inf):
            lines = tuple(state.seq[r, :num].copy() for r, num in enumerate(state.num))
            best = Found(makespan, order, cuts, lines, state.ahead.copy())
    return best


def warm_ups(num_stages: int) -> list[list[int]]:
    """Forward passes before the first backward pass: as 1F1B has them, one more, as the adaptive schedule has them, and ever fewer,
    for micro-batches that do not fit beside each other."""
    behind = [num_stages - s for s in range(num_stages)]
    fewer = [[min(b, most) for b in behind] for most in (num_stages // 2, 2, 1)]
    depths = [behind, [b + (b > 1) for b in behind], [2 * b - 1 for b in behind], *(depth for depth in fewer if depth[0] > 0)]
    return [depth for at, depth in enumerate(depths) if depth not in depths[:at]]


def improve(costs: PipelineCosts, enc: Ints, dec: Ints, found: Found, steps: int, seed: int = 0) -> Found:
    """Anneals for `steps` steps; the same seed gives the same plan."""
    from penstock.batching.anneal_kernels import Annealing, BestState, anneal, fill

    pieces, replicas = len(found.cuts) - 1, costs.num_replicas
    widest = min(len(enc), costs.max_samples, max(_most_rows(costs), int(np.diff(found.cuts).max())))
    state = new_state(costs, 2 * pieces + 64, widest)
    fill(state, costs.tables, enc, dec, found.order, found.cuts)
    for r, line in enumerate(found.lines):
        state.seq[r, : len(line)], state.num[r] = line, len(line)
    state.ahead[:] = found.ahead
    slots = len(state.filled)
    kept = BestState(
        np.empty(len(enc), np.int64), np.empty(slots + 1, np.int64), np.empty_like(state.seq), np.empty_like(state.num),
        np.empty_like(state.ahead),
    )  # fmt: skip
    two_sided = bool(dec.any())
    hot = HOT * float(state.charge[:pieces].mean())
    annealing = Annealing(_weights(costs, two_sided), two_sided, steps, hot, hot / COOLING, np.array([seed], dtype=np.uint64))
    makespan, pieces = anneal(state, costs.tables, enc, dec, annealing, kept)
    lines = tuple(kept.seq[r, : kept.num[r]].copy() for r in range(replicas))
    return Found(makespan, kept.order, kept.cuts[: pieces + 1].copy(), lines, kept.ahead)


def _weights(costs: PipelineCosts, two_sided: bool) -> Floats:
    """How often each kind of move is tried."""
    #          reorder, replica, ahead, shift, transfer, swap, split, merge, pool
    if costs.num_stages == 1:
        weights = [0, 6, 0, 6, 6, 6, 2, 4, 12] if two_sided else [0, 10, 0, 40, 10, 10, 10, 10, 0]
    elif "packed" in costs.layouts:
        weights = [30, 15, 3, 6, 15, 15, 8, 8, 0]
    elif two_sided:
        weights = [12, 10, 3, 25, 5, 5, 6, 8, 4]
    else:
        weights = [35, 15, 3, 32, 0, 0, 7, 8, 0]
    return np.array(weights, dtype=np.float64)


def _most_rows(costs: PipelineCosts) -> int:
    """Samples that any micro-batch could have."""
    return int(costs.layouts["padded"].axes[0][-1]) if set(costs.layouts) == {"padded"} else 2**31


def new_state(costs: PipelineCosts, slots: int, widest: int) -> State:
    """An empty state."""
    from penstock.batching.anneal_kernels import State

    classes, modes = (int(size) for size in costs.tables.sizes[:2])
    replicas, stages = costs.num_replicas, costs.num_stages
    return State(
        members=np.empty((slots, widest), np.int64), filled=np.zeros(slots, np.int64), cost=np.empty((slots, classes, modes, 5)),
        shape=np.empty((slots, 5), np.int64), charge=np.empty(slots), seq=np.empty((replicas, slots), np.int64),
        num=np.zeros(replicas, np.int64), ahead=np.ones((replicas, stages), np.int64), mode=np.zeros((replicas, stages, slots), np.int64),
    )  # fmt: skip


def scratch_of(state: State) -> tuple[Floats, Floats]:
    """Working arrays for `evaluate`."""
    slots, stages = len(state.filled), state.ahead.shape[1]
    return np.empty((slots, 4, stages)), np.empty((slots, 2, max(stages - 1, 1)))
