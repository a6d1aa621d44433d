"""What each stage does after the last micro-batch, and stages left out that would do more than a limit.

The partition programme minimises the pipeline alone. On clusters of several kinds that is not enough: some kinds have slow networks, and a
stage there that sums many gradients, or a large table that the two ends of the pipeline share, makes a short pipeline useless. So the
programme runs again and again, each time without the stages that take longest after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.search.partition.stage_space import StageChoice, StageSpace
from penstock.search.space.stage_costs import StageOption, sums_before

if TYPE_CHECKING:
    from penstock.search.space.prices import FamilyPrices

__all__ = ["StageAfter"]


@dataclass(frozen=True)
class StageAfter:
    """Times after the last micro-batch where the stages of a replica lie side by side, and share the networks of their nodes."""

    prices: FamilyPrices

    def of(self, option: StageOption, first: int, last: int) -> float:
        """Gradient sync and optimizer step of a stage of ops first..last."""
        before = sums_before([self.prices.updates.side_by_side_s(option)])[0]
        return float(before[last] - before[first]) + self._shared_s(option, first == 0, last == len(before) - 1)

    def longest(self, space: StageSpace, stages: Sequence[StageChoice]) -> float:
        """What follows the last micro-batch in the stage where that takes longest."""
        return max(self.of(space.costs[stage.option].option, stage.first, stage.last) for stage in stages)

    def limited(self, space: StageSpace, limit_s: float) -> StageSpace:
        """The space without stages that take longer than a limit."""
        times, num_cuts = space.times.copy(), len(space.cuts) - 1
        for c, costs in enumerate(space.costs):
            before = sums_before([self.prices.updates.side_by_side_s(costs.option)])[0][space.cuts]
            starts = np.repeat(np.arange(num_cuts), space.width[c])
            at = int(space.offset[c, 0]) + np.arange(len(starts))
            ends = starts + 1 + at - space.offset[c][starts]
            after = before[ends] - before[starts]
            for is_first, is_last in ((True, False), (False, True)):
                shared_s = self._shared_s(costs.option, is_first, is_last)
                after = after + shared_s * (((starts == 0) == is_first) & ((ends == num_cuts) == is_last))
            times[:, at[after > limit_s]] = np.inf
        return replace(space, times=times)

    def _shared_s(self, option: StageOption, is_first: bool, is_last: bool) -> float:
        """For the weight that the first op shares with a later one, which is at the other end."""
        return self.prices.updates.ends_s(option) if is_first != is_last else 0.0
