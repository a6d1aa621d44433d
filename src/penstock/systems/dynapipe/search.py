"""Search over DynaPipe's cost model: layers of each stage that suit one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

from penstock.errors import InfeasibleError
from penstock.systems.dynapipe.rules import dynapipe_costs

if TYPE_CHECKING:
    from penstock.batching.plan import SampleLengths
    from penstock.systems.dynapipe.inputs import PlannerConfig
    from penstock.systems.dynapipe.tables import DynaPipeTables

__all__ = ["best_layers"]


def best_layers(tables: DynaPipeTables, config: PlannerConfig, samples: Sequence[SampleLengths]) -> PlannerConfig:
    """The configuration with the layers per stage that suit this batch best, found by moving one layer at a time between stages.

    What a stage's layers cost depends on the lengths: short decoder sides leave decoder stages idle when layers are dealt evenly.
    """
    from penstock.batching.planner import plan_batch

    def time_s(counts: tuple[int, ...]) -> float:
        try:
            return plan_batch(samples, dynapipe_costs(tables, replace(config, layers_per_stage=counts))).predicted_s
        except InfeasibleError:
            return float("inf")

    sides = 2 if tables.dimensions.has_decoder else 1
    counts = config.layers_per_stage or (sides * config.layers // config.pp,) * config.pp
    known = {counts: time_s(counts)}
    while True:
        for giver, taker in permutations(range(config.pp), 2):
            moved = tuple(count - (s == giver) + (s == taker) for s, count in enumerate(counts))
            if min(moved) > 0 and moved not in known:
                known[moved] = time_s(moved)
        best = min(known, key=lambda held: known[held])
        if best == counts:
            return replace(config, layers_per_stage=counts)
        counts = best
