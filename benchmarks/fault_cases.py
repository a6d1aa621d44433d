"""The fault matrix: what can happen to whom in which phase of a step, which of it makes no sense and why, and a covering set of the rest.

    kinds     killed, an exception, out of memory, stopped, cut off
    phases    of a step, an update, a save, a move, a recovery
    victims   ranks of one machine, in plans that have such a one; nodes of two; planners
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.runtime.recovering.faults import KINDS, PHASES

__all__ = ["NODES", "PIPELINE", "TENSOR", "VICTIMS", "FaultCase", "Victim", "cases", "covering", "part_of", "senseless"]

PIPELINE, TENSOR, NODES = "three stages of two ranks, ZeRO-1", "two stages of two tensor-parallel ranks", "two nodes"
"""Scenes: plans, and where they run."""


@dataclass(frozen=True)
class Victim:
    """Who is struck, in a scene that has such a one."""

    name: str
    scene: str
    ranks: tuple[int, ...] = ()
    """Whose processes."""
    nodes: tuple[int, ...] = ()
    """Whose supervisors."""


VICTIMS = (
    Victim("rank 0", PIPELINE, (0,)),
    Victim("first stage", PIPELINE, (1,)),
    Victim("middle stage", PIPELINE, (2,)),
    Victim("last stage", PIPELINE, (5,)),
    Victim("ZeRO owner", PIPELINE, (3,)),
    Victim("two neighbours", PIPELINE, (1, 2)),
    Victim("tp peer", TENSOR, (1,)),
    Victim("planner", PIPELINE),
    Victim("node", NODES, nodes=(1,)),
    Victim("supervisor that leads, with store and planner", NODES, nodes=(0,)),
    Victim("rank and its copy", NODES, (1,), (0,)),
)


@dataclass(frozen=True)
class FaultCase:
    """One entry of the matrix."""

    kind: str
    phase: str
    victim: Victim

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.kind} in {self.phase}, {self.victim.name}"


def senseless(case: FaultCase, *, cuts_links: bool = True) -> str:
    """Why a case cannot be; empty: it can. Links between nodes are cut where network namespaces can be made."""
    if case.victim.name == "planner":
        if case.kind not in ("kill", "freeze"):
            return "a planner that fails is a batch that cannot be planned, whoever plans it; it has no connection but to the store"
        return "" if case.phase == PHASES[0] else "planners know no phases: they are batches ahead"
    if case.victim.nodes and case.kind in ("fail", "oom"):
        return "a supervisor that fails ends, and its ranks with it: to all others that is one that is killed"
    if case.victim.nodes and case.kind == "cut" and not cuts_links:
        return "links are cut between network namespaces, which only root makes"
    if case.victim.nodes and case.victim.name != "node" and case.kind == "cut":
        return "two nodes have one link: cutting it parts a rank from its copy and from the one that leads, and is the case of a node"
    if case.phase == "reduction" and case.victim.scene in (TENSOR, NODES):
        return "this plan has one replica: nothing is reduced"
    return ""


def cases(
    kinds: Sequence[str] = KINDS, phases: Sequence[str] = PHASES, victims: Sequence[str] = (), *, cuts_links: bool = True
) -> tuple[list[FaultCase], dict[str, list[FaultCase]]]:  # fmt: skip
    """Those that can be, and those that cannot, by why."""
    chosen = [one for one in VICTIMS if not victims or one.name in victims]
    found, refused = list[FaultCase](), dict[str, list[FaultCase]]()
    for case in (FaultCase(*one) for one in itertools.product(kinds, phases, chosen)):
        why = senseless(case, cuts_links=cuts_links)
        if why:
            refused.setdefault(why, []).append(case)
        else:
            found.append(case)
    return found, refused


def _pairs(case: FaultCase) -> Iterator[tuple[str, str]]:
    yield from itertools.combinations((case.kind, case.phase, case.victim.name), 2)


def covering(all_cases: Sequence[FaultCase]) -> list[FaultCase]:
    """A few of the cases in which every kind meets every phase and every victim, and every phase every victim, as far as they can: greedily
    the one with most that is new."""
    left, found = {pair for case in all_cases for pair in _pairs(case)}, list[FaultCase]()
    while left:
        best = max(all_cases, key=lambda case: len(left.intersection(_pairs(case))))
        found.append(best)
        left.difference_update(_pairs(best))
    return found


def part_of(all_cases: Sequence[FaultCase], number: int, parts: int) -> list[FaultCase]:
    """The `number`th of so many parts, from 1 on, each with as many cases of every scene as the others: they take about as long."""
    by_scene = sorted(all_cases, key=lambda case: case.victim.scene)
    return by_scene[number - 1 :: parts]
