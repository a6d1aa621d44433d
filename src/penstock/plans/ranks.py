"""Which rank is where: stages of replicas laid onto the ranks of a cluster, and found again from a plan.

The ranks of one stage in one replica are neighbours, numbered as `degrees` says. Beyond that there are two orders, of which the better
depends on what is sent over slow links, gradients or activations. Two stages, two replicas, tp 2:

                 replicas of a stage together        stages of a replica together
                 replica 0    replica 1              replica 0    replica 1
    stage 0         0 1          2 3                    0 1          4 5
    stage 1         4 5          6 7                    2 3          6 7
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

from penstock.errors import InputError, plural
from penstock.plans.degrees import Axis, DegreeRun, parts_of

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.plans.plan import Plan, Stage

__all__ = [
    "Replica", "Seat", "device_of_ranks", "flat_part", "groups_of", "holders", "packed_replicas", "pairs_of", "seats_of", "stage_ranks",
    "state_owners", "wrongly_started",
]  # fmt: skip

Replica = tuple[tuple[int, ...], ...]
"""The ranks of each stage of one replica."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A stage that a rank works on."""

    stage: int
    replica: int
    index: int
    """Its position among the stage's ranks in that replica."""


def stage_ranks(start: int, size: int, num_replicas: int, replica_size: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The ranks of a stage of `size` devices in each replica; `start` counts the devices of one replica that come before it.

    With `replica_size`, the devices of a whole replica, the stages of a replica are together, otherwise the replicas of a stage.

    >>> stage_ranks(2, 2, num_replicas=2), stage_ranks(2, 2, num_replicas=2, replica_size=4)
    (((4, 5), (6, 7)), ((2, 3), (6, 7)))
    """
    firsts = [start * num_replicas + r * size if replica_size is None else r * replica_size + start for r in range(num_replicas)]
    return tuple(tuple(range(first, first + size)) for first in firsts)


def packed_replicas(cluster: Cluster, kinds: Sequence[Sequence[int]], tp: int, depth: int) -> tuple[Replica, ...]:
    """As many replicas of `depth` groups of `tp` ranks as there is room for: inside a node, else of one kind, else of several.

    `kinds` are the ranks of each kind of device.

    Two nodes of three with depth 2:    node 0   0 0 1
                                        node 1   2 2 1     (replica 1 crosses)
    """
    found: list[Replica] = []
    left: list[tuple[int, ...]] = []
    for kind in kinds:
        apart: list[tuple[int, ...]] = []
        for ranks in _by_node(cluster, kind):
            groups = [tuple(ranks[start : start + tp]) for start in range(0, len(ranks) - tp + 1, tp)]
            whole = len(groups) // depth * depth
            found += [tuple(groups[at : at + depth]) for at in range(0, whole, depth)]
            apart += groups[whole:]
        whole = len(apart) // depth * depth
        found += [tuple(apart[at : at + depth]) for at in range(0, whole, depth)]
        left += apart[whole:]
    return (*found, *(tuple(left[at : at + depth]) for at in range(0, len(left) // depth * depth, depth)))


def _by_node(cluster: Cluster, ranks: Sequence[int]) -> list[list[int]]:
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        nodes[cluster.node_index(rank)].append(rank)
    return list(nodes.values())


def seats_of(plan: Plan) -> dict[int, list[Seat]]:
    """For each rank of a plan the stages that it works on: one, or with a chunked schedule several."""
    found: dict[int, list[Seat]] = defaultdict(list)
    for number, stage in enumerate(plan.stages):
        for replica, ranks in enumerate(stage.devices):
            for index, rank in enumerate(ranks):
                found[rank].append(Seat(number, replica, index))
    return dict(found)


def device_of_ranks(plan: Plan) -> dict[int, tuple[int, int]]:
    """The replica and the device group of each rank, as simulated timelines number them: a rank's first stage is that of its group."""
    return {rank: (first.replica, first.stage) for rank, (first, *_) in seats_of(plan).items()}


def wrongly_started(plan: Plan, started: int) -> InputError:
    """The error of a job with another number of processes than the plan has ranks."""
    was, ranks = "was" if started == 1 else "were", len(plan.ranks)
    return InputError(
        f"the plan has {plural(ranks, 'rank')}, but {plural(started, 'process')} {was} started. Start one for each: "
        f"torchrun --nproc-per-node {ranks} …"
    )


def holders(stage: Stage, run: DegreeRun, index: int = 0) -> tuple[int, ...]:
    """The ranks of all replicas that hold the same weights of a run's ops as the rank at `index`, and so sum their gradients."""
    places = run.degrees.with_same_weights(index, range(len(stage.devices[0])))  # the same in every replica
    return tuple(ranks[place] for ranks in stage.devices for place in places)


def state_owners(sizes: Mapping[int, int], ranks: Sequence[int]) -> dict[int, int]:
    """ZeRO-1: for each op of a run (its weights have `sizes` elements) the rank that keeps its optimizer state: the one with least so far.

    >>> state_owners({7: 10, 8: 4, 9: 4, 10: 5}, [2, 3])
    {7: 2, 8: 3, 9: 3, 10: 3}
    """
    loads = dict.fromkeys(ranks, 0)
    owners = {}
    for op, size in sizes.items():
        owners[op] = min(ranks, key=lambda rank: loads[rank])
        loads[owners[op]] += size
    return owners


def flat_part(size: int, index: int, count: int) -> tuple[int, int]:
    """ZeRO-2 and 3: which of `size` elements laid flat belong to rank `index` of `count`; the last parts may be shorter or empty.

    >>> [flat_part(7, index, 4) for index in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    width = -(-size // count)
    return min(index * width, size), min((index + 1) * width, size)


def groups_of(plan: Plan) -> list[tuple[int, ...]]:
    """Every group of two or more ranks that a plan communicates in, in one order for all ranks."""
    found: dict[tuple[int, ...], None] = {}
    for stage in plan.stages:
        runs = parts_of(stage)
        for run, ranks in product(runs, stage.devices):
            found.update((tuple(sorted(group)), None) for group in run.degrees.groups(Axis.TP, ranks))
        for index, run in product(range(len(stage.devices[0])), runs):
            found[tuple(sorted(holders(stage, run, index)))] = None
    return [ranks for ranks in found if len(ranks) > 1]


def pairs_of(plan: Plan) -> list[tuple[int, int]]:
    """Every pair of ranks of neighbouring stages, which may send to each other, in one order for all ranks."""
    found: set[tuple[int, int]] = set()
    for before, after in pairwise(plan.stages):
        for senders, receivers in zip(before.devices, after.devices, strict=True):
            found.update((min(a, b), max(a, b)) for a, b in product(senders, receivers) if a != b)
    return sorted(found)
