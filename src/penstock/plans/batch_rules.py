"""Rules on samples: micro-batches that divide, lengths and layouts that the model takes."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.errors import plural

if TYPE_CHECKING:
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["batch_problems", "length_problems"]


def batch_problems(plan: Plan) -> Iterator[str]:
    """The global batch divides into micro-batches, and those over the dp of every stage."""
    batching, replicas = plan.micro_batching, plan.num_replicas
    idle = [rank for rank, _ in batching.slower if rank not in plan.ranks]
    if idle:
        yield f"micro_batching.slower names rank {idle[0]}, which has no work in this plan. Drop it."
    for one, other, _ in batching.slower_links:
        if not (one < other and {one, other} <= set(plan.ranks)):
            yield f"micro_batching.slower_links names {one}-{other}: two ranks of this plan were expected, the lower one first."
    if plan.global_batch < replicas:
        yield f"global_batch is {plan.global_batch}, but there are {replicas} replicas. Give each at least one sample."
    if batching.policy == "dynamic":
        if batching.per_replica:
            yield "micro_batching.per_replica is given, but the policy is 'dynamic'. Drop it, or set the policy to 'fixed'."
        return
    if batching.max_tokens is not None:
        yield f"micro_batching.max_tokens is {batching.max_tokens}, but the policy is 'fixed'. Drop it, or set the policy to 'dynamic'."
    if batching.samples is None:
        yield "micro_batching.samples is missing; the policy 'fixed' needs it. Give it, or set the policy to 'dynamic'."
        return
    yield from _share_problems(plan, batching.samples) if batching.per_replica else _division_problems(plan, batching.samples)
    for index, stage in enumerate(plan.stages):
        for dp in dict.fromkeys((stage.degrees.dp, *(run.dp for run in stage.runs))):
            if batching.samples % dp:
                near = _around(batching.samples, dp)
                yield (
                    f"stages.{index} splits a micro-batch over dp {dp}, but {dp} does not divide micro_batching.samples "
                    f"{batching.samples}. Use samples {near}, or another dp."
                )


def _share_problems(plan: Plan, samples: int) -> Iterator[str]:
    """Micro-batches given for each replica make up the global batch."""
    counts, replicas = plan.micro_batching.per_replica, plan.num_replicas
    if len(counts) != replicas:
        yield (
            f"micro_batching.per_replica has {plural(len(counts), 'entry')}, but num_replicas is {replicas}. Give one number for each "
            "replica."
        )
        return
    total = sum(counts)
    if total * samples == plan.global_batch:
        return
    whole, rest = divmod(plan.global_batch, samples)
    other = f"numbers whose sum is {whole}" if not rest and whole >= replicas else "another micro_batching.samples"
    yield (
        f"micro_batching.per_replica is {reprlib.repr(list(counts))}: {plural(total, 'micro-batch')} of {plural(samples, 'sample')} make "
        f"{total * samples}, but global_batch is {plan.global_batch}. Use {other}, or global_batch {total * samples}."
    )


def _division_problems(plan: Plan, samples: int) -> Iterator[str]:
    replicas, step = plan.num_replicas, plan.num_replicas * samples
    if plan.global_batch % step == 0:
        return
    sizes = _fitting_samples(plan, samples)
    other = f", or micro_batching.samples {' or '.join(map(str, sizes))}" if sizes else ""
    if plan.global_batch > step and plan.global_batch % samples == 0:
        other += f", or give replicas unequal numbers of micro-batches (micro_batching.per_replica, {plan.global_batch // samples} in all)"
    yield (
        f"global_batch is {plan.global_batch}, not a multiple of {plural(replicas, 'replica')} × {plural(samples, 'sample')} = {step}. "
        f"Use global_batch {_around(plan.global_batch, step)}{other}."
    )


def _around(value: int, step: int) -> str:
    """The multiples of `step` just below and above `value`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def _fitting_samples(plan: Plan, samples: int) -> list[int]:
    """The nearest micro-batch sizes below and above that divide a replica's share and suit every dp."""
    share, rest = divmod(plan.global_batch, plan.num_replicas)
    if rest:
        return []
    dp = math.lcm(*(stage.degrees.dp for stage in plan.stages), *(run.dp for stage in plan.stages for run in stage.runs))
    low = [divisor for divisor in range(1, math.isqrt(share) + 1) if share % divisor == 0]
    fitting = [size for size in (*low, *(share // divisor for divisor in low)) if size % dp == 0]
    below = max((size for size in fitting if size < samples), default=None)
    above = min((size for size in fitting if size > samples), default=None)
    return [size for size in (below, above) if size is not None]


def length_problems(plan: Plan, model: Model) -> Iterator[str]:
    """Layout and lengths are such as the model takes."""
    if plan.micro_batching.layout not in model.layouts:
        yield (
            f"micro_batching.layout is '{plan.micro_batching.layout}', but model '{model.name}' takes only "
            f"{', '.join(map(repr, model.layouts))}. Change the layout."
        )
    for field, given, usual in (
        ("seq_length", plan.seq_length, model.seq_length),
        ("dec_length", plan.dec_length, model.dec_length),
    ):
        if usual and not given:
            yield f"{field} is 0, but model '{model.name}' needs one. Its usual value is {usual}."
        elif given and not usual:
            yield f"{field} is {given}, but model '{model.name}' has no such input. Set it to 0."
    positions = min((op.config["max_positions"] for op in model.distinct_ops if op.config.get("max_positions")), default=plan.seq_length)
    if plan.seq_length > positions:
        yield f"seq_length is {plan.seq_length}, but model '{model.name}' has {positions} positions. Use at most {positions}."
