"""DynPipe's two files of a plan: the topology (which ranks run which stage) and the partition (blocks, batches, recomputation)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from penstock.errors import InputError, plural
from penstock.files import read_json, write_text, written_together
from penstock.systems.tables import Count, validated

__all__ = [
    "PARTITION_FILE", "TOPOLOGY_FILE", "DynPipePartition", "Topology", "read_files", "read_partition", "read_topology", "require_match",
    "write_files", "write_partition", "write_topology",
]  # fmt: skip

TOPOLOGY_FILE, PARTITION_FILE = "topology.json", "partition.json"
"""Their names in a folder of ours; DynPipe itself names them by model and number of GPUs."""

Index = Annotated[int, Field(strict=True, ge=0, le=10_000_000)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


@dataclass(frozen=True)
class Topology:
    """`hybrid_conf.json`, `mp_conf.json`, `dp_conf.json`: stages and their ranks; the maps of the file are tuples by stage here."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic's name for it)

    module_to_stage_map: tuple[Index, ...]
    """Stage of each module; the last entry is the criterion, which shares the last stage."""
    stage_to_rank_map: tuple[tuple[Index, ...], ...]
    stage_to_depth_map: tuple[Index, ...] | None = None
    """Micro-batches a stage runs ahead before its first backward."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_to_rank_map)

    def to_dict(self) -> dict[str, Any]:
        """The file's content: maps keyed by the stage's number as text."""
        data: dict[str, Any] = {"module_to_stage_map": list(self.module_to_stage_map)}
        data["stage_to_rank_map"] = {str(stage): list(ranks) for stage, ranks in enumerate(self.stage_to_rank_map)}
        if self.stage_to_depth_map is not None:
            data["stage_to_depth_map"] = {str(stage): depth for stage, depth in enumerate(self.stage_to_depth_map)}
        return data


@dataclass(frozen=True)
class DynPipePartition:
    """`vgg16_8.json`, `vpipe.json`: what each stage holds and how many samples its replicas get."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 (pydantic's name for it)

    partition: tuple[Count, ...]
    """Blocks of each stage."""
    recompute_ratio: tuple[Share, ...]
    """The share of a stage's last calculations that is recomputed."""
    batch_size_all: tuple[Count]
    """The global mini-batch, alone in a list."""
    batch_size: tuple[Count, ...]
    """Samples of one replica of each stage."""

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        return {name: list(value) for name, value in asdict(self).items()}


def read_topology(path: str | Path) -> Topology:
    """The topology of a file, checked."""
    where = f"DynPipe topology '{path}'"
    data = read_json(path, "DynPipe topology")
    if isinstance(data, dict):
        maps = {name: _by_stage(data[name], name, where) for name in ("stage_to_rank_map", "stage_to_depth_map") if name in data}
        data = {**data, **maps}
    topology = validated(Topology, data, where)
    _require(_topology_problems(topology), where)
    return topology


def _by_stage(value: object, name: str, where: str) -> list[Any]:
    """A map from "0", "1"… to anything, as a list."""
    if not isinstance(value, dict) or set(value) != {str(stage) for stage in range(len(value))}:
        raise InputError(f'{where}: {name} must be an object with the keys "0", "1", … one for each stage.')
    return [value[str(stage)] for stage in range(len(value))]


def write_topology(path: str | Path, topology: Topology) -> None:
    """Writes a topology that `read_topology` gives back."""
    _require(_topology_problems(topology), f"the DynPipe topology to write to '{path}'")
    write_text(path, json.dumps(topology.to_dict(), indent=4) + "\n")


def _topology_problems(topology: Topology) -> Iterator[str]:
    stages, modules = topology.num_stages, topology.module_to_stage_map
    if len(modules) < 2:
        yield f"module_to_stage_map has {plural(len(modules), 'entry')}; at least a module and the criterion were expected."
        return
    if list(modules) != sorted(modules) or set(modules) != set(range(stages)):
        yield f"module_to_stage_map is {_short(modules)}; stages 0 to {stages - 1} in order, each with a module, were expected."
    if modules[-1] != modules[-2]:
        yield f"module_to_stage_map ends in {modules[-2]}, {modules[-1]}; the criterion shares the stage of the last module."
    ranks = [rank for group in topology.stage_to_rank_map for rank in group]
    if any(not group for group in topology.stage_to_rank_map) or len(set(ranks)) != len(ranks):
        yield "stage_to_rank_map: every stage needs a rank, and every rank belongs to one stage."
    if topology.stage_to_depth_map is not None and len(topology.stage_to_depth_map) != stages:
        yield f"stage_to_depth_map has {plural(len(topology.stage_to_depth_map), 'entry')} for {plural(stages, 'stage')}."


def _short(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 12 else f"[{', '.join(map(str, values[:12]))}, …]"


def read_partition(path: str | Path) -> DynPipePartition:
    """The partition of a file, checked."""
    where = f"DynPipe partition '{path}'"
    partition = validated(DynPipePartition, read_json(path, "DynPipe partition"), where)
    _require(_partition_problems(partition), where)
    return partition


def write_partition(path: str | Path, partition: DynPipePartition) -> None:
    """Writes a partition that `read_partition` gives back."""
    _require(_partition_problems(partition), f"the DynPipe partition to write to '{path}'")
    write_text(path, json.dumps(partition.to_dict(), indent=4) + "\n")


def _partition_problems(partition: DynPipePartition) -> Iterator[str]:
    stages, total = len(partition.partition), partition.batch_size_all[0]
    if not stages:
        yield "partition is empty; the blocks of at least one stage were expected."
    for field in fields(DynPipePartition):
        values = getattr(partition, field.name)
        if field.name != "batch_size_all" and len(values) != stages:
            yield f"{field.name} has {plural(len(values), 'entry')}, partition has {stages}."
    for stage, samples in enumerate(partition.batch_size):
        if total % samples:
            yield f"batch_size.{stage} is {samples}, which does not divide batch_size_all {total}."


def require_match(topology: Topology, partition: DynPipePartition) -> None:
    """Refuses two files that do not belong together."""
    stages = len(partition.partition)
    if topology.num_stages != stages:
        raise InputError(f"the DynPipe topology has {plural(topology.num_stages, 'stage')}, the partition {stages}. Use files of one plan.")
    for stage, (ranks, samples) in enumerate(zip(topology.stage_to_rank_map, partition.batch_size, strict=True)):
        if samples * len(ranks) != partition.batch_size_all[0]:
            raise InputError(
                f"stage {stage}: batch_size {samples} × {plural(len(ranks), 'rank')} is {samples * len(ranks)}, "
                f"but batch_size_all is {partition.batch_size_all[0]}."
            )


def _require(problems: Iterator[str], where: str) -> None:
    found = list(problems)
    if found:
        raise InputError(f"{where} is not valid:\n" + "\n".join(f"  {problem}" for problem in found[:10]))


def read_files(path: str | Path, partition: str | Path | None = None) -> tuple[Topology, DynPipePartition | None]:
    """A folder with both files or a topology alone, or a topology file; a partition that is given counts before the folder's."""
    path = Path(path)
    if path.is_dir():
        own = path / PARTITION_FILE
        path, partition = path / TOPOLOGY_FILE, partition or (own if own.exists() else None)
    return read_topology(path), None if partition is None else read_partition(partition)


def write_files(folder: str | Path, topology: Topology, partition: DynPipePartition) -> None:
    """Writes both files into a folder from which `read_files` gives them back."""
    require_match(topology, partition)
    _require(_topology_problems(topology), f"the DynPipe topology to write to '{folder}'")
    with written_together():
        write_partition(Path(folder) / PARTITION_FILE, partition)
        write_topology(Path(folder) / TOPOLOGY_FILE, topology)
