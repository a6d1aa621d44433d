"""Batches in a configuration of another system, named as `dynapipe:DIR/NAME`, for the verbs that take such costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import SampleLengths

__all__ = ["CONFIGURED", "configured_costs"]

CONFIGURED = {name: system.batch_costs for name, system in SYSTEMS.items() if system.batch_costs is not None}
"""Systems with configurations that batches are planned for."""


def configured_costs(costs: str, samples: Sequence[SampleLengths], free_layers: bool = False) -> PipelineCosts:
    """Costs of a batch in a configuration of another system, by that system's own cost model."""
    kind, _, where = costs.partition(":")
    if not where or "\0" in where:
        raise InputError(f"costs '{costs}': expected {kind}:DIR/NAME.")
    return CONFIGURED[kind](where, samples, free_layers)
