"""How long actions take, roughly: the arithmetic of their ops. Good enough to put transfers in the order in which they will be ready."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from penstock.models.shapes import FEATURES, feature_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.models.ops import Model, Op
    from penstock.plans.plan import Plan, Stage
    from penstock.programs.instructions import MicroBatch

__all__ = ["StageWeights", "durations_of", "stage_weights"]

StageWeights = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
"""[forward or backward, stage, feature]: work of a stage, linear in the features of a micro-batch."""


def stage_weights(model: Model, plan: Plan) -> StageWeights:
    """The arithmetic of each stage on one of its ranks; at least one operation for each op."""
    return np.array([[_work(model, stage, backward) for stage in plan.stages] for backward in (False, True)])


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
