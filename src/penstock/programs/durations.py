"""How long actions take, roughly: the arithmetic of their ops, at the speed that costs give each stage where they are known. Good enough
to put transfers in the order in which they will be ready."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from penstock.models.shapes import FEATURES, feature_matrix
from penstock.timing.pass_times import has_weight_gradients
from penstock.timing.workload import Floats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.micro_batch import MicroBatch
    from penstock.models.ops import Model, Op
    from penstock.plans.plan import Plan, Stage

__all__ = ["StageWeights", "durations_of", "priced_weights", "stage_weights"]

StageWeights = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
"""[F, B, I or W; stage; feature]: work of a stage, linear in the features of a micro-batch."""


def stage_weights(model: Model, plan: Plan) -> StageWeights:
    """The arithmetic of each stage on one of its ranks; at least one operation for each op."""
    forward, backward, weight = np.moveaxis(np.array([_work(model, stage) for stage in plan.stages]), 1, 0)
    return np.stack([forward, backward, backward - weight, weight])


def priced_weights(model: Model, plan: Plan, cluster: Cluster, source: CostSource) -> list[StageWeights]:
    """`stage_weights` in seconds, one for each replica: scaled so that a micro-batch of the size that the plan was made for takes what the
    costs say of the stage's passes."""
    from penstock.timing.estimate import Estimator
    from penstock.timing.pipeline import micro_batches, share_shape
    from penstock.timing.workload import split_backward

    weights = stage_weights(model, plan)
    samples, _ = micro_batches(plan)
    usual = weights @ feature_matrix([share_shape(plan, samples)])[0]
    paces = Estimator(model, cluster, source).paces(plan)
    passes = [
        split_backward([[own.forward_pass_s for own in pace.work], [own.backward_pass_s for own in pace.work]],
                       [own.weight_s for own in pace.work])
        for pace in paces
    ]  # fmt: skip
    return [weights * (own / np.maximum(usual, 1e-30))[:, :, None] for own in passes]


def _work(model: Model, stage: Stage) -> Floats:
    """[forward, backward, weight gradients; feature]: half the backward arithmetic of ops with trained weights is for these."""
    total = np.zeros((3, len(FEATURES)))
    counts: Counter[tuple[int, int, int]] = Counter()
    ops: dict[int, Op] = {}
    for place in model.ops[stage.first : stage.last]:
        run = stage.run_of(place.index)
        counts[id(place.op), run.tp, run.dp] += 1  # a block's copies are the same objects
        ops[id(place.op)] = place.op
    for (number, tp, dp), count in counts.items():
        forward, backward = (np.array(flops.form(tp).coefficients) for flops in (ops[number].flops, ops[number].backward_flops))
        total += np.stack([forward, backward, backward / 2 * has_weight_gradients(ops[number])]) * count / dp
    total[:2, 0] += stage.last - stage.first
    return total


def durations_of(weights: StageWeights, micro_batches: Sequence[MicroBatch]) -> list[list[list[float]]]:
    """The duration of every action, as [kind][stage][micro-batch] with the kinds F, B, I and W; in the unit of `weights`."""
    found: list[list[list[float]]] = (weights @ feature_matrix([micro.shape() for micro in micro_batches]).T).tolist()
    return found
