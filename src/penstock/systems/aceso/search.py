"""Search over Aceso's tables: its stage costs as an oracle, its own rules for memory, and its plan file as the answer.

Stages are cut between any two ops, with free recomputation flags. Transformers are searched with one (tp, dp) for each stage,
Wide-ResNets, whose ops differ more, with degrees and splits of each op. At tp 1 both splits are the same kernel measured twice; as in
Aceso's own search the faster measurement may be taken. Segments whose peak Aceso's model forgets are counted here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from penstock.errors import InfeasibleError, InputError
from penstock.search.partition import (
    TOLERANCE,
    Blocks,
    Flags,
    OptionCosts,
    Partition,
    StageChoice,
    StageOption,
    StageSpace,
    best_partition,
    build_space,
    recompute_flags,
    rough_bound,
)  # fmt: skip
from penstock.systems.aceso.long_chains import LongSearch
from penstock.systems.aceso.rules import AcesoProblem, kept_mb, shares_storage, starts_segment
from penstock.systems.aceso.search_mixed import MixedAnswer, best_mixed

__all__ = ["AcesoAnswer", "AcesoProblem", "search_aceso"]

MAX_STAGES = 16
GOOD_GAP = 0.028
"""Bounds further away count the peak of recomputation as well, which takes longer,"""
PEAKS = (8, 48)
"""in so many ranges, and where that is not enough in more of them,"""
MOST_PEAKS = 4.8e8
"""where ranges × ops² × stages × options are no more than this."""
LONG_CHAIN = 1700
"""Chains of more ops than this are cut coarsely first."""


@dataclass(frozen=True)
class AcesoAnswer:
    """The best plan as Aceso writes it, its time by Aceso's model, and the bound of the space searched."""

    plan: dict[str, Any]
    time_s: float
    bound_s: float
    others: tuple[AcesoAnswer, ...] = ()
    """The best plans of other micro-batch sizes, the fastest first, where they were asked for."""


def option_costs(problem: AcesoProblem, micro_batch: int) -> list[OptionCosts]:
    """Every uniform (devices, tp, dp) whose tables exist, in microseconds and MB."""
    found = []
    for devices in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            dp = devices // tp
            if devices <= problem.per_node and tp * dp == devices and micro_batch % dp == 0:
                rows, algos = _rows(problem, micro_batch // dp, tp)
                if rows is not None:
                    found.append(_costs(problem, StageOption(devices, tp, dp), rows, algos))
    return found


def _rows(problem: AcesoProblem, micro_batch: int, tp: int) -> tuple[np.ndarray | None, tuple[int, ...]]:
    """The table of split 0, and at tp 1 of each op the faster of both."""
    first = problem.tables.op_rows(problem.model, micro_batch, tp, 0)
    second = problem.tables.op_rows(problem.model, micro_batch, tp, 1) if tp == 1 else None
    if first is None or second is None:
        return first, ()
    faster = (second[:, 0] + second[:, 1] < first[:, 0] + first[:, 1]) & np.array([name != "conv1" for name in problem.names])
    return np.where(faster[:, None], second, first), tuple(int(swap) for swap in faster)


def _costs(problem: AcesoProblem, option: StageOption, rows: np.ndarray, algos: tuple[int, ...]) -> OptionCosts:
    links = (problem.tables.p2p_intra, problem.tables.p2p_inter)
    columns = [np.ascontiguousarray(column) for column in rows.T]
    kept = np.array([kept_mb(name, size) for name, size in zip(problem.names, columns[5], strict=True)])
    enter = np.array([[*map(link.exact_us, columns[2]), 0.0] for link in links])
    leave = np.array([[0.0, *map(link.exact_us, columns[3])] for link in links])
    compute = columns[0] + columns[1]
    return OptionCosts(option, columns[0], compute, kept, columns[4], columns[6], columns[7], columns[2], enter, leave, algos)


def _loose(problem: AcesoProblem, blocks: Blocks, costs: OptionCosts) -> OptionCosts:
    """Costs for bounds: what only flags that are not looked for would save, at the ends of some blocks, is not held at all."""
    names, first = problem.names, np.zeros(len(problem.names), bool)
    first[blocks.start[:-1]] = True
    looked_for = (blocks.kind >= 0)[blocks.of_op] & ~np.append(first[1:], True) & (~first | blocks.first_free[blocks.of_op])
    stays = np.array([*(starts_segment(after) and not shares_storage(name) for name, after in pairwise(names)), True])
    return replace(costs, kept=np.where(looked_for | stays, costs.kept, 0.0))


def search_aceso(
    problem: AcesoProblem, progress: Callable[[str], None] = lambda text: None, *, budget_s: float = math.inf, top: int = 1
) -> AcesoAnswer:
    """First cuts between blocks only, for a plan at hand; then all cuts, for the micro-batch sizes in order of promise.

    After `budget_s` seconds nothing more is begun: the plan and the bound are those known by then.
    """
    start_s = time.monotonic()

    def late() -> bool:
        return time.monotonic() - start_s > budget_s

    blocks = Blocks.of(problem.model, [starts_segment(name) for name in problem.names])
    costs = {b: found for b in problem.micro_batches if problem.global_batch % b == 0 and (found := option_costs(problem, b))}
    if not costs:
        sizes = ", ".join(map(str, problem.micro_batches))
        raise InputError(f"none of the micro-batch sizes {sizes} has tables and divides the global batch {problem.global_batch}.")

    if len(problem.names) > LONG_CHAIN:
        progress(f"{len(problem.names):,} ops: coarse cuts first")
        machine = problem.machine()
        chain = LongSearch(blocks, machine, problem.global_batch, min(machine.num_devices, MAX_STAGES))
        best = chain.best(costs, {b: [_loose(problem, blocks, c) for c in own] for b, own in costs.items()})
        answer = _realised(problem, best.micro_batch, best.space, best.partition, best.bound)
        if answer is None:
            raise InfeasibleError(_why_not(problem, best.bound))
        return answer

    def solve(b: int, known: float, cuts: np.ndarray | None = None) -> tuple[StageSpace, Partition]:
        count, machine = problem.global_batch // b, problem.machine()
        depth, longest = min(machine.num_devices, MAX_STAGES), known / count
        space = build_space(costs[b], blocks, machine, max_stages=depth, longest=longest, count=count, cuts=cuts)
        return space, best_partition(space, count, known)

    def bound_of(b: int, known: float, cuts: np.ndarray | None = None, peaks: int = 0) -> float:
        count, machine = problem.global_batch // b, problem.machine()
        space = build_space(
            [_loose(problem, blocks, c) for c in costs[b]], blocks, machine, max_stages=min(machine.num_devices, MAX_STAGES),
            longest=known / count, count=count, cuts=cuts, recompute="bounded", peaks=peaks,
        )  # fmt: skip
        return rough_bound(space, count) if cuts is not None else best_partition(space, count, known).bound

    with ThreadPoolExecutor(2) as pool:
        rough = dict(zip(costs, pool.map(lambda b: solve(b, np.inf, blocks.start), costs), strict=True))
        known = min(partition.time for _, partition in rough.values()) * (1 + 1e-9)
        progress(f"cuts between blocks: {known / 1e6:.3f} s")
        bounds = dict(zip(costs, pool.map(lambda b: bound_of(b, np.inf, blocks.start), costs), strict=True))
        order = sorted(costs, key=lambda b: rough[b][1].time)
        solved = {order[0]: rough[order[0]] if late() else solve(order[0], known)}
        known = min(known, solved[order[0]][1].time)
        progress(f"micro-batch {order[0]}: {known / 1e6:.3f} s")
        doubtful = [b for b in order if bounds[b] < known and not late()]
        for b, least in zip(doubtful, pool.map(lambda b: bound_of(b, known * (1 + 1e-9)), doubtful), strict=True):
            bounds[b] = max(bounds[b], least)
        for b in [b for b in doubtful[1:] if bounds[b] < known * (1 - TOLERANCE)]:
            solved[b] = rough[b] if late() else solve(b, known)
            known = min(known, solved[b][1].time)
        size = len(problem.names) ** 2 * min(problem.machine().num_devices, MAX_STAGES)
        for peaks in PEAKS if problem.family != "resnet" else ():
            loose = [b for b in costs if bounds[b] < known * (1 - GOOD_GAP) and peaks * size * len(costs[b]) <= MOST_PEAKS]
            loose = [] if late() else loose
            for b, least in zip(loose, pool.map(lambda b: bound_of(b, known * (1 + 1e-9), peaks=peaks), loose), strict=True):  # noqa: B023
                bounds[b] = max(bounds[b], least)
    least = 0.0 if late() else min(bounds.values())
    winner = min(solved, key=lambda b: solved[b][1].time)
    answer = _realised(problem, winner, *solved[winner], min(bounds.values()))
    left = sorted(rough.keys() - {winner}, key=lambda b: (solved.get(b, rough[b])[1].time, b)) if top > 1 else []
    others = [one for b in left if (one := _realised(problem, b, *solved.get(b, rough[b]), bounds[b])) is not None]
    others = sorted(others, key=lambda one: one.time_s)[: top - 1]
    if problem.family == "resnet" and not late():
        mixed, bound = best_mixed(problem, answer.time_s * 1e6 * (1 + 1e-9) if answer else np.inf)
        if mixed is not None:
            uniform = [] if answer is None or top == 1 else [answer]
            return replace(_mixed_answer(problem, mixed, bound), others=tuple([*uniform, *others][: top - 1]))
        least = bound  # plans of one degree for each stage are among those with degrees of each op
        answer = replace(answer, bound_s=min(bound / 1e6, answer.time_s)) if answer else None
    elif problem.family == "resnet" and answer is not None:
        answer = replace(answer, bound_s=0.0)  # of plans with degrees of each op nothing is known
    if answer is None:
        raise InfeasibleError(_why_not(problem, least))
    return replace(answer, others=tuple(others))


def _mixed_answer(problem: AcesoProblem, found: MixedAnswer, bound: float) -> AcesoAnswer:
    stages = found.stages
    flags = [_without_useless(stage.flags) for stage in stages]
    plan = _plan(
        problem, found.micro_batch, [stage.num_devices for stage in stages], flags, [[op.tp for op in stage.ops] for stage in stages],
        [[op.dp for op in stage.ops] for stage in stages], [[op.algo for op in stage.ops] for stage in stages],
    )  # fmt: skip
    return AcesoAnswer(plan, found.time / 1e6, min(bound, found.time) / 1e6)


def _why_not(problem: AcesoProblem, bound_us: float) -> str:
    """Why there is no answer: none can fit, or none was found though the bound, which counts memory less strictly, is finite."""
    gpus = f"{problem.num_nodes * problem.per_node} GPUs of {problem.memory_mb:.0f} MB each"
    known = (
        f"fits {gpus}: that is proven, with everything recomputed that can be"
        if np.isinf(bound_us)
        else f"was found that fits {gpus}. That is no proof: one that takes {bound_us / 1e6:.4g} s or more is not excluded"
    )
    return (
        f"no plan of {problem.model.name} {known}. "
        f"Raise the memory limit, add GPUs, or allow smaller micro-batches than {min(problem.micro_batches)}."
    )


def _realised(problem: AcesoProblem, b: int, space: StageSpace, partition: Partition, bound: float) -> AcesoAnswer | None:
    """The answer whose flags keep to Aceso's own rule; stages for which none do are left out and the rest is cut anew."""
    while partition.stages:
        flags = [_fitting_flags(problem, space, stage) for stage in partition.stages]
        fitting = [chosen for chosen in flags if chosen is not None]
        if len(fitting) == len(flags):
            return _answer(problem, b, space, partition, fitting, bound)
        for stage, chosen in zip(partition.stages, flags, strict=True):
            if chosen is None:
                space.times[stage.behind :, space.pair(stage.option, stage.first, stage.last)] = np.inf
        partition = best_partition(space, problem.global_batch // b)
    return None


def _answer(
    problem: AcesoProblem, b: int, space: StageSpace, partition: Partition, flags: Sequence[Sequence[int]], bound: float
) -> AcesoAnswer:
    times = []
    for stage, chosen in zip(partition.stages, flags, strict=True):
        costs = space.costs[stage.option]
        table = space.times[stage.behind, space.pair(stage.option, stage.first, stage.last)]
        exact = costs.compute[stage.first : stage.last].sum() + (costs.forward[stage.first : stage.last] * chosen).sum()
        times.append(stage.time - table + exact)
    total = (problem.global_batch // b - 1) * max(times) + sum(times)
    options = [space.costs[stage.option].option for stage in partition.stages]
    counts = [stage.last - stage.first for stage in partition.stages]
    tp, dp = ([[getattr(o, name)] * n for o, n in zip(options, counts, strict=True)] for name in ("tp", "dp"))
    algo = [list(space.costs[s.option].algos[s.first : s.last]) or [0] * (s.last - s.first) for s in partition.stages]
    plan = _plan(problem, b, [o.num_devices for o in options], flags, tp, dp, algo)
    return AcesoAnswer(plan, total / 1e6, min(bound, total) / 1e6)


def _plan(
    problem: AcesoProblem, b: int, gpus: list[int], flags: Sequence[Sequence[int]], tp: list[list[int]], dp: list[list[int]],
    algo: list[list[int]],
) -> dict[str, Any]:  # fmt: skip
    """The plan as Aceso writes it."""
    return {
        "model_name": problem.family, "model_size": problem.model.config["size"], **_sizes(problem),
        "global_batch_size": problem.global_batch, "micro_batch_size": b, "num_stages": len(gpus), "num_gpus": gpus,
        "checkpoint_activations": [any(chosen) for chosen in flags],
        "resharding_stages": [len(set(zip(t, d, strict=True))) > 1 for t, d in zip(tp, dp, strict=True)],
        "num_ops_in_each_stage": [len(chosen) for chosen in flags], "model_parallel_size_of_each_op": tp,
        "data_parallel_size_of_each_op": dp, "recompute_ops": [[int(flag) for flag in chosen] for chosen in flags], "algo_of_each_op": algo,
    }  # fmt: skip


def _sizes(problem: AcesoProblem) -> dict[str, Any]:
    """The number of layers; of a Wide-ResNet the residual blocks of each group, as its chain has them."""
    if problem.family != "resnet":
        return {"num_layers": problem.model.config["num_layers"]}
    blocks = {tuple(name.split("-")[1:3]) for name in problem.names if name.startswith("block-")}
    return {"num_layers": list(Counter(group for group, _ in sorted(blocks)).values())}


_MARGINS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""What more is set free where flags do not fit, as multiples of what was missing."""


def _fitting_flags(problem: AcesoProblem, space: StageSpace, stage: StageChoice) -> Sequence[int] | None:
    """The fastest flags of a stage that fit by Aceso's own rule, in which the peak of a block that is filled singly counts as well."""
    costs = space.costs[stage.option]
    forward = costs.forward[stage.first : stage.last]

    def missing(flags: Flags) -> float:
        return stage_memory_mb(problem, costs, stage, flags) - problem.memory_mb

    flags = recompute_flags(space, stage)
    over = missing(flags)
    if over > 0:
        tried = [recompute_flags(space, stage, share * over) for share in _MARGINS]
        fitting = [more for more in tried if missing(more) <= 0]
        if not fitting:
            return None
        flags = min(fitting, key=lambda more: float(forward @ more))
    return _without_useless(flags)


def _without_useless(flags: Flags | Sequence[int]) -> Sequence[int]:
    """A flagged op whose neighbours are not flagged costs time and saves nothing."""
    padded = [0, *flags, 0]
    return [int(padded[i] and (padded[i - 1] or padded[i + 1])) for i in range(1, len(padded) - 1)]


def stage_memory_mb(problem: AcesoProblem, costs: OptionCosts, stage: StageChoice, flags: Sequence[int] | Flags) -> float:
    """Memory of a stage by Aceso's rule; every segment's peak counts, also the last one's."""
    ops, names = slice(stage.first, stage.last), problem.names[stage.first : stage.last]
    kept = costs.kept[ops]
    saved = segment = peak = 0.0
    for j in range(len(names) - 1):
        if flags[j] and flags[j + 1]:
            segment += kept[j]
            boundary = starts_segment(names[j + 1]) and not shares_storage(names[j]) and names[j] != "enc-attention-dropout"
            peak = max(peak, segment)
            if boundary:
                segment = 0.0
            else:
                saved += kept[j]
        else:
            segment = 0.0
    weights = float(costs.weights[ops].sum())
    but_last = slice(stage.first, stage.last - 1)
    reserve = max(float(costs.forward_reserve[but_last].max(initial=0.0) + costs.backward_reserve[but_last].max(initial=0.0)), weights)
    held = float(costs.entering[stage.first] + kept.sum()) - saved
    return float(problem.machine().state_factor * weights + held * (stage.behind + 1) + peak + reserve)
