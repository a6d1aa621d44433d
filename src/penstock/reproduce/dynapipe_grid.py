"""DynaPipe's grid search: every degree of parallelism, for micro-batches made for each batch and for packed rows; the best as plans."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import BatchPlan
from penstock.batching.planner import plan_batch
from penstock.errors import InfeasibleError, ProfileMissingError
from penstock.files import write_json
from penstock.models.ops import Model
from penstock.plans.build import join_ranges, uniform_plan
from penstock.plans.plan import MicroBatching, Pattern, Plan, Stage
from penstock.plans.references import model_of
from penstock.plans.schema import plan_to_dict
from penstock.reproduce.dynapipe_batches import TOKENS, LengthBatch, drawn_batch, plan_packed
from penstock.reproduce.figures import Attached, Drawing, Evidence, FigureSpec, Plotted, at_least
from penstock.systems.dynapipe.inputs import DynaPipeLinks, PlannerConfig
from penstock.systems.dynapipe.rules import dynapipe_costs
from penstock.systems.dynapipe.search import DEFAULT_MB, configurations
from penstock.systems.dynapipe.tables import DynaPipeTables

__all__ = ["GRID", "GridPoint", "plan_of"]

_MODELS = {"gpt_6.7b": "gpt-6.7b", "t5_11b": "t5-11b"}
"""Our name of the model of each table."""
_TITLES = {"gpt_6.7b": "GPT 6.7B", "t5_11b": "T5 11B"}
_GPUS, _CLUSTER = 8, "8xa100-40gb"
_LENGTHS, _QUICK_LENGTHS = (512, 1024, 2048, 4096, 8192), (1024, 4096)
_ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Packed rows of a micro-batch that are tried."""
_WAYS = {"best": "Penstock", "packed": "packed rows, best degrees", "controlled": "packed rows, Penstock's degrees"}
_Costs = Mapping[PlannerConfig, PipelineCosts]


@dataclass(frozen=True)
class GridPoint:
    """One configuration of the grid and a batch under it; `rows` of packed rows in a micro-batch, 0 where micro-batches are dynamic."""

    config: PlannerConfig
    plan: BatchPlan
    rows: int = 0

    @property
    def title(self) -> str:
        """Degrees, and how samples are batched."""
        degrees = f"tp {self.config.tp}, pp {self.config.pp}, dp {self.config.dp}"
        return f"{degrees}, dynamic micro-batches" if not self.rows else f"{degrees}, micro-batch {self.rows}, recompute {self.mode}"

    @property
    def mode(self) -> str:
        """What packed rows recompute, the same everywhere."""
        return self.config.rc[next(micro.recompute[0] for replica in self.plan.replicas for micro in replica.micro_batches)]


def _costs(evidence: Evidence, table: str) -> _Costs:
    """The costs of every configuration that the tables hold."""

    def work() -> Iterator[tuple[PlannerConfig, PipelineCosts]]:
        tables = DynaPipeTables.open(evidence.folder / table)
        for config in configurations(tables, _GPUS, _GPUS, DEFAULT_MB):
            try:
                yield config, dynapipe_costs(tables, config)
            except ProfileMissingError:
                continue

    return evidence.once(f"grid {table}", lambda: dict(work()))


def _dynamic(costs: _Costs, batch: LengthBatch) -> GridPoint | None:
    """The best configuration for micro-batches that are planned for the batch, which are planned at once, without search."""
    found = []
    for config, own in costs.items():
        try:
            found.append(GridPoint(config, plan_batch(batch.samples, own)))
        except InfeasibleError:
            continue
    return min(found, key=lambda point: point.plan.predicted_s, default=None)


def _packed(costs: _Costs, batch: LengthBatch) -> GridPoint | None:
    """The best configuration, number of rows and mode of recomputation for packed rows."""
    found = []
    for config, own in costs.items():
        for rows in _ROWS:
            plan = plan_packed(own, batch, (rows,))
            if plan is None:  # nor do more rows fit
                break
            found.append(GridPoint(config, plan, rows))
    return min(found, key=lambda point: point.plan.predicted_s, default=None)


def _searched(costs: _Costs, batch: LengthBatch) -> dict[str, GridPoint]:
    """The best configuration, that of packed rows, and that of packed rows under the best one's degrees; those that fit."""
    best = _dynamic(costs, batch)
    controlled = None if best is None else _packed({best.config: costs[best.config]}, batch)
    found = {"best": best, "packed": _packed(costs, batch), "controlled": controlled}
    return {way: point for way, point in found.items() if point is not None}


def _pattern(model: Model, stage: Stage, mode: str) -> Pattern:
    """What a mode of DynaPipe recomputes of a stage: nothing, the core of attention, or all layers."""
    layers = {block.name for block, copies in model.runs if copies > 1}
    places = [place for place in model.ops[stage.first : stage.last] if place.block in layers]
    chosen = {"none": [], "selective": [place for place in places if place.op.kind == "attention"], "full": places}[mode]
    return join_ranges((place.index, place.index + 1) for place in chosen)


def plan_of(point: GridPoint, model: str, longest: int) -> Plan:
    """The plan of a configuration, for samples of up to `longest` tokens; packed rows are as long, in encoder and decoder."""
    config, dynamic, rows = point.config, not point.rows, point.rows or 1
    dec_length = (point.plan.longest[1] if dynamic else longest) if config.model == "t5" else 0
    sizes = {"base": model, "seq_length": longest, **({"dec_length": dec_length} if dec_length else {})}
    micro_batches = sum(len(micro.samples) if dynamic else 1 for replica in point.plan.replicas for micro in replica.micro_batches)
    global_batch = -(-micro_batches // config.dp) * config.dp * rows
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{model}.yaml"
        write_json(path, sizes)
        plan = uniform_plan(
            str(path), _CLUSTER, global_batch=global_batch, micro_batch=rows, pp=config.pp, tp=config.tp, replicas=config.dp,
            zero=config.zero,
        )  # fmt: skip
    own = model_of(plan)
    modes = config.rc if dynamic else (point.mode,)
    stages = tuple(replace(stage, recompute=tuple(_pattern(own, stage, mode) for mode in modes)) for stage in plan.stages)
    note = f"{point.title}: {point.plan.predicted_s * 1e3:,.0f} ms for a batch of {point.plan.num_tokens:,} tokens by DynaPipe's tables."
    return replace(
        plan, stages=stages, micro_batching=MicroBatching("padded", "dynamic") if dynamic else plan.micro_batching,
        dec_length=dec_length, notes=(note,),
    )  # fmt: skip


def _attached(found: Mapping[tuple[str, int], Mapping[str, GridPoint]], links: DynaPipeLinks) -> Iterator[Attached]:
    """A plan of each configuration found, and all of them as DynaPipe's tables name configurations."""
    entries = {}
    for (table, longest), points in found.items():
        for way, point in points.items():
            name = f"{_MODELS[table]}-{longest}-{way}"
            entries[name] = asdict(replace(point.config, note=point.title))
            text = json.dumps(plan_to_dict(plan_of(point, _MODELS[table], longest)), indent=2) + "\n"
            yield Attached(f"plans/{name}.json", f"{_TITLES[table]}, samples up to {longest:,} tokens, {_WAYS[way]}: {point.title}", text)
    yield Attached("configs.json", "all of them for `penstock batch --costs dynapipe:DIR/NAME`, to be put beside DynaPipe's tables",
                   json.dumps({"_common": asdict(links), "configs": entries}, indent=2) + "\n")  # fmt: skip


def _grid(evidence: Evidence) -> Drawing:
    lengths: Sequence[int] = _QUICK_LENGTHS if evidence.quick else _LENGTHS
    curves, claims, found = [], [], dict[tuple[str, int], dict[str, GridPoint]]()
    for table, title in _TITLES.items():
        costs = _costs(evidence, table)
        has_decoder = next(iter(costs.values())).has_decoder
        batches = {longest: drawn_batch(has_decoder, longest, TOKENS) for longest in lengths}
        found |= {(table, longest): _searched(costs, batch) for longest, batch in batches.items()}
        speeds = {way: [_speed(batches[longest], found[table, longest].get(way)) for longest in lengths] for way in _WAYS}
        curves += [Plotted(f"{title}: {label}", list(lengths), speeds[way]) for way, label in _WAYS.items()]
        gains = [own / rows for own, rows in zip(speeds["best"], speeds["packed"], strict=True) if own and rows]
        claims += [
            at_least(f"{title}: least speed-up over packed rows under the degrees that suit them best", min(gains), 1.0),
            at_least(f"{title}: the same for the longest samples that both fit", gains[-1], 1.05),
        ]
    attached = tuple(_attached(found, DynaPipeTables.open(evidence.folder / next(iter(_MODELS))).links))
    return Drawing(curves, "longest sample, tokens", "tokens per second", claims, "lines", log_x=True, attached=attached, note=(
        f"Of all tp, pp and dp on {_GPUS} GPUs the fastest by DynaPipe's tables, for batches of {TOKENS:,} tokens drawn like FLAN's from a "
        "fixed seed. Packed rows are searched over rows of a micro-batch and recomputation besides, once with all degrees and once with "
        "those that were best for dynamic micro-batches. Where a line ends, nothing fits."
    ))  # fmt: skip


def _speed(batch: LengthBatch, point: GridPoint | None) -> float | None:
    return batch.tokens_per_s(point.plan if point else None)


GRID = FigureSpec("grid", "grid search over tp, pp and dp, and its plans", _grid, ("configs.json",))
