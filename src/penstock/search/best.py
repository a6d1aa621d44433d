"""All that the search knows, asked in one go: the grid of uniform plans, then plans with stages of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.costs.estimate import with_prediction
from penstock.errors import InfeasibleError
from penstock.search.exact import exact_plans
from penstock.search.grid import Choice, Request, uniform_choices

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
    request = Request.of(model_ref, cluster_ref, global_batch, costs, seq_length, micro_batches, memory_limit_bytes)
    uniform: list[Choice] = []
    none_fits: InfeasibleError | None = None
    try:
        uniform = uniform_choices(request, top, progress)
    except InfeasibleError as error:
        none_fits = error
    known_s = uniform[0].estimate.time_s if uniform else math.inf
    uneven = []
    for plan, estimate in exact_plans(request, known_s):
        progress()
        uneven.append(Choice(with_prediction(plan, estimate), estimate, "exact"))
    if not uneven and none_fits is not None:
        raise none_fits
    return [*reversed(uneven), *uniform][:top]
