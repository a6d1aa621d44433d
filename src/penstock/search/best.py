"""All that the search knows, asked in one go: the grid of uniform plans, then plans with stages of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.costs.estimate import Estimator, with_prediction
from penstock.costs.sources import open_costs
from penstock.errors import InfeasibleError
from penstock.search.exact import exact_plans
from penstock.search.grid import Choice, best_plans, frame_of, micro_batch_sizes, resolved

if TYPE_CHECKING:
    from penstock.costs.source import CostSource

__all__ = ["search_plans"]


def search_plans(
    model_ref: str, cluster_ref: str, global_batch: int, *, costs: str | CostSource = "roofline", seq_length: int | None = None,
    micro_batches: Sequence[int] = (), memory_limit_bytes: float = math.inf, top: int = 5, progress: Callable[[], None] = lambda: None,
) -> list[Choice]:  # fmt: skip
    """The fastest plans that fit, best first; `progress` is called now and then.

    >>> search_plans("gpt-1.3b", "4xa100-40gb", 64, top=1)[0].estimate.fits
    True
    """
    uniform: list[Choice] = []
    none_fits: InfeasibleError | None = None
    try:
        uniform = best_plans(
            model_ref, cluster_ref, global_batch, costs=costs, seq_length=seq_length, micro_batches=micro_batches,
            memory_limit_bytes=memory_limit_bytes, top=top, progress=progress,
        )  # fmt: skip
    except InfeasibleError as error:
        none_fits = error
    model, cluster = resolved(model_ref, cluster_ref)
    source = open_costs(costs, cluster) if isinstance(costs, str) else costs
    estimator = Estimator(model, cluster, source, memory_limit_bytes)
    frame = frame_of(model_ref, cluster_ref, model, cluster, global_batch, seq_length)
    known_s = uniform[0].estimate.time_s if uniform else math.inf
    sizes = micro_batch_sizes(global_batch, 1, micro_batches)
    uneven = []
    for plan, estimate in exact_plans(model, cluster, frame, estimator, sizes, memory_limit_bytes, known_s):
        progress()
        uneven.append(Choice(with_prediction(plan, estimate), estimate, "exact"))
    if not uneven and none_fits is not None:
        raise none_fits
    return [*reversed(uneven), *uniform][:top]
