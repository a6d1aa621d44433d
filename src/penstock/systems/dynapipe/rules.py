"""DynaPipe's cost model: what micro-batches take and keep on the stages of a configuration, in the form that batches are planned from."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.batching.costs import QUANTITIES, Floats, LayoutCosts, PipelineCosts
from penstock.errors import InputError, plural

if TYPE_CHECKING:
    from penstock.batching.plan import BatchPlan
    from penstock.systems.dynapipe.inputs import PlannerConfig
    from penstock.systems.dynapipe.tables import DynaPipeTables

__all__ = ["dynapipe_costs", "dynapipe_plan"]

_MB, _MS, _ITEM_BYTES = 1e6, 1e-3, 2
_Stage = tuple[int, int, bool]
"""Encoder layers, decoder layers, whether the head follows."""


def dynapipe_costs(tables: DynaPipeTables, config: PlannerConfig) -> PipelineCosts:
    """The pipeline of a configuration; times and memory are those of DynaPipe's own simulator."""
    stages, dims = _stages(tables, config), tables.dimensions
    classes = list(dict.fromkeys(stages))
    axes = _axes(tables, config)
    cells = [_cells(tables, config, axes, mode) for mode in config.rc]
    values = np.stack([np.stack([_stage_values(stage, cell) for cell in cells], axis=-2) for stage in classes], axis=-3)
    state = [_state_bytes(tables, config, stages, s) for s in range(config.pp)]
    replicas = config.dp
    return PipelineCosts(
        name=tables.name,
        layouts={"padded": LayoutCosts(axes, np.moveaxis(values, 0, 2).copy())},
        stage_class=np.tile(np.array([classes.index(stage) for stage in stages], dtype=np.int64), (replicas, 1)),
        state_bytes=np.tile(np.array(state), (replicas, 1)),
        limit_bytes=np.full((replicas, config.pp), config.memory_limit_bytes),
        hops=np.tile(_hops(tables, config, stages), (replicas, 1, 1, 1)),
        modes=tuple(config.rc),
        round_to=tables.links.round_seqlen_multiple,
        length_offset=0 if dims.has_decoder else -1,
        dec_offset=tables.links.extra_decoder_tokens if dims.has_decoder else 0,
        has_decoder=dims.has_decoder,
    )


def dynapipe_plan(batch: BatchPlan, modes: tuple[str, ...]) -> dict[str, Any]:
    """The plan as plain data with DynaPipe's words: sample ids, recompute modes by name, and the order of passes of each device."""
    replicas = []
    for replica in batch.replicas:
        orders = [[[action.micro_batch, "FB"[action.kind]] for action in device] for device in replica.schedule]
        replicas.append({
            "micro_batches": [list(one.samples) for one in replica.micro_batches],
            "recompute": [[modes[mode] for mode in one.recompute] for one in replica.micro_batches],
            "schedule": {"order": orders},
        })  # fmt: skip
    return {"replicas": replicas}


def _stages(tables: DynaPipeTables, config: PlannerConfig) -> list[_Stage]:
    sides = ["encoder"] * config.layers + ["decoder"] * (config.layers if tables.dimensions.has_decoder else 0)
    counts = config.layers_per_stage or (len(sides) // config.pp,) * config.pp
    if len(counts) != config.pp or sum(counts) != len(sides) or min(counts) < 1:
        raise InputError(
            f"layers_per_stage {list(counts)} does not place {plural(len(sides), 'layer')} on {plural(config.pp, 'stage')}; give one "
            "count each."
        )
    cuts = list(accumulate(counts, initial=0))
    held = [Counter(sides[first:last]) for first, last in pairwise(cuts)]
    return [(count["encoder"], count["decoder"], s == config.pp - 1) for s, count in enumerate(held)]


def _axes(tables: DynaPipeTables, config: PlannerConfig) -> tuple[Floats, Floats, Floats]:
    """Every knot of every table, so that interpolating between them gives what each table gives itself."""
    has_decoder = tables.dimensions.has_decoder
    rows: set[float] = set()
    enc: set[float] = set()
    dec: set[float] = set() if has_decoder else {0.0}
    for mode, component in product(config.rc, ("encoder", *(["decoder"] if has_decoder else []), "postprocess")):
        knots = tables.knots(component, config.tp, mode)
        rows.update(knots[0])
        (dec if component == "postprocess" and has_decoder else enc).update(knots[1])
        dec.update(*knots[2:])
    return np.array(sorted(rows)), np.array(sorted(enc)), np.array(sorted(dec))


def _cells(tables: DynaPipeTables, config: PlannerConfig, axes: tuple[Floats, Floats, Floats], mode: str) -> dict[str, Floats]:
    """Each component at every knot: [4 quantities, rows, length, decoder length] in seconds and bytes."""
    at = np.meshgrid(*axes, indexing="ij")
    units = np.array([_MS, _MS, _MB, _MB]).reshape(4, 1, 1, 1)
    components = ("encoder", *(["decoder"] if tables.dimensions.has_decoder else []), "postprocess")
    return {part: np.stack(tables.interpolate(part, config.tp, mode, *at)) * units for part in components}


def _stage_values(stage: _Stage, cells: dict[str, Floats]) -> Floats:
    """[rows, length, decoder length, quantities] of a stage: layers follow each other, each has its peak above what is stored so far."""
    total = np.zeros((len(QUANTITIES), *cells["encoder"].shape[1:]))
    with np.errstate(invalid="ignore"):  # 0 × infinite: as good as infinite, where one quantity is missing all are
        _add_layers(stage, cells, total)
    return np.moveaxis(total, 0, -1)


def _add_layers(stage: _Stage, cells: dict[str, Floats], total: Floats) -> None:
    forward, backward, stored, peak, other_peak, backward_peak = total
    for layers, part, top in ((stage[0], "encoder", peak), (stage[1], "decoder", other_peak)):
        if layers:
            cost = cells[part]
            top += stored + (layers - 1) * cost[2] + cost[3]
            forward += layers * cost[0]
            backward += layers * cost[1]
            stored += layers * cost[2]
    if stage[2]:
        forward += cells["postprocess"][0]
        backward += cells["postprocess"][1]
    backward_peak += stored


def _state_bytes(tables: DynaPipeTables, config: PlannerConfig, stages: list[_Stage], s: int) -> float:
    """Weights and optimizer state; each side brings an embedding where it begins. Of the modes' profiles the largest counts."""
    totals = []
    for mode in config.rc:
        total = 0.0
        for side, name in enumerate(("encoder", "decoder")):
            if stages[s][side]:
                total += stages[s][side] * tables.model_state_bytes(name, config.tp, mode, config.zero, config.dp)
                if not any(stage[side] for stage in stages[:s]):
                    total += tables.model_state_bytes("embedding", config.tp, mode, config.zero, config.dp)
        totals.append(total)
    return max(totals)


def _hops(tables: DynaPipeTables, config: PlannerConfig, stages: list[_Stage]) -> Floats:
    """[2, S - 1, 3]; a decoder stage sends the encoder's output (or its gradient) along with its own."""
    links, per_node = tables.links, config.gpus_per_node or tables.links.gpus_per_node
    node = [s * config.tp * config.dp // per_node for s in range(config.pp)]
    hops = np.zeros((2, config.pp - 1, 3))
    for s in range(config.pp - 1):
        inside = node[s] == node[s + 1]
        gbit = links.intra_node_gbit_per_s if inside else links.inter_node_gbit_per_s
        latency_us = links.intra_node_latency_us if inside else links.inter_node_latency_us
        token_s = tables.dimensions.hidden * _ITEM_BYTES * 8 / (gbit * 1e9)
        for way, decoder in enumerate((stages[s][1] > 0, stages[s + 1][1] > 0)):
            hops[way, s] = latency_us * 1e-6, token_s, token_s if decoder else 0.0
    return hops
