"""DynaPipe: profiled layer times by micro-batch size and length, its configurations, and micro-batches planned by its cost model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.systems.system import System

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts

__all__ = ["DYNAPIPE"]


def _batch_costs(path: str) -> PipelineCosts:
    from penstock.systems.dynapipe.rules import dynapipe_costs
    from penstock.systems.dynapipe.tables import open_configuration

    return dynapipe_costs(*open_configuration(path))


DYNAPIPE = System("dynapipe", batch_costs=_batch_costs)
