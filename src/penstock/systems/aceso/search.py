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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.errors import InfeasibleError
from penstock.search.partition import Flags, OptionCosts, Partition, StageChoice, StageSpace, best_partition, recompute_flags
from penstock.systems.aceso.long_chains import LongSearch
from penstock.systems.aceso.rules import AcesoProblem, shares_storage, starts_segment
from penstock.systems.aceso.search_mixed import MixedAnswer, best_mixed
from penstock.systems.aceso.search_uniform import MAX_STAGES, UniformSearch

__all__ = ["AcesoAnswer", "AcesoProblem", "search_aceso"]

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


def search_aceso(
    problem: AcesoProblem, progress: Callable[[str], None] = lambda text: None, *, budget_s: float = math.inf, top: int = 1
) -> AcesoAnswer:
    """The best plan; `top` asks for the best ones of other micro-batch sizes too.

    After `budget_s` seconds nothing more is begun: the plan and the bound are those known by then.
    """
    ends_s = time.monotonic() + budget_s

    def late() -> bool:
        return time.monotonic() > ends_s

    search = UniformSearch.of(problem, late)
    if len(problem.names) > LONG_CHAIN:
        progress(f"{len(problem.names):,} ops: coarse cuts first")
        return _long_answer(problem, search)
    search.run(progress)
    winner, *left = search.ranked()
    answer = _realised(problem, winner, *search.best(winner), search.bound)
    others = [one for b in left if top > 1 and (one := _realised(problem, b, *search.best(b), search.bounds[b])) is not None]
    others = sorted(others, key=lambda one: one.time_s)[: top - 1]
    if problem.family == "resnet":
        return _with_mixed(problem, answer, others, top, late())
    if answer is None:
        raise InfeasibleError(_why_not(problem, 0.0 if late() else search.bound))
    return replace(answer, others=tuple(others))


def _long_answer(problem: AcesoProblem, search: UniformSearch) -> AcesoAnswer:
    machine = problem.machine()
    chain = LongSearch(search.blocks, machine, problem.global_batch, min(machine.num_devices, MAX_STAGES), search.places)
    best = chain.best(search.costs, {b: search.loose(b) for b in search.costs})
    answer = _realised(problem, best.micro_batch, best.space, best.partition, best.bound)
    if answer is None:
        raise InfeasibleError(_why_not(problem, best.bound))
    return answer


def _with_mixed(problem: AcesoProblem, uniform: AcesoAnswer | None, others: Sequence[AcesoAnswer], top: int, late: bool) -> AcesoAnswer:
    """The best plan with degrees of each op, if one is better than `uniform`: plans of one degree for each stage are among them."""
    if late:  # of plans with degrees of each op nothing is known
        if uniform is None:
            raise InfeasibleError(_why_not(problem, 0.0))
        return replace(uniform, bound_s=0.0, others=tuple(others))
    mixed, bound = best_mixed(problem, uniform.time_s * 1e6 * (1 + 1e-9) if uniform else np.inf)
    if mixed is not None:
        found = [*([] if uniform is None else [uniform]), *others][: top - 1]
        return replace(_mixed_answer(problem, mixed, bound), others=tuple(found))
    if uniform is None:
        raise InfeasibleError(_why_not(problem, bound))
    return replace(uniform, bound_s=min(bound / 1e6, uniform.time_s), others=tuple(others))


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
