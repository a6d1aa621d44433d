"""After the last backward pass: who sums gradients with whom, and how weights that several stages share are kept equal."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import NamedTuple

from penstock.models.ops import Model
from penstock.models.stored import shared_weights, stored_name
from penstock.plans.degrees import parts_of
from penstock.plans.plan import OpRun, Plan, Stage
from penstock.plans.ranks import holders
from penstock.programs.instructions import ReduceGroup, SyncTied, TiedRows
from penstock.programs.routing import shard

__all__ = ["ranks_with", "reduce_groups", "sync_tied"]


def reduce_groups(stage: Stage, index: int) -> tuple[ReduceGroup, ...]:
    """For the rank at `index` of a stage's devices: all ranks of all replicas that hold the same weights, none if it is alone."""
    groups = []
    for part in parts_of(stage):
        ranks = holders(stage, part, index)
        if len(ranks) > 1:
            groups.append(ReduceGroup(part.first, part.last, ranks))
    return tuple(groups)


def ranks_with(stage: Stage, index: int, op: int) -> tuple[int, ...]:
    """For the rank at `index` of a stage's devices: all ranks that hold the same weights of an op; none if it is alone."""
    return next((group.ranks for group in reduce_groups(stage, index) if group.first <= op < group.last), ())


class _End(NamedTuple):
    """A stage that holds a shared weight, and how it divides the op."""

    stage: int
    run: OpRun


def sync_tied(model: Model, plan: Plan) -> dict[int, list[SyncTied]]:
    """For each rank, the shared weights it has to keep equal with other stages; owners in the same order on every rank."""
    found: dict[int, list[SyncTied]] = defaultdict(list)
    for name, (owner, ends) in _tied_ends(model, plan).items():
        rows = _divided_rows(model, name, owner)
        sends: dict[int, list[TiedRows]] = defaultdict(list)
        receives: dict[int, list[TiedRows]] = defaultdict(list)
        for replica in range(plan.num_replicas):
            for end, other in permutations(ends, 2):
                mine, its = plan.stages[end.stage].devices[replica], plan.stages[other.stage].devices[replica]
                for index, rank in enumerate(mine):
                    for lane, both in _pulls(end.run, other.run, index, rows):
                        receives[rank].append(TiedRows(end.stage, other.stage, its[lane], _local(both, end.run, index, rows)))
                        sends[its[lane]].append(TiedRows(other.stage, end.stage, rank, _local(both, other.run, lane, rows)))
        for rank in receives:
            found[rank].append(SyncTied(name, tuple(sends[rank]), tuple(receives[rank])))
    return found


def _divided_rows(model: Model, name: str, owner: int) -> int:
    """Rows of a shared weight, which tensor parallelism divides; 0 where it is whole on every rank."""
    place = model.ops[owner]
    config = place.op.config
    if "weights" not in config:
        return next((int(value) for key in ("vocab", "outputs") if (value := config.get(key))), 0)
    weight = next(weight for weight in config["weights"] if stored_name(place, weight) == name)
    return int(config["weights"][weight][0]) if weight.rpartition(".")[0] in config.get("tp", {}) else 0


def _tied_ends(model: Model, plan: Plan) -> dict[str, tuple[int, list[_End]]]:
    """For each trained weight that ops of several stages share, by the name that programs give it: the first such op, and all stages."""
    home = {op: index for index, stage in enumerate(plan.stages) for op in range(stage.first, stage.last)}
    found: dict[str, tuple[int, list[_End]]] = {}
    for name, ops in shared_weights(model).items():
        first = model.ops[ops[0]]
        ends: dict[int, OpRun] = {}
        for op in ops:
            ends.setdefault(home[op], plan.stages[home[op]].run_of(op))
        frozen = {stored_name(first, weight) for weight in first.op.config.get("frozen", ())}
        if len(ends) > 1 and name not in frozen:
            # An op of ours shares one weight, and stands for it.
            found[name if "weights" in first.op.config else first.name] = ops[0], [_End(*end) for end in sorted(ends.items())]
    return found


def _pulls(own: OpRun, other: OpRun, index: int, rows: int) -> list[tuple[int, tuple[int, int] | None]]:
    """(position among the other end's ranks, rows of the whole weight) that the rank at `index` takes from there."""
    share, place = divmod(index, own.tp)
    first = (share * other.dp // own.dp) * other.tp
    if own.tp == other.tp or not rows:  # not divided: any lane has the whole
        return [(first + place % other.tp, None)]
    wanted = shard(rows, own.tp, place)
    found: list[tuple[int, tuple[int, int] | None]] = []
    for lane in range(other.tp):
        had = shard(rows, other.tp, lane)
        both = max(wanted[0], had[0]), min(wanted[1], had[1])
        if both[0] < both[1]:
            found.append((first + lane, both))
    return found


def _local(wanted: tuple[int, int] | None, run: OpRun, index: int, rows: int) -> tuple[int, int] | None:
    """Rows of the whole weight, counted in the shard of the rank at `index`."""
    if wanted is None:
        return None
    start = shard(rows, run.tp, index % run.tp)[0]
    return wanted[0] - start, wanted[1] - start
