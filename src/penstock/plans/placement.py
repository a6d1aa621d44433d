"""Rules on what lies where: every op once, every rank in one place, degrees that the devices and the ops allow."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.errors import InputError, plural
from penstock.plans.degrees import AVAILABLE, Axis
from penstock.plans.texts import format_ops, format_ranks
from penstock.schedules.rules import CHUNKED_SCHEDULE, SCHEDULES

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.models.ops import Model
    from penstock.plans.plan import OpRange, Plan, Stage

__all__ = [
    "cluster_problems",
    "degree_problems",
    "mixed_kind_problems",
    "op_problems",
    "rank_problems",
    "split_problems",
    "sub_range_problems",
]


def op_problems(plan: Plan, num_ops: int | None) -> Iterator[str]:
    """Every op is placed exactly once and in order; without a model the end is not known."""
    placed = 0
    for index, stage in enumerate(plan.stages):
        here = f"stages.{index}.ops is {stage.first}:{stage.last}"
        if stage.last <= stage.first:
            yield f"{here}, which holds no op. Write FIRST:END with END above FIRST, or drop the stage."
        elif stage.first > placed:
            yield f"{here}, but the ops before it end at {placed}: {placed}:{stage.first} are placed nowhere. Start it at {placed}."
        elif stage.first < placed:
            both = format_ops((stage.first, min(placed, stage.last)))
            yield f"{here}, but the stages before it reach {placed}: {both} are placed twice. Start it at {placed}."
        placed = max(placed, stage.last)
    if num_ops is not None and placed != num_ops:
        lost = f"{placed}:{num_ops} are placed nowhere" if placed < num_ops else f"{num_ops}:{placed} do not exist"
        yield f"stages end at op {placed}, but the model has {num_ops} ops: {lost}. End the last stage at {num_ops}."


def sub_range_problems(plan: Plan) -> Iterator[str]:
    """Recomputed ops and runs lie inside their stage, in order and without overlap."""
    for index, stage in enumerate(plan.stages):
        for number, pattern in enumerate(stage.recompute):
            yield from _range_problems(f"stages.{index}.recompute.{number}", pattern, stage)
        yield from _range_problems(f"stages.{index}.runs", [(run.first, run.last) for run in stage.runs], stage)


def _range_problems(where: str, ranges: Sequence[OpRange], stage: Stage) -> Iterator[str]:
    reached = stage.first
    for first, last in ranges:
        if not stage.first <= first < last <= stage.last:
            yield f"{where} has ops {first}:{last}, which are not inside the stage's {stage.first}:{stage.last}. Give ops of the stage."
        elif first < reached:
            yield f"{where} has ops {first}:{last} after ops that reach {reached}. Give each op once, in order."
        reached = max(reached, last)


def degree_problems(plan: Plan) -> Iterator[str]:
    """Each replica has as many devices as the degrees want, in each stage and each of its runs."""
    for index, stage in enumerate(plan.stages):
        degrees = stage.degrees
        for axis in Axis:
            if axis not in AVAILABLE and degrees.of(axis) != 1:
                yield f"stages.{index}.degrees.{axis} is {degrees.of(axis)}; this axis is not available yet. Set it to 1."
        if len(stage.devices) != plan.num_replicas:
            yield (
                f"stages.{index}.devices has {plural(len(stage.devices), 'entry')}, but num_replicas is {plan.num_replicas}. "
                "Give one group of ranks for each replica."
            )
        wrong = [replica for replica, ranks in enumerate(stage.devices) if len(ranks) != stage.num_devices]
        if wrong:  # the first stands for all: with hundreds of replicas the rest would bury the other problems
            ranks = stage.devices[wrong[0]]
            yield (
                f"stages.{index}.devices.{wrong[0]} has {plural(len(ranks), 'rank')} ({format_ranks(ranks)}), but tp {degrees.tp} × dp "
                f"{degrees.dp} needs {stage.num_devices}. Change the ranks or the degrees."
            )
        for number, run in enumerate(stage.runs):
            if run.tp * run.dp != stage.num_devices:
                yield (
                    f"stages.{index}.runs.{number} has tp {run.tp} × dp {run.dp} = {run.tp * run.dp}, but the stage has "
                    f"{plural(stage.num_devices, 'device')}. Make the product {stage.num_devices}."
                )


def split_problems(plan: Plan, model: Model) -> Iterator[str]:
    """Every op allows its degree and its split; of the ops of a stage only the first that refuses is named."""
    for index, stage in enumerate(plan.stages):
        refusals = []
        for placed in model.ops[stage.first : stage.last]:
            run = stage.run_of(placed.index)
            try:
                placed.op.check_tp(run.tp, run.algo)
            except InputError as error:
                refusals.append(f"stages.{index}, op {placed.index} '{placed.name}': {error}")
        if refusals:
            more = f" As do {plural(len(refusals) - 1, 'more op')} of the stage." if len(refusals) > 1 else ""
            yield f"{refusals[0]}{more} {_fitting_tp(stage, model)}"


def _fitting_tp(stage: Stage, model: Model) -> str:
    limits = {placed.op.tp_limit for placed in model.ops[stage.first : stage.last]} - {0}
    divisor = math.gcd(stage.num_devices, *limits)
    fitting = [tp for tp in range(1, divisor + 1) if divisor % tp == 0]
    return f"On {plural(stage.num_devices, 'device')} all ops of the stage allow tp {', '.join(map(str, fitting))}."


def rank_problems(plan: Plan) -> Iterator[str]:
    """A rank belongs to one stage of one replica; the chunks of an interleaved schedule share theirs."""
    owners: dict[int, tuple[int, int]] = {}
    chunked = SCHEDULES[plan.schedule].chunked
    for index, stage in enumerate(plan.stages):
        for replica, ranks in enumerate(stage.devices):
            clashes: dict[tuple[int, int], list[int]] = {}
            for rank in ranks:
                owner = owners.setdefault(rank, (index, replica))
                chunk_of_same = chunked and stage.devices == plan.stages[owner[0]].devices
                if owner != (index, replica) and not (chunk_of_same and owner[1] == replica):
                    clashes.setdefault(owner, []).append(rank)
            for (other, other_replica), shared in clashes.items():
                hint = "" if chunked else f" Only chunks of the schedule '{CHUNKED_SCHEDULE}' share devices."
                yield (
                    f"stages.{index}.devices.{replica} and stages.{other}.devices.{other_replica} both have rank "
                    f"{format_ranks(shared)}. Give each rank to one stage of one replica.{hint}"
                )
            twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
            if twice:
                yield f"stages.{index}.devices.{replica} names rank {format_ranks(twice)} twice. Give each rank once."


def cluster_problems(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Every rank exists."""
    for index, stage in enumerate(plan.stages):
        missing = [rank for ranks in stage.devices for rank in ranks if rank >= cluster.num_devices]
        if missing:
            yield (
                f"stages.{index}.devices has rank {format_ranks(missing)}, but the cluster ({cluster.describe()}) has "
                f"{plural(cluster.num_devices, 'device')}: ranks {format_ranks(range(cluster.num_devices))}. Use those, or a larger "
                "cluster."
            )


def mixed_kind_problems(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """The devices of a tensor-parallel group are of one kind, since each waits for the slowest in every op."""
    for index, stage in enumerate(plan.stages):
        for tp in dict.fromkeys((stage.degrees.tp, *(run.tp for run in stage.runs))):
            for ranks in stage.tp_groups(tp):
                kinds = dict.fromkeys(cluster.device(rank).name for rank in ranks if rank < cluster.num_devices)
                if len(kinds) > 1:
                    yield (
                        f"stages.{index} splits ops over ranks {format_ranks(ranks)} (tp {tp}), which are {' and '.join(kinds)}. "
                        "Give a tensor-parallel group devices of one kind, or lower tp."
                    )
                    break
