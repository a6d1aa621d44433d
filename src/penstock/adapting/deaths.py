"""Who witnesses the deaths in a run: writes them down among its events, and finds a plan for the devices that are left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.adapting.events import RunEvent, append_event
from penstock.errors import InfeasibleError
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.texts import format_ranks
from penstock.plans.validity import check_plan

__all__ = ["RunWitness"]

_LOST_FACTOR = 1e3
"""So much slower than the others a device counts that is lost: whatever plan leaves it out is better."""


class RunWitness:
    """The witness of one run, which its launcher asks after every death."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = folder

    def tell(self, event: str, step: int, text: str, *, ranks: Sequence[int] = (), pause_s: float | None = None) -> None:
        """Adds an event to those of the run, if its folder takes any: one that is full or gone hinders whoever has to write there."""
        with suppress(OSError):
            append_event(self._folder, RunEvent(event, step, time.time(), text, ranks=tuple(ranks), pause_s=pause_s))

    def smaller_plan(self, plan: Plan, lost: Sequence[int], devices: Sequence[int]) -> Plan:
        """The fastest plan of those that the ladder of remedies has for slow devices, among those that leave the lost ones out: devices
        without work take their place, replicas go without theirs, or the pipeline without their stages, or their part of one."""
        from penstock.adapting.ladder import Ladder  # the search takes seconds to import, which most runs never need
        from penstock.adapting.leaving_out import plans_without
        from penstock.costs.sources import open_costs
        from penstock.costs.speeds import Speeds

        model, cluster, speeds = model_of(plan), cluster_of(plan), Speeds.of(dict.fromkeys(lost, _LOST_FACTOR))
        ladder = Ladder(model, cluster, open_costs(plan.costs, cluster), devices=devices)
        without = plans_without(plan, lost, ladder.estimator(speeds))
        valid = (one for one in without if not check_plan(one, model, cluster) and not unsupported(one, model))
        options = ladder.options(plan, speeds, valid)
        left = [one for one in options if not one.refused and not set(one.plan.ranks) & set(lost)]
        if not left:
            why = "; ".join(f"{one.rung}: {one.refused}" for one in options if one.refused) or "its plan has no part that can be left out"
            raise InfeasibleError(f"nothing is left for training without rank {format_ranks(lost)} ({why}).")
        return min(left, key=lambda one: one.time_s).plan
