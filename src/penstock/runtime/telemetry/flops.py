"""How well a step used its devices: the model's own arithmetic, at their peak, over the time that the step took (MFU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.costs.efficiency import arithmetic_dtype, op_class
from penstock.models.shapes import FEATURES, Shape, feature_matrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.clusters import Cluster
    from penstock.models.micro_batch import MicroBatch
    from penstock.models.ops import Model, Op
    from penstock.plans.plan import Plan

__all__ = ["PeakTimes"]


class PeakTimes:
    """The time of samples if all devices of a plan computed nothing else at their peak: no padding, nothing twice."""

    def __init__(self, plan: Plan, model: Model, cluster: Cluster) -> None:
        devices = [cluster.device(rank) for rank in plan.ranks]
        self._coefficients: dict[int, np.ndarray] = {}
        """By attention's window, of which what it hides is not counted; 0: none."""
        self._seen_by: dict[int, Op] = {}
        for block, copies in model.runs:
            for op in block.ops:
                dtype = arithmetic_dtype(op_class(op.kind, op.config), model.dtype)
                peak_flops_per_s = sum(device.peak_flops_per_s(dtype) for device in devices)
                at_peak_s = copies * np.array(op.needed_flops.form(1).coefficients) / peak_flops_per_s
                window = op.config.get("window", 0)
                self._coefficients[window] = self._coefficients.get(window, np.zeros(len(FEATURES))) + at_peak_s
                self._seen_by[window] = op

    def time_s(self, micro_batches: Sequence[MicroBatch], tokens: int) -> float:
        """Time at peak of a batch of so many tokens (images, where there are none) that cost on average what the micro-batches' do."""
        shapes = [
            Shape.packed(micro.lengths, micro.dec_lengths) if micro.lengths else Shape.images(len(micro.samples)) for micro in micro_batches
        ]
        own = sum(shape.tokens + shape.dec_tokens or shape.samples for shape in shapes)
        features = feature_matrix(shapes)
        seen = {window: np.array([op.seen_share(shape) for shape in shapes]) for window, op in self._seen_by.items()}
        at_peak_s = sum(float(features @ by_feature @ seen[window]) for window, by_feature in self._coefficients.items())
        return at_peak_s * tokens / max(1, own)
