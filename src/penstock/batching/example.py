"""A pipeline whose costs are simple formulas: what kernels are compiled with, and small enough to check by hand."""

from __future__ import annotations

import numpy as np

from penstock.batching.costs import QUANTITIES, LayoutCosts, PipelineCosts
from penstock.models.shapes import Layout

__all__ = ["small_costs"]


def small_costs(
    num_stages: int = 2,
    num_replicas: int = 1,
    limit_bytes: float = 1e6,
    layouts: tuple[Layout, ...] = ("padded",),
    has_decoder: bool = True,
) -> PipelineCosts:
    """Forward takes 1 + tokens / 100 seconds, backward twice that; a token keeps 10 bytes, or 2 if its micro-batch is recomputed,
    which takes the forward time once more. The last stage takes half as long again."""
    knots = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0])
    grids: dict[Layout, LayoutCosts] = {}
    for layout in layouts:
        y, z = knots, knots if has_decoder else np.zeros(1)
        x = knots if layout == "padded" else np.append(knots, [128.0, 256.0, 512.0])
        rows, length, dec = np.meshgrid(x, y, z, indexing="ij")
        tokens = rows * (length + dec) if layout == "padded" else rows
        values = np.zeros((len(y), len(z), len(x), 2, 2, len(QUANTITIES)))
        for c, m in np.ndindex(2, 2):
            forward, kept = (1 + tokens / 100) * (1 + c / 2), tokens * (2.0 if m else 10.0)
            parts = (forward, (2 + m) * forward, kept, kept + tokens, 0 * kept, kept + 2 * tokens)
            for q, part in enumerate(parts):
                values[..., c, m, q] = np.moveaxis(part, 0, 2)
        grids[layout] = LayoutCosts((x, y, z), values)
    shape = num_replicas, num_stages
    stage_class = np.zeros(shape, dtype=np.int64)
    stage_class[:, -1] = 1
    hops = np.tile(np.array([0.1, 0.001, 0.001]), (num_replicas, 2, num_stages - 1, 1))
    return PipelineCosts(
        "example", grids, stage_class, np.zeros(shape), np.full(shape, limit_bytes), hops, ("none", "full"), has_decoder=has_decoder
    )
