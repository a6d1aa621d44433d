"""DynaPipe: profiled layer times by micro-batch size and length, its configurations, and micro-batches planned by its cost model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.systems.system import System

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import SampleLengths

__all__ = ["DYNAPIPE"]


def _batch_costs(path: str, samples: Sequence[SampleLengths], free_layers: bool) -> PipelineCosts:
    from penstock.systems.dynapipe.rules import dynapipe_costs
    from penstock.systems.dynapipe.search import best_layers
    from penstock.systems.dynapipe.tables import open_configuration

    tables, config = open_configuration(path)
    return dynapipe_costs(tables, best_layers(tables, config, samples) if free_layers else config)


DYNAPIPE = System("dynapipe", batch_costs=_batch_costs)
