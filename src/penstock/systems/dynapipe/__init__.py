"""DynaPipe: profiled layer times by micro-batch size and length, its configurations, and micro-batches planned by its cost model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import InputError, plural
from penstock.systems.system import System, TableAnswer, TableScore, TableSearch, parse_nodes

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


def _score(path: str, batch: Path) -> TableScore:
    """A planned batch, run again by the tables; what each stage of its slowest replica takes and holds."""
    from penstock.batching.plan import read_batch_plan
    from penstock.batching.workloads import batch_workload, require_priced
    from penstock.timing.execution import execute

    costs, planned = _batch_costs(path, (), False), read_batch_plan(batch)
    require_priced(planned, costs, f"batch '{batch}'")
    runs = [
        execute(replica.schedule, batch_workload(costs, replica.micro_batches, index))
        for index, replica in enumerate(planned.replicas) if replica.micro_batches
    ]  # fmt: skip
    slowest = max(runs, key=lambda run: run.makespan_s)
    stages = [
        {"computes_s": float(busy_s), "idle_s": slowest.pipeline_s - float(busy_s), "memory_mb": float(held) / 1e6}
        for busy_s, held in zip(slowest.device_busy_s(), slowest.peak_bytes, strict=True)
    ]
    fullest_mb = max(float(max(run.peak_bytes)) for run in runs) / 1e6
    what = f"{plural(planned.num_micro_batches, 'micro-batch')} on {plural(len(planned.replicas), 'replica')}"
    note = f"{what}; the fullest GPU holds {fullest_mb:,.0f} MB"
    return TableScore(f"the slowest replica of {batch.name} (dynapipe:{path})", slowest.makespan_s, stages, note)


def _search(asked: TableSearch, progress: Callable[[str], None]) -> TableAnswer:
    from penstock.batching.lengths import read_lengths
    from penstock.systems.dynapipe.search import DEFAULT_MB, best_configuration
    from penstock.systems.dynapipe.tables import DynaPipeTables

    if asked.lengths is None:
        raise InputError("--lengths is missing: DynaPipe's tables are by length. Give a CSV file of the samples of one global batch.")
    for name, given in (("--global-batch", asked.global_batch is not None), ("--micro-batches", bool(asked.micro_batches))):
        if given:
            raise InputError(f"{name} does not go with --costs {asked.costs}: the samples of --lengths are the batch. Drop it.")
    nodes, per_node = parse_nodes(asked.cluster, "DynaPipe's tables hold the one kind of GPUs that they were measured on.")
    tables = DynaPipeTables.open(Path(asked.folder) / asked.model)
    memory_mb = DEFAULT_MB if asked.memory_limit_gb is None else 1000 * asked.memory_limit_gb
    samples = read_lengths(asked.lengths)
    best, all_s = best_configuration(tables, samples, nodes * per_node, per_node, memory_mb, progress)
    config, plan = best.config, best.plan
    layers = (2 if tables.dimensions.has_decoder else 1) * config.layers // config.pp
    stages = [{"layers": layers, "gpus": config.tp * config.dp, "tp": [config.tp], "dp": [config.dp]} for _ in range(config.pp)]
    entry = {name: getattr(config, name) for name in ("model", "layers", "tp", "pp", "dp", "zero", "mem", "gpus_per_node", "rc")}
    return TableAnswer(
        f"best configuration of {asked.model} on {nodes} × {per_node} GPUs for {plural(len(samples), 'sample')} ({asked.costs})",
        plan.predicted_s, plan.bound_s, stages,
        {"num_gpus": nodes * per_node, "memory_limit_mb": memory_mb, "micro_batches": plan.num_micro_batches},
        f"{plural(plan.num_micro_batches, 'micro-batch')}; at most {memory_mb:,.0f} MB (10⁶ bytes) on a GPU",
        json.dumps({"configs": {"found": entry}}, indent=2) + "\n", baselines=all_s if asked.baselines else {},
    )  # fmt: skip


DYNAPIPE = System("dynapipe", search=_search, score=_score, batch_costs=_batch_costs)
