"""Search over Aceso's tables: its stage costs as an oracle, its own rules for memory, and its plan file as the answer.

Stages are uniform in tp and dp (`algo` 0), cut between any two ops, with free recomputation flags. Two quirks of the tables are not used:
mixing equal kernels for their measurement noise, and segments whose peak Aceso's model forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import InfeasibleError, InputError
from penstock.interop.aceso import AcesoTables
from penstock.models.ops import Model
from penstock.search.partition import Partition, best_partition, rough_bound
from penstock.search.recompute import Flags, recompute_flags
from penstock.search.stages import Blocks, Machine, OptionCosts, StageChoice, StageOption, StageSpace, build_space

__all__ = ["AcesoAnswer", "AcesoProblem", "search_aceso"]

MAX_STAGES = 16


@dataclass(frozen=True)
class AcesoProblem:
    """A model of Aceso's tables on equal GPUs; memory in MB as the tables have it."""

    tables: AcesoTables
    model: Model
    num_nodes: int
    per_node: int
    global_batch: int
    micro_batches: tuple[int, ...]
    memory_mb: float

    @property
    def names(self) -> list[str]:
        """The table's name of each op of the chain."""
        return [place.op.config["op"] for place in self.model.ops]

    @property
    def family(self) -> str:
        """`gpt`, `t5` or `resnet`."""
        return str(self.model.config["family"])

    def machine(self) -> Machine:
        """fp16 training keeps weights, fp32 masters, gradients and moments: 8 × the weights; fp32 training 4 ×."""
        return Machine(self.num_nodes * self.per_node, self.per_node, self.memory_mb, 4.0 if self.family == "resnet" else 8.0)


@dataclass(frozen=True)
class AcesoAnswer:
    """The best plan as Aceso writes it, its time by Aceso's model, and the bound of the space searched."""

    plan: dict[str, Any]
    time_s: float
    bound_s: float


def _shares_storage(op: str) -> bool:
    return op in ("enc-attention-softmax", "bn1") or "-bn3" in op or ("-downsample" in op and "0-0" not in op)


def _kept(op: str, activation: float) -> float:
    """What Aceso counts of an op's activation: some outputs live in memory that another op counts."""
    return 1.5 * activation if op == "enc-attention-dropout" else 0.0 if _shares_storage(op) else activation


def _starts_segment(op: str) -> bool:
    return op == "enc-1st-layernorm" or "-conv1" in op


def option_costs(problem: AcesoProblem, micro_batch: int) -> list[OptionCosts]:
    """Every uniform (devices, tp, dp) whose tables exist, in microseconds and MB."""
    found = []
    for devices in (1, 2, 4, 8):
        for tp in (1, 2, 4, 8):
            dp = devices // tp
            if devices <= problem.per_node and tp * dp == devices and micro_batch % dp == 0:
                rows = problem.tables.op_rows(problem.model, micro_batch // dp, tp)
                if rows is not None:
                    found.append(_costs(problem, StageOption(devices, tp, dp), rows))
    return found


def _costs(problem: AcesoProblem, option: StageOption, rows: np.ndarray) -> OptionCosts:
    links = (problem.tables.p2p_intra, problem.tables.p2p_inter)
    columns = [np.ascontiguousarray(column) for column in rows.T]
    kept = np.array([_kept(name, size) for name, size in zip(problem.names, columns[5], strict=True)])
    enter = np.array([[*map(link.exact_us, columns[2]), 0.0] for link in links])
    leave = np.array([[0.0, *map(link.exact_us, columns[3])] for link in links])
    return OptionCosts(option, columns[0], columns[0] + columns[1], kept, columns[4], columns[6], columns[7], columns[2], enter, leave)


def search_aceso(problem: AcesoProblem, progress: Callable[[str], None] = lambda text: None) -> AcesoAnswer:
    """First cuts between blocks only, for a plan at hand; then all cuts, for the micro-batch sizes in order of promise."""
    blocks = Blocks.of(problem.model, [_starts_segment(name) for name in problem.names])
    costs = {b: found for b in problem.micro_batches if problem.global_batch % b == 0 and (found := option_costs(problem, b))}
    if not costs:
        sizes = ", ".join(map(str, problem.micro_batches))
        raise InputError(f"none of the micro-batch sizes {sizes} has tables and divides the global batch {problem.global_batch}.")
    coarse = np.zeros(len(problem.names) + 1, np.bool_)
    coarse[blocks.start] = True

    def solve(b: int, known: float, cuts: np.ndarray | None = None, relaxed: bool = False) -> tuple[StageSpace, Partition]:
        count, machine = problem.global_batch // b, problem.machine()
        depth, longest = min(machine.num_devices, MAX_STAGES), known / count
        space = build_space(costs[b], blocks, machine, max_stages=depth, longest=longest, cuts=cuts, relaxed=relaxed)
        return space, best_partition(space, count, known)

    with ThreadPoolExecutor(2) as pool:
        rough = dict(zip(costs, pool.map(lambda b: solve(b, np.inf, coarse), costs), strict=True))
        known = min(partition.time for _, partition in rough.values()) * (1 + 1e-9)
        progress(f"cuts between blocks: {known / 1e6:.3f} s")
        bounds = {b: rough_bound(space, problem.global_batch // b) for b, (space, _) in rough.items()}
        order = sorted(costs, key=lambda b: rough[b][1].time)
        solved = {order[0]: solve(order[0], known)}
        known = min(known, solved[order[0]][1].time)
        progress(f"micro-batch {order[0]}: {known / 1e6:.3f} s")
        doubtful = [b for b in order if bounds[b] < known]
        for b, (_, relaxed) in zip(doubtful, pool.map(lambda b: solve(b, known * (1 + 1e-9), relaxed=True), doubtful), strict=True):
            bounds[b] = max(bounds[b], relaxed.bound)
        for b in [b for b in doubtful[1:] if bounds[b] < known]:
            solved[b] = solve(b, known)
            known = min(known, solved[b][1].time)
    winner = min(solved, key=lambda b: solved[b][1].time)
    space, partition = solved[winner]
    if not partition.stages:
        raise InfeasibleError(_why_not(problem))
    return _answer(problem, winner, space, partition, min(bounds.values()))


def _why_not(problem: AcesoProblem) -> str:
    return (
        f"no plan of {problem.model.name} fits {problem.num_nodes * problem.per_node} GPUs of {problem.memory_mb:.0f} MB each. "
        f"Raise the memory limit, add GPUs, or allow smaller micro-batches than {min(problem.micro_batches)}."
    )


def _answer(problem: AcesoProblem, b: int, space: StageSpace, partition: Partition, bound: float) -> AcesoAnswer:
    flags = [_fitting_flags(problem, space, stage) for stage in partition.stages]
    times = []
    for stage, chosen in zip(partition.stages, flags, strict=True):
        costs = space.costs[stage.option]
        table = space.times[stage.behind, space.offset[stage.option, stage.first] + stage.last - stage.first - 1]
        exact = costs.compute[stage.first : stage.last].sum() + (costs.forward[stage.first : stage.last] * chosen).sum()
        times.append(stage.time - table + exact)
    time = (problem.global_batch // b - 1) * max(times) + sum(times)
    options = [space.costs[stage.option].option for stage in partition.stages]
    counts = [stage.last - stage.first for stage in partition.stages]
    plan = {
        "model_name": problem.family, "model_size": problem.model.config["size"], **_sizes(problem),
        "global_batch_size": problem.global_batch, "micro_batch_size": b, "num_stages": len(counts),
        "num_gpus": [o.num_devices for o in options], "checkpoint_activations": [True] * len(counts),
        "resharding_stages": [False] * len(counts), "num_ops_in_each_stage": counts,
        "model_parallel_size_of_each_op": [[o.tp] * n for o, n in zip(options, counts, strict=True)],
        "data_parallel_size_of_each_op": [[o.dp] * n for o, n in zip(options, counts, strict=True)],
        "recompute_ops": [[int(flag) for flag in chosen] for chosen in flags],
        "algo_of_each_op": [[o.algo] * n for o, n in zip(options, counts, strict=True)],
    }  # fmt: skip
    return AcesoAnswer(plan, time / 1e6, min(bound, time) / 1e6)


def _sizes(problem: AcesoProblem) -> dict[str, Any]:
    return {"num_layers": problem.model.config["num_layers"]} if problem.family != "resnet" else {"num_layers": [3, 4, 6, 3]}


def _fitting_flags(problem: AcesoProblem, space: StageSpace, stage: StageChoice) -> Sequence[int]:
    """The flags of a stage, with a little more memory set free until Aceso's own rule says that they fit."""
    margin = 0.0
    for _ in range(20):
        flags = recompute_flags(space, stage, margin)
        over = stage_memory_mb(problem, space.costs[stage.option], stage, flags) - problem.memory_mb
        if over <= 0:
            return _without_useless(flags)
        margin += over + 0.01
    raise InfeasibleError(f"ops {stage.first} to {stage.last} do not fit after all; lower the memory limit by 1 % and search again.")


def _without_useless(flags: Flags) -> Sequence[int]:
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
            boundary = _starts_segment(names[j + 1]) and not _shares_storage(names[j]) and names[j] != "enc-attention-dropout"
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
