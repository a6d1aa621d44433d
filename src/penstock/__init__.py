"""Penstock plans and runs the parallel training of neural networks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that holds it. Names are looked up on first use, so that `import penstock` costs milliseconds.
_HOMES = {
    "DynamicLoader": "penstock.jobs.dynamic_loader",
    "InputError": "penstock.errors",
    "MicroBatch": "penstock.models.modules.cutting.seen",
    "Parallel": "penstock.runtime.parallel_module",
    "PenstockError": "penstock.errors",
    "Plan": "penstock.plans.plan",
    "Trainer": "penstock.jobs.trainer",
    "find_plans": "penstock.jobs.finding",
    "parallelize": "penstock.runtime.parallel_module",
    "train": "penstock.jobs.trainer",
}
# Names for those who build on the parts: found here too, but at home in their modules.
_PARTS = {
    "Adapter": "penstock.adapting.adapter",
    "MoveAbortedError": "penstock.adapting.moving",
    "move": "penstock.adapting.moving",
    "moves": "penstock.adapting.moves",
    "report": "penstock.reports.report",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name) or _PARTS.get(name)
    if home is None:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
