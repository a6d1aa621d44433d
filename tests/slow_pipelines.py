"""Small pipelines for tests about slow devices, and who knows what could be done about them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from penstock.adapting.ladder import Ladder
from penstock.costs.sources import open_costs
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of

__all__ = ["FOUR", "MODEL", "ladder_of", "plan_of"]

MODEL = {"family": "gpt", "layers": 3, "hidden": 1024, "heads": 16, "seq_length": 1024, "vocab": 1024}


def plan_of(devices: list[list[tuple[int, ...]]], cluster: str = "8xa100-80gb", **more: Any) -> Plan:
    plan = Plan(MODEL, cluster, 16, (), MicroBatching("padded", samples=1), len(devices[0]), seq_length=1024)
    ops = model_of(plan).num_ops
    cuts = [ops * at // len(devices) for at in range(len(devices) + 1)]
    stages = [Stage(cuts[at], cuts[at + 1], tuple(own), Degrees(len(own[0])), **more) for at, own in enumerate(devices)]
    return replace(plan, stages=tuple(stages))


@cache
def ladder_of(cluster: str = "8xa100-80gb") -> Ladder:
    plan = plan_of([[(0,)]], cluster)
    own = cluster_of(plan)
    return Ladder(model_of(plan), own, open_costs("roofline", own))


FOUR = plan_of([[(0,)], [(1,)], [(2,)], [(3,)]], "4xa100-80gb")
"""Four stages on four devices."""
