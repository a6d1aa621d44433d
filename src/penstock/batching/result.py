"""From what the search found to a `BatchPlan`: ids, shapes, recomputation, schedules, and memory replayed action by action."""

from __future__ import annotations

import numpy as np

from penstock.batching.costs import Floats, PipelineCosts
from penstock.batching.fitting import Fitted, positions
from penstock.batching.ordering import Ints
from penstock.batching.plan import BatchPlan, ReplicaBatch
from penstock.batching.search import Found, new_state, scratch_of
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Layout
from penstock.schedules.actions import FORWARD, Schedule
from penstock.schedules.orders import with_depths

__all__ = ["finish", "peak_bytes"]

_LAYOUTS: tuple[Layout, Layout] = ("padded", "packed")


def finish(costs: PipelineCosts, fitted: Fitted, found: Found, bound_s: float, steps: int, method: str = "planned") -> BatchPlan:
    """The plan of what was found."""
    from penstock.batching.anneal_kernels import evaluate, fill

    enc, dec = positions(fitted.samples, costs)
    state = new_state(costs, len(found.cuts) - 1, int(np.diff(found.cuts).max()))
    fill(state, costs.tables, enc, dec, found.order, found.cuts)
    state.ahead[:] = found.ahead
    scratch, hop = scratch_of(state)
    replicas = []
    for r, line in enumerate(found.lines):
        state.seq[r, : len(line)], state.num[r] = line, len(line)
        time_s = float(evaluate(state, costs.tables, r, scratch, hop))
        modes = state.mode[r, :, : len(line)]
        schedule = with_depths([int(ahead) for ahead in found.ahead[r]], len(line))
        batches = tuple(
            _micro_batch(place, costs, fitted, enc, dec, state.members[slot, : state.filled[slot]], state.shape[slot], modes[:, place])
            for place, slot in enumerate(line)
        )
        chosen = np.stack([state.cost[line, costs.stage_class[r, s], modes[s]] for s in range(costs.num_stages)])
        replicas.append(ReplicaBatch(batches, schedule, time_s, peak_bytes(schedule, chosen, costs.state_bytes[r])))
    slowest = max(replica.predicted_s for replica in replicas)
    limits = tuple(tuple(map(float, row)) for row in costs.limit_bytes)
    return BatchPlan(tuple(replicas), slowest + costs.fixed_s, bound_s, limits, costs.name, steps, fitted.dropped, fitted.truncated, method)


def _micro_batch(
    index: int, costs: PipelineCosts, fitted: Fitted, enc: Ints, dec: Ints, members: Ints, shape: Ints, modes: Ints
) -> MicroBatch:
    """Longest first, so that rows of similar length lie together."""
    order = members[np.lexsort((members, -dec[members], -enc[members]))]
    return MicroBatch(
        index,
        samples=tuple(fitted.samples[i].id for i in order),
        layout=_LAYOUTS[shape[0]],
        lengths=tuple(enc[order].tolist()),
        row_length=int(shape[1]),
        dec_lengths=tuple(dec[order].tolist()) if costs.has_decoder else (),
        dec_row_length=int(shape[2]),
        recompute=tuple(modes.tolist()),
    )


def peak_bytes(schedule: Schedule, chosen: Floats, state_bytes: Floats) -> tuple[float, ...]:
    """The fullest moment of each stage; `chosen` [S, micro-batches, 5] is what each costs in the mode it runs in."""
    peaks = []
    for stage, actions in enumerate(schedule):
        used = peak = float(state_bytes[stage])
        for action in actions:
            _, _, stored, forward_peak, backward_peak = chosen[stage, action.micro_batch]
            if action.kind == FORWARD:
                peak = max(peak, used + forward_peak)
                used += stored
            else:
                used -= stored
                peak = max(peak, used + backward_peak)
        peaks.append(float(peak))
    return tuple(peaks)
