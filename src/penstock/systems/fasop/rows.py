"""FASOP's result rows: one plan each, with equal degrees everywhere, its nodes in order and its layers by stage.

Files differ by version in the columns after the partition; those that a file lacks are None, and so are empty cells. Memory is
printed there as a torch tensor (`tensor([9.0552])`), which is read as its number, in GiB.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.files import write_text
from penstock.plans.build import block_ranges
from penstock.plans.grid import grid_of, refusal
from penstock.plans.references import cluster_of, model_of
from penstock.schedules.rules import DEFAULT_SCHEDULE
from penstock.systems.tables import Row, read_rows

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = [
    "COLUMNS",
    "FasopRow",
    "fasop_text",
    "layer_starts",
    "read_fasop_rows",
    "require_sides_apart",
    "row_of_plan",
    "stage_ops",
    "write_fasop_rows",
]

TARGET = "FASOP"
COLUMNS = {
    "mbs": "mbs", "tp": "tp", "dp": "dp", "pp": "pp", "node_placement": "node placement", "num_a100": "num_a100", "num_a10": "num_a10",
    "partition": "partition", "time_s": "estimated time (s/step)", "pipeline_s": "pipeline time", "dp_all_reduce_s": "DP all-reduce time",
    "embedding_all_reduce_s": "embedding layer all-reduce time", "price_usd_per_step": "price_per_step", "is_oom": "is_oom",
    "memory_gib": "oom_gpumem", "is_fsdp_oom": "is_fsdp_oom", "fsdp_memory_gib": "fsdpoom_gpumem", "train_cost_usd": "train_cost",
}  # fmt: skip
"""The column of each field; older files say `step/s` of the seconds per step and abbreviate the embedding."""
_ALIASES = {"estimated time (step/s)": "estimated time (s/step)", "Emb layer all-reduce time": "embedding layer all-reduce time",
            "embedding all-reduce time": "embedding layer all-reduce time", "gpumem": "oom_gpumem"}  # fmt: skip
_NUMBER = r"[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?"


@dataclass(frozen=True, slots=True)
class FasopRow:
    """One row. The partition counts the embedding and the head as layers of the first and the last stage."""

    mbs: int
    """Samples of a micro-batch on one data-parallel rank."""
    tp: int
    dp: int
    pp: int
    node_placement: tuple[str, ...]
    """Instance name of each node, in rank order."""
    partition: tuple[int, ...]
    num_a100: int | None = None
    num_a10: int | None = None
    time_s: float | None = None
    pipeline_s: float | None = None
    dp_all_reduce_s: float | None = None
    embedding_all_reduce_s: float | None = None
    price_usd_per_step: float | None = None
    is_oom: bool | None = None
    memory_gib: float | None = None
    is_fsdp_oom: bool | None = None
    fsdp_memory_gib: float | None = None
    train_cost_usd: float | None = None


def read_fasop_rows(path: str | Path) -> list[FasopRow]:
    """Every row of a result file, in its order."""
    needed = [COLUMNS[name] for name in ("mbs", "tp", "dp", "pp", "node_placement", "partition")]
    return [_read(row) for row in read_rows(Path(path), needed)]


def _read(row: Row) -> FasopRow:
    cells = {_ALIASES.get(column, column): cell for column, cell in row.cells.items()}
    row = Row(row.path, row.line, cells)
    values: dict[str, Any] = {}
    for field in fields(FasopRow):
        column = COLUMNS[field.name]
        if column in cells and cells[column].strip():
            values[field.name] = _READERS[field.name](row, column)
        elif field.name in ("mbs", "tp", "dp", "pp", "node_placement", "partition"):
            raise row.error(column, "a value")
    found = FasopRow(**values)
    if len(found.partition) != found.pp:
        raise row.error(COLUMNS["partition"], f"{plural(found.pp, 'number')}, one for each of the stages (pp)")
    return found


def _count(row: Row, column: str) -> int:
    value = row.number(column)
    if not 1 <= value <= 1e7 or value != int(value):
        raise row.error(column, "a whole number, 1 or more")
    return int(value)


def _names(row: Row, column: str) -> tuple[str, ...]:
    cell = row.text(column)
    if not re.fullmatch(r"\['[^',\[\]\"\\]+'(, '[^',\[\]\"\\]+')*\]", cell):
        raise row.error(column, "a list of names such as ['p4d.24xlarge', 'g5.24xlarge']")
    return tuple(re.findall(r"'([^']+)'", cell))


def _counts(row: Row, column: str) -> tuple[int, ...]:
    cell = row.text(column)
    if not re.fullmatch(r"\[[0-9]{1,7}(, ?[0-9]{1,7})*\]", cell):
        raise row.error(column, "a list of numbers such as [11, 13]")
    return tuple(int(number) for number in cell[1:-1].split(","))


def _flag(row: Row, column: str) -> bool:
    return row.choice(column, ("True", "False")) == "True"


def _memory(row: Row, column: str) -> float:
    match = re.fullmatch(rf"(tensor\(\[?)?({_NUMBER})(\]?\))?", row.text(column))
    if match is None or not math.isfinite(float(match[2])):
        raise row.error(column, "a number such as 9.05 or tensor([9.05])")
    return float(match[2])


_READERS: dict[str, Callable[[Row, str], Any]] = {
    **dict.fromkeys(("mbs", "tp", "dp", "pp"), _count),
    **dict.fromkeys(("num_a100", "num_a10"), Row.count),
    **dict.fromkeys(("is_oom", "is_fsdp_oom"), _flag),
    **dict.fromkeys(("memory_gib", "fsdp_memory_gib"), _memory),
    **dict.fromkeys(
        ("time_s", "pipeline_s", "dp_all_reduce_s", "embedding_all_reduce_s", "price_usd_per_step", "train_cost_usd"), Row.number
    ),
    "node_placement": _names,
    "partition": _counts,
}


def fasop_text(rows: Iterable[FasopRow]) -> str:
    """The rows as a result file, the fastest first as FASOP sorts them."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS.values())
    for row in sorted(rows, key=lambda row: math.inf if row.time_s is None else row.time_s):
        writer.writerow([_cell(getattr(row, name)) for name in COLUMNS])
    return stream.getvalue()


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        odd = [name for name in value if isinstance(name, str) and (not name or set(name) & set("',[]\\\"") or not name.isprintable())]
        if odd:
            raise InputError(f"{TARGET}'s rows cannot name a node {odd[0]!r}. Use a name without quotes, commas and brackets.")
        return str(list(value))
    return str(value)


def write_fasop_rows(path: str | Path, rows: Iterable[FasopRow]) -> None:
    """Writes a file that `read_fasop_rows` reads back."""
    write_text(path, fasop_text(rows))


def row_of_plan(plan: Plan, model: Model | None = None) -> FasopRow:
    """The row that says the same as a plan; several kinds of devices are what FASOP is for, other freedoms are refused."""
    model, cluster = model or model_of(plan), cluster_of(plan)
    grid = grid_of(plan, TARGET, (DEFAULT_SCHEDULE,), model, cluster, mixed=True)
    for index, (stage, part) in enumerate(zip(plan.stages, grid.parts, strict=True)):
        if any(block.recomputed for block in part):
            raise refusal(TARGET, index, "it recomputes ops", "Plan without recomputation.")
        if grid.zero or (stage.sequence_parallel and grid.tp > 1):
            what = f"zero is {grid.zero}" if grid.zero else "it has sequence parallelism"
            raise refusal(TARGET, index, f"{what}, for which a row has no column", "Plan without it.")
    require_sides_apart(plan, model)
    starts = layer_starts(model)
    for index, stage in enumerate(plan.stages):
        if stage.first not in starts:
            what = f"it starts at op {stage.first} '{model.ops[stage.first].name}', which belongs to the layer before it there"
            raise refusal(TARGET, index, what, f"Cut at op {max(start for start in starts if start < stage.first)}, or drop the cut.")
    idle = cluster.num_devices - len(plan.ranks)
    if idle:
        raise InputError(f"{TARGET} cannot express {idle} idle devices: it always uses all {cluster.num_devices}. Give a smaller cluster.")
    nodes, memory = list(cluster.nodes), plan.predicted.memory if plan.predicted else ()
    smallest = [min(cluster.device(rank).memory_bytes for ranks in stage.devices for rank in ranks) for stage in plan.stages]
    return FasopRow(
        grid.micro_batch, grid.tp, grid.dp, grid.pp, tuple(node.name for node in nodes),
        tuple(sum(stage.first <= start < stage.last for start in starts) for stage in plan.stages),
        num_a100=sum(node.device.name.startswith("a100") for node in nodes),
        num_a10=sum(node.device.name.startswith("a10") and not node.device.name.startswith("a100") for node in nodes),
        time_s=plan.predicted.time_s if plan.predicted else None,
        price_usd_per_step=plan.predicted.price_usd if plan.predicted else None,
        is_oom=any(used.total_bytes > limit for used, limit in zip(memory, smallest, strict=True)) if memory else None,
        memory_gib=max(used.total_bytes for used in memory) / 2**30 if memory else None,
    )  # fmt: skip


def layer_starts(model: Model) -> list[int]:
    """The first op of each layer that FASOP counts: of each block; beside a decoder the head goes with the layer before it."""
    blocks = block_ranges(model)
    decoder = any(name == "bridge" for name, _ in blocks)
    return [first for name, (first, _) in blocks if not (decoder and name == "head")]


def stage_ops(model: Model, layers: Sequence[int], what: str) -> list[tuple[int, int]]:
    """The ops of each stage from its layers; `what` has them, and is refused if the model has others."""
    starts = layer_starts(model)
    if sum(layers) != len(starts):
        raise InputError(
            f"{what} has {plural(sum(layers), 'layer')}, embedding and head included; model '{model.name}' has {len(starts)}. "
            "Use the model that it is for."
        )
    bounds = [*starts, model.num_ops]
    return list(pairwise(bounds[count] for count in (0, *accumulate(layers))))


def require_sides_apart(plan: Plan, model: Model) -> None:
    """A pipeline of T5 is cut between encoder and decoder, as FASOP's and Megatron-LM's is."""
    needed = model.config.get("required_cuts") or [first for name, (first, _) in block_ranges(model) if name == "bridge"]
    for index, stage in enumerate(plan.stages):
        for cut in needed:
            if plan.num_stages > 1 and stage.first < cut < stage.last:
                raise refusal(TARGET, index, "it holds encoder and decoder", f"Cut at op {cut} '{model.ops[cut].name}'.")
