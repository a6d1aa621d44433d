"""What a row of FASOP's results takes by its own tables with every message charged: the time that our plans are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError
from penstock.search.space.stage_costs import Ints
from penstock.systems.fasop.rows import FasopRow
from penstock.systems.fasop.rules import Case, FasopProblem, Option, build_case

__all__ = ["PlacedRow", "placed_row", "row_time_s"]


class PlacedRow(NamedTuple):
    """A row on its nodes, as kernels take it."""

    case: Case
    option: Ints
    """[D] of each stage."""
    hops_s: Floats
    ring_bits_per_s: Floats
    """Of each stage's gradients."""
    tied_s: float


def placed_row(problem: FasopProblem, row: FasopRow) -> PlacedRow | None:
    """Ranks fill the nodes in the row's order; None where there are too few of them, or layers or profiles are missing."""
    from penstock.systems.fasop import kernels as kernels

    kinds = [_kind(problem, name) for name in row.node_placement]
    names, sizes = list(problem.kinds), [problem.kinds[kind].gpus_per_node for kind in kinds]
    ranks = [node for node, size in zip(_numbered(problem, kinds), sizes, strict=True) for _ in range(size)]
    if len(ranks) < row.tp * row.dp * row.pp or 0 in row.partition or sum(row.partition) != len(problem.model.layer_types):
        return None
    nodes = np.array(ranks[: row.tp * row.dp * row.pp : row.tp]).reshape(row.pp, row.dp)
    kind_of = np.repeat(np.arange(len(names)), problem.counts)
    options = [Option(tuple(sorted({int(kind_of[node]) for node in stage})), row.tp, row.dp) for stage in nodes]
    distinct = list(dict.fromkeys(options))
    if any((problem.kinds[names[kind]].gpu, row.tp, row.mbs) not in problem.times_s for option in distinct for kind in option.kinds):
        return None
    case, chosen = build_case(problem, row.mbs * row.dp, distinct), np.array([distinct.index(option) for option in options])
    hops, ring = np.zeros(row.pp), np.zeros(row.pp)
    tied = kernels.messages(case, chosen, nodes, hops, ring)
    return PlacedRow(case, chosen, hops, ring, float(tied))


def row_time_s(problem: FasopProblem, row: FasopRow) -> float:
    """Seconds of a step; infinite for a row that does not fit or is not legal."""
    from penstock.systems.fasop import kernels as kernels

    placed = placed_row(problem, row)
    if placed is None:
        return np.inf
    case, chosen, hops, ring, tied = placed
    compute, ends = np.zeros(row.pp), np.zeros(row.pp)
    return float(kernels.judge(case, np.array(row.partition), chosen, hops, ring, tied, np.inf, compute, ends))


def _kind(problem: FasopProblem, instance: str) -> str:
    for name, kind in problem.kinds.items():
        if kind.instance == instance:
            return name
    raise InputError(f"the row names a node '{instance}'; the tables know {', '.join(kind.instance for kind in problem.kinds.values())}.")


def _numbered(problem: FasopProblem, kinds: Sequence[str]) -> list[int]:
    """The number of each node in the problem, which lists them kind by kind."""
    starts = dict(zip(problem.kinds, np.cumsum([0, *problem.counts[:-1]]).tolist(), strict=True))
    seen = dict.fromkeys(problem.kinds, 0)
    numbers = []
    for kind in kinds:
        numbers.append(starts[kind] + seen[kind])
        seen[kind] += 1
    return numbers
