"""What stages may stand on when nodes are not assigned but only counted: which rings and hops can stay inside nodes.

Two stages exchange everything inside nodes only if they stand on the same nodes, each node with the same samples. Stages in a row of
which that holds are a run: its samples fall into groups that stay together, and each node holds some whole groups. A stage inside one
node is a run of one group. What does not fit into such a run crosses the network at least once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.systems.fasop.rules import INTER_OVERHEAD, INTRA_OVERHEAD, Case, FasopProblem, Option

__all__ = ["PlacementForm", "RelaxedCase", "Steps", "relax"]

MOST_FORMS = 64
"""Beyond, a run forgets what it holds when a stage joins it, which only lets more plans through."""


class PlacementForm(NamedTuple):
    """A stage as the first of a run: kinds of nodes, groups that stay together, and GPUs of a group over all stages of the run."""

    option: int
    kinds: tuple[int, ...]
    groups: int
    size: int


class Steps(NamedTuple):
    """Forms as arrays for kernels: B stages that begin a run (the last of it), X forms, E pairs of neighbours."""

    option: np.ndarray  # [B]
    shift: np.ndarray  # [B] what a stage adds to the number of the state
    room: np.ndarray  # [B, states] whether the GPUs left suffice
    half: np.ndarray  # [B] the least a hop beside a stage takes
    ring: np.ndarray  # [B] bits per second of the gradients
    far: np.ndarray  # [B, B] seconds of a hop there and back that crosses the network
    base: np.ndarray  # [X] the stage of a form; the first B forms are runs of one stage
    begin: np.ndarray  # [X + 1] of the pairs whose stage behind has a form
    target: np.ndarray  # [E] form of the two together
    hop: np.ndarray  # [E] seconds of a hop there and back that stays inside nodes


@dataclass(frozen=True, eq=False)
class RelaxedCase:
    """One micro-batch size with stages in forms."""

    case: Case
    steps: Steps
    tied_s: np.ndarray
    """[B, B] seconds of the tied embedding of a first and a last stage."""

    def after_s(self, last: np.ndarray) -> np.ndarray:
        """[B, layers + 1] the least that comes after the last backward of a first stage of so many layers, with one of `last` behind."""
        dp = self.case.dp[self.steps.option]
        after: np.ndarray = (2 * (dp - 1) / dp / self.steps.ring)[:, None] * self.case.gradient_bits
        after[:, :-1] += self.tied_s[:, last].min(axis=1)[:, None]
        return after


def relax(problem: FasopProblem, options: list[Option], case: Case, units: np.ndarray, limit: np.ndarray) -> RelaxedCase:
    """Forms and hops of one micro-batch size; an option takes units [C, counts] of what there is a `limit` of."""
    forms = [
        PlacementForm(c, option.kinds, groups, option.num_devices // groups)
        for c, option in enumerate(options) for groups in sorted({1, option.dp})
        if _fits(problem, option.kinds, groups, option.num_devices // groups)
    ]  # fmt: skip
    num_stages, several = len(forms), sum(problem.counts) > 1
    base, places = list(range(num_stages)), {form: index for index, form in enumerate(forms)}
    half, far, tied = np.full(num_stages, np.inf), np.zeros((num_stages, num_stages)), np.zeros((num_stages, num_stages))
    begin, target, hop = [0], list[int](), list[float]()
    for behind, form in enumerate(forms):  # grows while runs are joined
        for x in range(num_stages):
            a, b = options[form.option], options[forms[x].option]
            outside_s, inside_s, joined = math.inf, math.inf, _joined(problem, form, forms[x])
            if several:
                flows = max(a.dp, b.dp) * max(a.tp, b.tp)
                shared = math.gcd(case.samples // a.dp, case.samples // b.dp)
                outside_s = shared * flows * case.sample_bits * INTER_OVERHEAD / _network(problem, form, forms[x])
            if joined is not None:
                inside_s = case.samples // max(a.dp, b.dp) * case.sample_bits * INTRA_OVERHEAD / _fastest(problem, joined.kinds)
                if inside_s < outside_s:
                    if joined not in places and len(forms) >= MOST_FORMS:
                        places[joined] = x
                    elif joined not in places:
                        places[joined] = len(forms)
                        forms.append(joined)
                        base.append(x)
                    target.append(places[joined])
                    hop.append(2 * inside_s)
            for stage in (x, base[behind]):
                half[stage] = min(half[stage], inside_s, outside_s)
            if behind < num_stages:
                far[behind, x] = 2 * outside_s
                tied[x, behind] = _tied_s(problem, case, (a, b), (form, forms[x]), joined is not None)
        begin.append(len(target))
    option = np.array([form.option for form in forms[:num_stages]])
    stride = np.concatenate([[1], np.cumprod(limit + 1)[:-1]]).astype(np.int64)
    digits = np.arange(int(np.prod(limit + 1)))[:, None] // stride % (limit + 1)
    room = np.array([(digits + units[c] <= limit).all(axis=1) for c in option])
    ring = np.array([_fastest(problem, form.kinds) if form.groups == 1 else _network(problem, form, form) for form in forms[:num_stages]])
    steps = Steps(
        option, (units @ stride)[option], room, half, ring, far,
        np.array(base), np.array(begin), np.array(target, np.int64), np.array(hop, float),
    )  # fmt: skip
    return RelaxedCase(case, steps, tied)


def _fits(problem: FasopProblem, kinds: tuple[int, ...], groups: int, size: int) -> bool:
    """Whether nodes of these kinds hold so many groups, more than one of them in more than one node."""
    sizes = [kind.gpus_per_node for kind in problem.kinds.values()]
    held = [sizes[k] // size for k in kinds for _ in range(problem.counts[k]) if sizes[k] >= size]
    return sum(held) >= groups and (groups == 1 or len(held) > 1)


def _joined(problem: FasopProblem, run: PlacementForm, stage: PlacementForm) -> PlacementForm | None:
    """The run with a stage in front of it, None if they cannot stand on the same nodes."""
    kinds, groups = tuple(k for k in run.kinds if k in stage.kinds), math.gcd(run.groups, stage.groups)
    if not kinds or (run.groups == 1) != (stage.groups == 1) or (groups == 1 < run.groups):
        return None
    size = (run.groups * run.size + stage.groups * stage.size) // groups
    return PlacementForm(stage.option, kinds, groups, size) if _fits(problem, kinds, groups, size) else None


def _fastest(problem: FasopProblem, kinds: tuple[int, ...]) -> float:
    nodes = list(problem.kinds.values())
    return max(nodes[k].intra_bits_per_s for k in kinds)


def _network(problem: FasopProblem, a: PlacementForm, b: PlacementForm) -> float:
    nodes = list(problem.kinds.values())
    return min(max(nodes[k].inter_bits_per_s for k in form.kinds) for form in (a, b))


def _tied_s(
    problem: FasopProblem, case: Case, options: tuple[Option, Option], forms: tuple[PlacementForm, PlacementForm], near: bool
) -> float:
    """The least the tied embedding takes: over the network, or inside nodes that may hold the first and the last stage."""
    (a, b), (one, other) = options, forms
    shared = tuple(k for k in one.kinds if k in other.kinds)
    ragged = a.dp % b.dp > 0 and b.dp % a.dp > 0  # partners need not share samples then
    link = _network(problem, one, other) if sum(problem.counts) > 1 else 0.0
    if shared and (near or ragged):
        link = max(link, _fastest(problem, shared))
    if case.tied_bits == 0.0:
        return 0.0
    return case.tied_bits / min(a.tp, b.tp) * min(max(a.dp, b.dp), case.per_node) / link if link else math.inf
