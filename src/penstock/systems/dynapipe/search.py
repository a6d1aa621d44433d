"""Search over DynaPipe's cost model: the configuration, and the layers of each stage, that suit one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import TYPE_CHECKING

from penstock.errors import InfeasibleError, ProfileMissingError, plural
from penstock.systems.dynapipe.inputs import TABLES, PlannerConfig
from penstock.systems.dynapipe.rules import dynapipe_costs

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import BatchPlan, SampleLengths
    from penstock.systems.dynapipe.tables import DynaPipeTables

__all__ = ["DEFAULT_MB", "FoundConfiguration", "best_configuration", "best_layers", "configurations"]

DEFAULT_MB = 36_000.0
"""What DynaPipe uses of a GPU of 40 GB."""


@dataclass(frozen=True)
class FoundConfiguration:
    """Degrees, and the batch planned under them, with the bound of all configurations."""

    config: PlannerConfig
    plan: BatchPlan


def best_configuration(
    tables: DynaPipeTables, samples: Sequence[SampleLengths], gpus: int, per_node: int, memory_mb: float, progress: Callable[[str], None]
) -> tuple[FoundConfiguration, dict[str, float]]:
    """The fastest of all tp, pp and dp with equal stages, as DynaPipe's grid search tries them, and what each takes planned at once.

    The best is then planned with search; its bound is what no micro-batching under any of the configurations is below.
    """
    from penstock.batching.bounds.columns import FEW_KNOTS
    from penstock.batching.planner import batch_bound_s, plan_batch
    from penstock.batching.search import usual_steps

    found: dict[str, tuple[FoundConfiguration, PipelineCosts]] = {}
    for config in configurations(tables, gpus, per_node, memory_mb):
        name = f"tp {config.tp}, pp {config.pp}, dp {config.dp}"
        progress(name)
        try:
            costs = dynapipe_costs(tables, config)
            plan = replace(plan_batch(samples, costs), bound_s=batch_bound_s(samples, costs, FEW_KNOTS))
            found[name] = FoundConfiguration(config, plan), costs
        except (InfeasibleError, ProfileMissingError):
            continue
    if not found:
        raise InfeasibleError(
            f"no configuration of {tables.name} on {plural(gpus, 'GPU')} of {memory_mb:,.0f} MB fits these samples. Add some."
        )
    best, costs = min(found.values(), key=lambda pair: pair[0].plan.predicted_s)
    plan = plan_batch(samples, costs, steps=usual_steps(costs, len(samples)))
    bound_s = min(one.plan.bound_s for one, _ in found.values())
    return replace(best, plan=replace(plan, bound_s=bound_s)), {name: one.plan.predicted_s for name, (one, _) in found.items()}


def configurations(tables: DynaPipeTables, gpus: int, per_node: int, memory_mb: float) -> Iterator[PlannerConfig]:
    """Degrees that use all GPUs, tp inside a node, stages of equally many layers."""
    dims = tables.dimensions
    model = next(name for name, table in TABLES.items() if table == tables.table_name)
    for tp, pp in product((1, 2, 4, 8), range(1, gpus + 1)):
        if tables.modes(tp) and tp <= per_node and gpus % (tp * pp) == 0 and (2 if dims.has_decoder else 1) * dims.layers % pp == 0:
            yield PlannerConfig(model, dims.layers, tp, pp, gpus // (tp * pp), memory_mb, gpus_per_node=per_node, rc=tables.modes(tp))


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
