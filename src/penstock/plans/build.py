"""Plain plans: equal stages on equal groups of devices, as Megatron-LM would be told by its flags."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from penstock.errors import InputError, plural
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.precision import chosen_lengths
from penstock.plans.ranks import stage_ranks
from penstock.plans.references import cluster_reference, model_reference, with_precision
from penstock.plans.validity import require_valid
from penstock.schedules.rules import DEFAULT_SCHEDULE

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import OpRange

__all__ = ["BESIDE", "block_ranges", "join_ranges", "uniform_cuts", "uniform_plan", "uniform_stages"]

BESIDE = ("embedding", "stem", "bridge", "head")
"""Blocks that are no share of the work to speak of: they go with a neighbour and are not recomputed."""


def uniform_plan(
    model_ref: str,
    cluster_ref: str,
    *,
    global_batch: int,
    micro_batch: int,
    pp: int = 1,
    tp: int = 1,
    dp: int = 1,
    replicas: int = 1,
    chunks: int = 1,
    schedule: str = DEFAULT_SCHEDULE,
    recompute: Literal["none", "full"] = "none",
    layout: Literal["padded", "packed"] = "padded",
    zero: int = 0,
    sequence_parallel: bool = False,
    seq_length: int | None = None,
    precision: str | None = None,
    gradients: str = "",
) -> Plan:
    """A valid plan of `pp` × `chunks` equal stages, each on `tp` × `dp` devices in each of `replicas` replicas.

    What Megatron-LM calls data parallel is `replicas`; `dp` divides the samples of one micro-batch. Recomputing `full`
    keeps the input of each block.

    >>> uniform_plan("gpt-1.3b", "4xa100-40gb", pp=4, global_batch=512, micro_batch=4).num_micro_batches
    128
    """
    from penstock.clusters import resolve_cluster
    from penstock.models.catalog import resolve_model

    _require_positive(pp=pp, tp=tp, dp=dp, replicas=replicas, chunks=chunks)
    model, cluster = resolve_model(model_ref), resolve_cluster(cluster_ref)
    model = with_precision(model, precision or model.dtype)
    needed = pp * tp * dp * replicas
    if needed > cluster.num_devices:
        raise InputError(
            f"pp {pp} × tp {tp} × dp {dp} × replicas {replicas} = {needed} devices, but the cluster ({cluster.describe()}) has "
            f"{cluster.num_devices}. Lower a degree, or use a larger cluster."
        )
    stages = uniform_stages(
        model, pp=pp, tp=tp, dp=dp, replicas=replicas, chunks=chunks, recompute=recompute == "full", zero=zero,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    length, dec_length, _ = chosen_lengths(model, seq_length)
    plan = Plan(
        model_reference(model_ref),
        cluster_reference(cluster_ref),
        global_batch,
        stages,
        MicroBatching(layout, "fixed", micro_batch),
        num_replicas=replicas,
        schedule=schedule,
        seq_length=length,
        dec_length=dec_length,
        precision=model.dtype,
        gradients=gradients,
    )
    require_valid(plan, model, cluster)
    return plan


def uniform_stages(
    model: Model, *, pp: int, tp: int, dp: int = 1, replicas: int = 1, chunks: int = 1, recompute: bool = False, zero: int = 0,
    sequence_parallel: bool = False,
) -> tuple[Stage, ...]:  # fmt: skip
    """`pp` × `chunks` equal stages, the replicas of each on neighbouring ranks."""
    return tuple(
        Stage(
            *ops,
            devices=stage_ranks(index % pp * tp * dp, tp * dp, replicas),
            degrees=Degrees(tp, dp),
            recompute=(_full_recompute(model, ops),) if recompute else (),
            zero=zero,
            sequence_parallel=sequence_parallel,
        )
        for index, ops in enumerate(uniform_cuts(model, pp * chunks))
    )


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}; 1 or more was expected.")


def block_ranges(model: Model) -> list[tuple[str, OpRange]]:
    """The name and the ops of each block of the chain."""
    found, first = [], 0
    for block, copies in model.runs:
        for _ in range(copies):
            found.append((block.name, (first, first + len(block.ops))))
            first += len(block.ops)
    return found


def uniform_cuts(model: Model, num_stages: int) -> list[OpRange]:
    """The ops of `num_stages` stages with equal numbers of blocks; embedding and head go with the first and the last."""
    starts = [first for name, (first, _) in block_ranges(model) if name not in BESIDE]
    if num_stages > len(starts):
        raise InputError(
            f"model '{model.name}' has {plural(len(starts), 'block')}, too few for {num_stages} stages. Use at most {len(starts)}."
        )
    cuts = [0, *(starts[index * len(starts) // num_stages] for index in range(1, num_stages)), model.num_ops]
    return list(pairwise(cuts))


def _full_recompute(model: Model, ops: OpRange) -> tuple[OpRange, ...]:
    """All blocks of a stage that count, joined where they touch."""
    return join_ranges(found for name, found in block_ranges(model) if name not in BESIDE and ops[0] <= found[0] < ops[1])


def join_ranges(ranges: Iterable[OpRange]) -> tuple[OpRange, ...]:
    """Ranges in order, those that touch as one."""
    joined: list[OpRange] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], last)
        else:
            joined.append((first, last))
    return tuple(joined)
