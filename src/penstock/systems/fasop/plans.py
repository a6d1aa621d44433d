"""A row of FASOP's results as a plan: equal degrees, replicas of the whole pipeline, ranks that fill the nodes in order.

The layers that a row counts are blocks of a model here, embedding and head included. Of a model with an encoder and a decoder the
decoder's embedding is a layer of its own and the head belongs to the last one:

    FASOP   embedding | encoder × 24 | embedding | decoder × 23 | decoder + head
    here    embedding | encoder × 24 | bridge    | decoder × 23 | decoder, head
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, plural
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.ranks import stage_ranks
from penstock.plans.validity import require_valid
from penstock.systems.fasop.rows import FasopRow, require_sides_apart, stage_ops

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["chosen_row", "to_plan"]


def chosen_row(rows: Sequence[FasopRow], cluster: Cluster, given: int | None = None) -> tuple[int, list[str]]:
    """The number, from 1, of the row that is given, or of the fastest that fits memory and names the cluster's nodes; and remarks."""
    if given is not None:
        if not 1 <= given <= len(rows):
            raise InputError(f"row {given} was asked for; the file has rows 1 to {len(rows)} below its header.")
        return given, ["FASOP marks the row as out of memory"] if rows[given - 1].is_oom else []
    nodes = tuple(node.name for node in cluster.nodes)
    order = sorted(range(len(rows)), key=lambda index: _time_s(rows[index]))
    here = [index for index in order if rows[index].node_placement == nodes]
    if not here:
        raise _other_nodes(rows[order[0]], cluster)
    fitting = [index for index in here if not rows[index].is_oom]
    if not fitting:
        raise InputError(
            f"FASOP marks all {len(here)} rows on these nodes as out of memory (is_oom). Choose one by its number all the same, "
            "1 is the first below the header."
        )
    best = fitting[0]
    faster = [index for index in order if not rows[index].is_oom and _time_s(rows[index]) < _time_s(rows[best])]
    if not faster:
        return best + 1, []
    return best + 1, [f"row {faster[0] + 1} is faster, on nodes in the order {_listed(rows[faster[0]].node_placement)}"]


def _time_s(row: FasopRow) -> float:
    return math.inf if row.time_s is None else row.time_s


def _listed(nodes: Sequence[str]) -> str:
    """Nodes as the shorthand of a cluster: `1xp4d.24xlarge+3xg5.24xlarge`."""
    return "+".join(f"{len(list(same))}x{name}" for name, same in groupby(nodes))


def _other_nodes(row: FasopRow, cluster: Cluster) -> InputError:
    return InputError(
        f"FASOP's row is placed on {_listed(row.node_placement)}; the cluster is {_listed([node.name for node in cluster.nodes])}. "
        "Give nodes of these names in this order, in a cluster file if they are not those of the catalogue."
    )


def to_plan(
    row: FasopRow, model: Model, cluster: Cluster, *, model_ref: str | Mapping[str, Any], cluster_ref: str | Mapping[str, Any],
    global_batch: int,
) -> Plan:  # fmt: skip
    """The plan of a row, in the model's own precision: a row has no word for it. Its dp becomes replicas."""
    if row.node_placement != tuple(node.name for node in cluster.nodes):
        raise _other_nodes(row, cluster)
    used = row.tp * row.dp * row.pp
    if used != cluster.num_devices:
        per_node = f", {used // len(row.node_placement)} on each node" if used % len(row.node_placement) == 0 else ""
        raise InputError(
            f"FASOP's row has tp {row.tp} × dp {row.dp} × pp {row.pp} = {used} GPUs{per_node}; the cluster has {cluster.num_devices}. "
            "Describe nodes with as many GPUs in a cluster file."
        )
    if len(row.partition) != row.pp or min(row.partition) < 1:
        raise InputError(
            f"FASOP's row has the partition {list(row.partition)}; 1 layer or more for each of {plural(row.pp, 'stage')} was expected."
        )
    stages = tuple(
        Stage(first, last, stage_ranks(index * row.tp, row.tp, row.dp), Degrees(row.tp))
        for index, (first, last) in enumerate(stage_ops(model, row.partition, "FASOP's row"))
    )
    plan = Plan(
        model_ref, cluster_ref, global_batch, stages, MicroBatching("padded", "fixed", row.mbs), num_replicas=row.dp,
        seq_length=model.seq_length, dec_length=model.dec_length, precision=model.dtype,
    )  # fmt: skip
    require_valid(plan, model, cluster)
    require_sides_apart(plan, model)
    return plan
