"""Plans that a search over FASOP's tables found: the file that `penstock search --out` writes of one, and the plan here that it means.

    {"setting": "gpt2XL-het", "mbs": 1, "stages": [{"layers": 5, "tp": 1, "dp": 2, "mbs": 1, "devices": [["A", 0, 2]]}, …]}

Layers are those of a row of FASOP's results. Devices are [kind of node, number of the node, GPUs of it] in the order of the ranks, those of
one tensor-parallel group together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from penstock.errors import InputError, plural
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.validity import require_valid
from penstock.systems.fasop.rows import stage_ops
from penstock.systems.tables import Count, read_checked

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["FasopPlan", "read_found_plan", "to_plan"]

Kind = Annotated[str, Field(max_length=100)]
NodeNumber = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]

_ORDER = "Give nodes of as many kinds, in the plan's order."


@dataclass(frozen=True)
class FasopStage:
    """Layers on some devices; `mbs` are samples of a micro-batch on each of `dp` replicas of the stage."""

    layers: Count
    tp: Count
    dp: Count
    mbs: Count
    devices: tuple[tuple[Kind, NodeNumber, Count], ...]


@dataclass(frozen=True)
class FasopPlan:
    """A plan in FASOP's words with unequal stages, for which FASOP itself has no file."""

    setting: Kind
    mbs: Count
    stages: Annotated[tuple[FasopStage, ...], Field(min_length=1, max_length=10_000)]


def read_found_plan(path: str | Path) -> FasopPlan:
    """The plan in a file that a search wrote, checked."""
    return read_checked(Path(path), "plan over FASOP's tables", FasopPlan)


def to_plan(
    found: FasopPlan, model: Model, cluster: Cluster, *, model_ref: str | Mapping[str, Any], cluster_ref: str | Mapping[str, Any],
    global_batch: int,
) -> Plan:  # fmt: skip
    """The plan for `model` on the nodes of `cluster`, in the order of their numbers; GPUs that it does not name idle."""
    ops, samples = stage_ops(model, [stage.layers for stage in found.stages], "the plan"), found.stages[0].mbs * found.stages[0].dp
    for index, stage in enumerate(found.stages):
        if stage.mbs * stage.dp != samples:
            raise InputError(
                f"stage {index} has micro-batches of {stage.mbs} × {stage.dp} samples, stage 0 of {samples}. "
                "All stages of a plan have as many."
            )
    stages = tuple(
        Stage(first, last, (ranks,), Degrees(stage.tp, stage.dp))
        for stage, ranks, (first, last) in zip(found.stages, _ranks(found, cluster), ops, strict=True)
    )
    plan = Plan(
        model_ref, cluster_ref, global_batch, stages, MicroBatching("padded", "fixed", samples), seq_length=model.seq_length,
        dec_length=model.dec_length, precision=model.dtype,
    )  # fmt: skip
    require_valid(plan, model, cluster)
    return plan


def _ranks(found: FasopPlan, cluster: Cluster) -> list[tuple[int, ...]]:
    """The ranks of each stage: of every node those that no stage before it has."""
    _require_same_nodes(found, cluster)
    of_node: dict[int, list[int]] = defaultdict(list)
    for rank in range(cluster.num_devices):
        of_node[cluster.node_index(rank)].append(rank)
    free = {node: iter(ranks) for node, ranks in of_node.items()}
    return [tuple(rank for _, node, count in stage.devices for rank in islice(free[node], count)) for stage in found.stages]


def _require_same_nodes(found: FasopPlan, cluster: Cluster) -> None:
    """Refuses nodes that the cluster does not have, has too few GPUs of, or has of other kinds than the plan tells apart."""
    nodes, taken, kinds = list(cluster.nodes), defaultdict[int, int](int), dict[str, str]()
    for index, stage in enumerate(found.stages):
        if (gpus := sum(count for _, _, count in stage.devices)) != stage.tp * stage.dp:
            raise InputError(f"stage {index} has {plural(gpus, 'GPU')}; tp {stage.tp} × dp {stage.dp} was expected.")
        for kind, number, count in stage.devices:
            if number >= len(nodes):
                raise InputError(f"stage {index} has GPUs of node {number}; the cluster has {plural(len(nodes), 'node')}, numbered from 0.")
            name = nodes[number].name
            if kinds.setdefault(kind, name) != name:
                others = f"other nodes of the plan's kind {kind} are '{kinds[kind]}'"
                raise InputError(f"node {number} of the cluster is '{name}', {others}. {_ORDER}")
            taken[number] += count
    if len(set(kinds.values())) < len(kinds):
        theirs, ours = ", ".join(kinds), ", ".join(kinds.values())
        raise InputError(f"the plan has nodes of the kinds {theirs}; in the cluster they are {ours}. {_ORDER}")
    for number, count in taken.items():
        if count > nodes[number].num_devices:
            raise InputError(f"the plan has {count} GPUs of node {number}; '{nodes[number].name}' has {nodes[number].num_devices}.")
