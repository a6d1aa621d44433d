"""Plans as DynPipe's two files and back: stages of whole blocks, replicated by samples, an update after every mini-batch.

What the files mean here: the schedule is `pipedream` (1F1B without a flush, weights stashed), DynPipe's mini-batch is the plan's
micro-batch, a stage's ranks are its `dp`, precision is fp32. The samples of one iteration, a stream of mini-batches, are in
neither file. Recomputed is the end of a stage; there as one piece, here block by block.
"""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, count, pairwise
from typing import TYPE_CHECKING

from penstock.errors import InputError
from penstock.plans.grid import refusal
from penstock.plans.plan import Degrees, MicroBatching, Pattern, Plan, Stage
from penstock.plans.references import cluster_of, model_of, with_precision
from penstock.plans.texts import format_ops, format_ranks
from penstock.plans.validity import require_valid
from penstock.schedules.rules import SCHEDULES
from penstock.systems.dynpipe.blocks import BlockPiece, block_ends, num_module_ops, pieces
from penstock.systems.dynpipe.files import DynPipePartition, Topology, require_match

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from penstock.clusters import Cluster
    from penstock.models.ops import Model

__all__ = ["SCHEDULE", "from_plan", "require_precision", "to_plan"]

TARGET = "DynPipe"
SCHEDULE = "pipedream"
PRECISION = "fp32"
IMAGES = ("vgg", "resnet")
"""Families that DynPipe trains with SGD, others with relatives of Adam."""


def to_plan(
    topology: Topology,
    partition: DynPipePartition | None,
    model: Model,
    cluster: Cluster,
    *,
    model_ref: str | Mapping[str, Any],
    cluster_ref: str | Mapping[str, Any],
    global_batch: int,
    mini_batch: int | None = None,
) -> Plan:
    """The plan that the files mean for a model on a cluster, which the references name in it.

    A topology alone needs `mini_batch`, and modules that are blocks or a single stage: otherwise nothing says where the cuts are.
    """
    model = with_precision(model, PRECISION)
    samples = _mini_batch(topology, partition, mini_batch)
    _require_ranks(topology)
    bounds = _bounds(_counts(topology, partition, model), model)
    ratios = partition.recompute_ratio if partition else (0.0,) * topology.num_stages
    chain = pieces(model)
    stages = tuple(
        Stage(first, last, (ranks,), Degrees(dp=len(ranks)), recompute=_recompute(stage, ratio, first, last, model, chain))
        for stage, ((first, last), ranks, ratio) in enumerate(zip(pairwise(bounds), topology.stage_to_rank_map, ratios, strict=True))
    )
    plan = Plan(
        model_ref, cluster_ref, global_batch, stages, MicroBatching("padded", "fixed", samples), schedule=SCHEDULE,
        seq_length=model.seq_length, dec_length=model.dec_length, precision=PRECISION,
        optimizer="sgd" if model.family in IMAGES else "adamw", notes=_depth_notes(topology),
    )  # fmt: skip
    require_valid(plan, model, cluster)
    return plan


def _mini_batch(topology: Topology, partition: DynPipePartition | None, given: int | None) -> int:
    if partition is None:
        if given is None:
            raise InputError("a DynPipe topology has no batch size. Give the mini-batch, or the partition file.")
        return given
    require_match(topology, partition)
    samples = partition.batch_size_all[0]
    if given not in (None, samples):
        raise InputError(f"the mini-batch is given as {given}, but batch_size_all of the DynPipe partition is {samples}. Drop one.")
    return samples


def _require_ranks(topology: Topology) -> None:
    """Ranks count from 0 without a gap, since DynPipe's processes are all of them."""
    ranks = sorted(rank for group in topology.stage_to_rank_map for rank in group)
    if ranks != list(range(len(ranks))):
        raise InputError(f"{TARGET} cannot express ranks {format_ranks(ranks)}: {len(ranks)} of them are numbered 0-{len(ranks) - 1}.")


def _depths(num_stages: int) -> tuple[int, ...]:
    """Mini-batches that each stage runs ahead before its first backward pass."""
    return tuple(SCHEDULES[SCHEDULE].in_flight(num_stages, stage, num_stages, 1)[0] - 1 for stage in range(num_stages))


def _depth_notes(topology: Topology) -> tuple[str, ...]:
    """Refuses other depths than the schedule's; a note where DynPipe's usual ones, of a topology without any, are others."""
    own, given = _depths(topology.num_stages), topology.stage_to_depth_map
    if given is not None and given != own:
        raise InputError(
            f"stage_to_depth_map is {_listed(given)}, but stages of a plan run {_listed(own)} mini-batches ahead, by their distance "
            "from the last. Use these, or drop the map."
        )
    widths = [len(ranks) for ranks in topology.stage_to_rank_map]
    usual = tuple((sum(widths[stage:]) - 1) // width for stage, width in enumerate(widths))
    if given is not None or usual == own:
        return ()
    return (f"DynPipe would run {_listed(usual)} mini-batches ahead; the stages of this plan run {_listed(own)}.",)


def _counts(topology: Topology, partition: DynPipePartition | None, model: Model) -> tuple[int, ...]:
    """DynPipe's blocks of each stage, from the partition, or from modules that are blocks."""
    total, modules = max(block_ends(model)), topology.module_to_stage_map[:-1]
    found = Counter(modules)
    per_stage = tuple(found[stage] for stage in range(topology.num_stages))
    if partition is None:
        if topology.num_stages == 1:
            return (total,)
        if len(modules) != total:
            raise InputError(
                f"module_to_stage_map has {len(modules)} modules, but model '{model.name}' has {total} blocks: it does not say where the "
                f"{topology.num_stages} stages are cut. Give the partition file."
            )
        return per_stage
    if sum(partition.partition) != total:
        raise InputError(
            f"partition is {_listed(partition.partition)}, {sum(partition.partition)} blocks, but model '{model.name}' has {total} there. "
            "Use the model that the files are for."
        )
    if len(modules) != topology.num_stages and per_stage != partition.partition:
        raise InputError(
            f"module_to_stage_map has {_listed(per_stage)} modules on the stages; one each, or one for each of their blocks "
            f"{_listed(partition.partition)} was expected."
        )
    return partition.partition


def _listed(values: Sequence[int]) -> str:
    return reprlib.repr(list(values))


def _bounds(counts: Sequence[int], model: Model) -> list[int]:
    """The first op of each stage, and the end."""
    ends = block_ends(model)
    bounds = [0]
    for stage, cut in enumerate(accumulate(counts)):
        if cut not in ends:
            below, above = max(end for end in ends if end < cut), min(end for end in ends if end > cut)
            raise InputError(
                f"stage {stage} ends after block {cut} of {TARGET}, inside what is one piece here: ops {ends[below]}:{ends[above]}, from "
                f"'{model.ops[ends[below]].name}'. End it after block {below} or {above}."
            )
        bounds.append(ends[cut])
    return bounds


def _recompute(stage: int, ratio: float, first: int, last: int, model: Model, chain: Sequence[BlockPiece]) -> tuple[Pattern, ...]:
    """The pattern that recomputes a share of the stage's last calculations."""
    own = [piece for piece in chain if first <= piece.first and piece.last <= last]
    total = sum(piece.num_calculations for piece in own)
    wanted, reached = int(ratio * total), 0
    for piece in reversed(own):
        if reached >= wanted:
            break
        reached, start = reached + piece.num_calculations, piece.first
    if reached != wanted:
        fewer = reached - next(piece.num_calculations for piece in own if piece.first == start)
        raise InputError(
            f"recompute_ratio.{stage} is {ratio}: the last {wanted} of the stage's {total} calculations begin inside what is one piece "
            f"here, from op {start} '{model.ops[start].name}'. Use {_ratio(fewer, total)} or {_ratio(reached, total)}."
        )
    return (((start, min(last, num_module_ops(model))),),) if wanted else ()


def from_plan(plan: Plan, model: Model | None = None, cluster: Cluster | None = None) -> tuple[Topology, DynPipePartition]:
    """The files that say the same as a plan; replicas become ranks of the stages, and what DynPipe does not know is refused."""
    model, cluster = model or model_of(plan), cluster or cluster_of(plan)
    require_valid(plan, model, cluster)
    _require_known(plan)
    ends, chain = {op: blocks for blocks, op in block_ends(model).items()}, pieces(model)
    for index, stage in enumerate(plan.stages):
        _require_plain(index, stage)
        if stage.first not in ends:
            below, above = max(op for op in ends if op < stage.first), min(op for op in ends if op > stage.first)
            what = f"it starts at op {stage.first} '{model.ops[stage.first].name}', inside a block"
            raise refusal(TARGET, index, what, f"Cut between blocks, at op {below} or {above}.")
    ranks = tuple(tuple(rank for group in stage.devices for rank in group) for stage in plan.stages)
    samples, last = (plan.micro_batching.samples or 0) * plan.num_replicas, plan.num_stages - 1
    topology = Topology((*range(plan.num_stages), last), ranks, _depths(plan.num_stages))
    _require_ranks(topology)
    return topology, DynPipePartition(
        partition=tuple(ends[stage.last] - ends[stage.first] for stage in plan.stages),
        recompute_ratio=tuple(_share(index, stage, chain) for index, stage in enumerate(plan.stages)),
        batch_size_all=(samples,),
        batch_size=tuple(samples // len(own) for own in ranks),
    )


def _require_known(plan: Plan) -> None:
    """Refuses schedules, layouts, batches and precisions that DynPipe has no word for."""
    for wrong, reason in (
        (
            plan.schedule != SCHEDULE,
            f"the schedule '{plan.schedule}': it updates after every mini-batch, without a flush. Set '{SCHEDULE}' if that is meant",
        ),
        (plan.micro_batching.layout != "padded", "packed micro-batches (micro_batching.layout). Plan for padded ones"),
        (plan.micro_batching.policy != "fixed", "micro-batches that differ from batch to batch. Set micro_batching.policy to 'fixed'"),
        (
            len(set(plan.micro_batching.per_replica)) > 1,
            "replicas with unequal numbers of micro-batches (micro_batching.per_replica). Drop it",
        ),
    ):
        if wrong:
            raise InputError(f"{TARGET} cannot express {reason}.")
    require_precision(plan.precision)


def require_precision(precision: str) -> None:
    """Refuses a precision that DynPipe does not train in."""
    if precision != PRECISION:
        raise InputError(f"{TARGET} cannot express precision {precision}: it trains in {PRECISION}. Search with --precision {PRECISION}.")


def _require_plain(index: int, stage: Stage) -> None:
    runs = format_ops(*((run.first, run.last) for run in stage.runs))
    for wrong, what, hint in (
        (stage.degrees.tp > 1, f"tp is {stage.degrees.tp}; it divides samples alone", "Use dp."),
        (bool(stage.runs), f"ops {runs} have degrees or a split of their own", "Drop the stage's runs."),
        (stage.zero > 0, f"zero is {stage.zero}; every rank keeps its whole optimizer state", "Use zero 0."),
        (len(stage.recompute) > 1, f"it has {len(stage.recompute)} recomputation patterns", "Keep one."),
    ):
        if wrong:
            raise refusal(TARGET, index, what, hint)


def _share(index: int, stage: Stage, chain: Sequence[BlockPiece]) -> float:
    """The share of the stage's calculations that is recomputed; they must be the last ones."""
    own = [piece for piece in chain if stage.first <= piece.first < stage.last]
    again, end = sorted(stage.first + position for position in stage.recomputed()), own[-1].last
    if not again:
        return 0
    starts = [piece.first for piece in own]
    if again != list(range(again[0], end)) or again[0] not in starts:
        near = max(start for start in starts if start <= min(again[0], starts[-1]))
        what = f"it recomputes ops {format_ops(*stage.pattern())}; it knows whole calculations up to the end of the stage, without the loss"
        raise refusal(TARGET, index, what, f"Recompute {near}:{end}, or nothing.")
    recomputed = sum(piece.num_calculations for piece in own if piece.first >= again[0])
    return _ratio(recomputed, sum(piece.num_calculations for piece in own))


def _ratio(recomputed: int, total: int) -> float:
    """The shortest decimal of which DynPipe makes `recomputed`: it cuts off the fraction of ratio × total."""
    if recomputed in (0, total):
        return recomputed // total
    tried: Iterator[float] = ((-(-recomputed * 10**digits // total) + more) / 10**digits for digits in count(1) for more in (0, 1))
    return next(ratio for ratio in tried if int(ratio * total) == recomputed)  # 0.29 × 100 is below 29
