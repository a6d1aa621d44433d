"""Penstock plans and runs the parallel training of neural networks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that holds it. Names are looked up on first use, so that `import penstock` costs milliseconds.
_HOMES = {
    "Adapter": "penstock.adapting.adapter",
    "DynamicLoader": "penstock.data.loader",
    "Executor": "penstock.runtime.executor",
    "InfeasibleError": "penstock.errors",
    "InputError": "penstock.errors",
    "MicroBatch": "penstock.models.modules.cutting.seen",
    "MoveAbortedError": "penstock.adapting.moving",
    "Parallel": "penstock.runtime.parallel_module",
    "PenstockError": "penstock.errors",
    "ProfileMissingError": "penstock.errors",
    "TrainRequest": "penstock.runtime.request",
    "Trainer": "penstock.runtime.trainer",
    "move": "penstock.adapting.moving",
    "moves": "penstock.adapting.moves",
    "parallelize": "penstock.runtime.parallel_module",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
