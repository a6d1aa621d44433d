"""How long actions take, roughly: the arithmetic of their ops, at the speed that costs give each stage where they are known. Good enough
to put transfers in the order in which they will be ready."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from penstock.models.shapes import FEATURES, feature_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model, Op
    from penstock.plans.plan import Plan, Stage
    from penstock.programs.instructions import MicroBatch

__all__ = ["StageWeights", "durations_of", "priced_weights", "stage_weights"]

StageWeights = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
"""[forward or backward, stage, feature]: work of a stage, linear in the features of a micro-batch."""


def stage_weights(model: Model, plan: Plan) -> StageWeights:
    """The arithmetic of each stage on one of its ranks; at least one operation for each op."""
    return np.array([[_work(model, stage, backward) for stage in plan.stages] for backward in (False, True)])


def priced_weights(model: Model, plan: Plan, cluster: Cluster, source: CostSource) -> list[StageWeights]:
    """The same in seconds, for each replica: a stage's passes take what the costs say of a micro-batch as the plan was made for."""
    from penstock.timing.estimate import Estimator
    from penstock.timing.pipeline import micro_batches, share_shape

    weights = stage_weights(model, plan)
    samples, _ = micro_batches(plan)
    usual = weights @ feature_matrix([share_shape(plan, samples)])[0]
    paces = Estimator(model, cluster, source).paces(plan)
    passes = [np.array([[own.forward_s, own.backward_s + own.recompute_s] for own in pace.work]).T for pace in paces]
    return [weights * (own / usual)[:, :, None] for own in passes]


def _work(model: Model, stage: Stage, backward: bool) -> list[float]:
    total = np.zeros(len(FEATURES))
    counts: Counter[tuple[int, int, int]] = Counter()
    ops: dict[int, Op] = {}
    for place in model.ops[stage.first : stage.last]:
        run = stage.run_of(place.index)
        counts[id(place.op), run.tp, run.dp] += 1  # a block's copies are the same objects
        ops[id(place.op)] = place.op
    for (number, tp, dp), count in counts.items():
        form = (ops[number].backward_flops if backward else ops[number].flops).form(tp)
        total += np.array(form.coefficients) * count / dp
    total[0] += stage.last - stage.first
    return [float(value) for value in total]


def durations_of(weights: StageWeights, micro_batches: Sequence[MicroBatch]) -> list[list[list[float]]]:
    """[kind][stage][micro-batch] for F, B, I and W; both halves of a split backward pass take the same."""
    forward, backward = weights @ feature_matrix([micro.shape() for micro in micro_batches]).T
    return [forward.tolist(), backward.tolist(), (backward / 2).tolist(), (backward / 2).tolist()]
