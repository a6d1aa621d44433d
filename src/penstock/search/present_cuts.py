"""The best cuts of a pipeline whose placement stays: which ops each of its device groups should have at the speeds it has now.

    ops       0 1 2 3 4 5 6 7 8                 9 ops, 3 groups, the second twice as slow
    present   └─ 0 ─┘└─ 1 ─┘└─ 2 ─┘             3 · 2 = 6 for the slowest
    better    └── 0 ──┘└1┘└─ 2 ──┘              4, and 2 · 1

Dynamic programmes over all cuts: the least time τ of the slowest group first, then for some τ' ≥ τ the least way through the pipeline with
no group beyond τ'. They know what single ops take and roughly hold; the estimate says what is true of the few plans that come out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.costs.collectives import point_to_point_s
from penstock.costs.memory import bytes_per_parameter
from penstock.plans.plan import OpRange, Plan
from penstock.schedules.rules import SCHEDULES
from penstock.timing.estimate import Estimator
from penstock.timing.iteration_estimate import Estimate
from penstock.timing.pass_times import op_passes
from penstock.timing.pipeline import micro_batches, share_shape

__all__ = ["recomputed_ops", "with_cuts", "with_present_cuts"]

Floats = NDArray[np.float64]

_SLACKS = (1.0, 1.005, 1.02, 1.05)
"""Times of the slowest group, over the least, below which the way through the pipeline is made short."""
_PROBE_BYTES = 2.0**20


def recomputed_ops(plan: Plan) -> frozenset[int]:
    """The ops that a plan recomputes, by their number in the model."""
    return frozenset(op for stage in plan.stages for first, last in stage.pattern() for op in range(first, last))


def with_cuts(plan: Plan, cuts: Sequence[int], recomputed: Collection[int]) -> Plan:
    """The plan with stages from each of `cuts` to the next, and these ops recomputed."""
    stages = [
        replace(stage, first=first, last=last, recompute=_pattern(first, last, recomputed))
        for stage, first, last in zip(plan.stages, cuts[:-1], cuts[1:], strict=True)
    ]
    return replace(plan, stages=tuple(stages), predicted=None)


def _pattern(first: int, last: int, recomputed: Collection[int]) -> tuple[tuple[OpRange, ...], ...]:
    ranges: list[OpRange] = []
    for op in range(first, last):
        if op in recomputed:
            joins = bool(ranges) and ranges[-1][1] == op
            ranges[-1 if joins else len(ranges) :] = [(ranges[-1][0] if joins else op, op + 1)]
    return (tuple(ranges),) if ranges else ()


def with_present_cuts(plan: Plan, present: Estimate, estimator: Estimator, recomputed: Collection[int] | None = None) -> list[Plan]:
    """Plans like `plan` with other cuts, a few that promise most; ops are recomputed as in `plan` unless said otherwise.

    `present` is the estimate of a plan with the same groups, from which it is learned how far rough bytes are from true ones. Nothing comes
    out where groups have several chunks, or ops degrees of their own.
    """
    if plan.num_stages == 1 or plan.num_groups != plan.num_stages or any(stage.runs for stage in plan.stages):
        return []
    again = recomputed_ops(plan) if recomputed is None else frozenset(recomputed)
    chain = _Chain.of(plan, estimator, again)
    limits = _limits(plan, present, chain)
    found = dict.fromkeys(tuple(cuts) for cuts in _best_cuts(chain, limits))
    return [with_cuts(plan, cuts, again) for cuts in found]


@dataclass(frozen=True)
class _Chain:
    """What runs of ops take and hold on each group: arrays [group, first, last], infinite where last ≤ first."""

    passes_s: Floats
    """Of one micro-batch on the slowest replica, as long as its number of micro-batches makes it count."""
    held_bytes: Floats
    messages_s: Floats
    """[group, op] what the group receives and sends if it begins at the op."""

    @classmethod
    def of(cls, plan: Plan, estimator: Estimator, recomputed: frozenset[int]) -> _Chain:
        samples, counts = micro_batches(plan)
        again = np.array([op in recomputed for op in range(estimator.model.num_ops)], dtype=np.float64)
        passes, held, messages = [], [], []
        for number, stage in enumerate(plan.stages):
            shape, sequence = share_shape(plan, samples, stage.degrees.dp), estimator.by_rows(stage, stage.degrees.tp)
            table, model = estimator.table(shape, stage.degrees.tp, sequence), estimator.model_under(sequence)
            times = []
            for count, ranks in zip(counts, stage.devices, strict=True):
                for device in {estimator.cluster.device(rank).name for rank in ranks}:
                    own = op_passes(model, table, shape, device=device, tp=stage.degrees.tp, ops=table.chain)
                    times.append((own.both_s + again * own.forward_pass_s) * count / max(counts))
            passes.append(_between(max(times, key=lambda own: float(own.sum()))))
            at = (slice(None), table.shape_index(shape), table.tp_index(stage.degrees.tp), 0)
            flight = SCHEDULES[plan.schedule].in_flight(plan.num_groups, number, max(counts), 1)[0]
            weights = table.parameters[:, table.tp_index(stage.degrees.tp), 0][table.chain]
            state_bytes = sum(bytes_per_parameter(plan.precision, plan.optimizer, plan.gradients))
            held.append(_between(weights * state_bytes + flight * (1 - again) * table.kept_bytes[at][table.chain]))
            sizes = table.input_bytes[at][table.chain]
            messages.append(_messages_s(plan, estimator, number, sizes) if number else np.zeros(len(sizes) + 1))
        return cls(np.stack(passes), np.stack(held), np.stack(messages))


def _between(values: Floats) -> Floats:
    """[first, last] sums of values; infinite where there is no op between."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found: Floats = sums[None, :] - sums[:, None]
    found[np.tril_indices(len(sums))] = np.inf
    return found


def _messages_s(plan: Plan, estimator: Estimator, number: int, sizes: Floats) -> Floats:
    """[op] what activations and their gradients take between a group that begins at an op, before which so many bytes cross, and the one
    before."""
    pairs = [(a[0], b[0]) for a, b in zip(plan.stages[number - 1].devices, plan.stages[number].devices, strict=True)]
    latency_s = max(point_to_point_s(0.0, estimator.cluster, a, b) for a, b in pairs)
    whole_s = max(point_to_point_s(_PROBE_BYTES, estimator.cluster, a, b) for a, b in pairs)
    return np.asarray(np.append(2 * (latency_s + (whole_s - latency_s) / _PROBE_BYTES * sizes), 0.0))


def _limits(plan: Plan, present: Estimate, chain: _Chain) -> Floats:
    """[group] rough bytes that a group may hold: its true limit, over how far rough bytes of its present stage are from true ones."""
    found = []
    for number, (stage, own) in enumerate(zip(plan.stages, present.stages, strict=True)):
        rough = chain.held_bytes[number, stage.first, stage.last]
        # What does not grow with the number of ops (libraries, buffers) makes small stages seem worse than they are; the estimate decides.
        found.append(own.limit_bytes * rough / own.memory.total_bytes)
    return np.array(found)


def _best_cuts(chain: _Chain, limits_bytes: Floats) -> Iterator[list[int]]:
    """Cuts with the least time of the slowest group, and with short ways through the pipeline near it."""
    groups, size, _ = chain.passes_s.shape
    allowed = np.where(chain.held_bytes <= limits_bytes[:, None, None], chain.passes_s, np.inf)
    slowest = np.maximum(allowed, chain.messages_s[:, :, None])
    least = np.full(size, np.inf)
    least[0] = 0.0
    for group in range(groups):
        least = np.maximum(least[:, None], slowest[group]).min(axis=0)
    if not np.isfinite(least[-1]):
        return
    for slack in _SLACKS:
        limit_s = slack * least[-1] * (1 + 1e-12)
        way = np.full(size, np.inf)
        way[0] = 0.0
        choices = []
        for group in range(groups):
            through = np.where(slowest[group] <= limit_s, way[:, None] + allowed[group] + chain.messages_s[group][:, None], np.inf)
            choices.append(through.argmin(axis=0))
            way = through.min(axis=0)
        cuts = [size - 1]
        for choice in reversed(choices):
            cuts.append(int(choice[cuts[-1]]))
        yield cuts[::-1]
