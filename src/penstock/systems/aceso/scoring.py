"""Scores a given plan by Aceso's tables and rules: time and memory of each stage, and what the whole takes.

Two ops of a stage whose outputs and inputs are divided differently move what lies between them. How an op divides its tensors follows
from its name, its degrees and its split; one collective each way turns one division into the other, or nothing is counted, as in
Aceso's own model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, plural
from penstock.search.partition import OptionCosts, StageChoice, StageOption
from penstock.systems.aceso.files import AcesoPlan
from penstock.systems.aceso.links import SENTINELS
from penstock.systems.aceso.rules import AcesoProblem
from penstock.systems.aceso.search import stage_memory_mb
from penstock.systems.aceso.tables import AcesoTables

__all__ = ["AcesoScore", "StageScore", "grid_plans", "score_plan"]

_COLUMN, _ROW = ("enc-attention-qkv", "enc-MLP-GEMM-1"), ("enc-attention-dense", "enc-MLP-GEMM-2")


class _Sharding(NamedTuple):
    """Copies of a tensor, and how often each of three dimensions is divided."""

    copies: int
    parts: tuple[int, int, int]


@dataclass(frozen=True)
class StageScore:
    """What one stage takes for a micro-batch, and what a GPU of it holds."""

    compute_s: float
    recompute_s: float
    messages_s: float
    memory_mb: float

    @property
    def time_s(self) -> float:
        """Compute, recomputation and messages together."""
        return self.compute_s + self.recompute_s + self.messages_s


@dataclass(frozen=True)
class AcesoScore:
    """A whole plan: an iteration is that of its slowest stage, behind a pipeline that fills."""

    stages: tuple[StageScore, ...]
    num_micro_batches: int

    @property
    def time_s(self) -> float:
        """Seconds of one iteration."""
        times = [stage.time_s for stage in self.stages]
        return (self.num_micro_batches - 1) * max(times) + sum(times)

    @property
    def memory_mb(self) -> float:
        """Memory of the fullest GPU."""
        return max(stage.memory_mb for stage in self.stages)


def score_plan(plan: AcesoPlan, tables: AcesoTables, per_node: int) -> AcesoScore:
    """Time and memory of a plan on nodes of so many GPUs."""
    layers = plan.num_layers if isinstance(plan.num_layers, int) else 0
    model = tables.model(plan.model_name, plan.model_size, layers)
    gpus = sum(plan.num_gpus)
    problem = AcesoProblem(
        tables, model, -(-gpus // per_node), per_node, plan.global_batch_size, (plan.micro_batch_size,), float("inf")
    )  # fmt: skip
    if sum(plan.num_ops_in_each_stage) != model.num_ops:
        raise InputError(
            f"the plan has {plural(sum(plan.num_ops_in_each_stage), 'op')}, {model.name} of {tables.name} has {model.num_ops}."
        )
    return AcesoScore(tuple(_stages(plan, problem)), plan.global_batch_size // plan.micro_batch_size)


def _stages(plan: AcesoPlan, problem: AcesoProblem) -> Iterator[StageScore]:
    edges, first_gpus = (list(accumulate(counts, initial=0)) for counts in (plan.num_ops_in_each_stage, plan.num_gpus))
    for index, (first, last) in enumerate(pairwise(edges)):
        ops = plan.per_op(index)
        rows = np.stack([_row(problem, plan.micro_batch_size, first + at, op) for at, op in enumerate(ops)])
        flags = np.array([op[3] for op in ops])
        tp, dp, _, _ = ops[0]
        sent = _row(problem, plan.micro_batch_size, last - 1, (tp, *ops[-1][1:]))[3]  # by the first op's tp, as Aceso looks it up
        links, start, end = (problem.tables.p2p_intra, problem.tables.p2p_inter), first_gpus[index], first_gpus[index + 1]
        messages = links[start > 0 and start % problem.per_node == 0].exact_us(float(rows[0, 2]))
        messages += links[end % problem.per_node == 0].exact_us(float(sent))
        messages += 0.0 if problem.family == "t5" else sum(_moves(problem, ops, rows, first))
        chain = np.zeros((problem.model.num_ops, 8))
        chain[first:last] = rows
        stage = StageChoice(0, first, last, plan.num_stages - 1 - index, 0.0)
        memory = stage_memory_mb(problem, _as_costs(problem, chain, StageOption(tp * dp, tp, dp)), stage, flags)
        yield StageScore(rows[:, :2].sum() / 1e6, float(rows[:, 0] @ flags) / 1e6, messages / 1e6, memory)


def _row(problem: AcesoProblem, micro_batch: int, op: int, degrees: Sequence[int]) -> Floats:
    """The row of one op's table."""
    tp, dp, algo = degrees[:3]
    rows = problem.tables.op_rows(problem.model, micro_batch // dp, tp, algo, partial=True)
    if rows is None or not np.isfinite(rows[op, :2]).all():
        raise InputError(
            f"{problem.tables.name} has no time of {problem.names[op]} for {plural(micro_batch // dp, 'sample')} at tp {tp}, algo "
            f"{algo}, which the plan asks for."
        )
    return np.asarray(rows[op])


def _as_costs(problem: AcesoProblem, chain: Floats, option: StageOption) -> OptionCosts:
    kept = problem.kept_share * chain[:, 5]
    forward, backward, entering, _, weights, _, forward_reserve, backward_reserve = chain.T
    no_messages = np.zeros((2, len(chain) + 1))
    return OptionCosts(
        option, forward, forward + backward, kept, weights, forward_reserve, backward_reserve, entering, no_messages, no_messages
    )  # fmt: skip


def _moves(problem: AcesoProblem, ops: Sequence[tuple[int, int, int, int]], rows: Floats, first: int) -> Iterator[float]:
    """Microseconds of each move between two ops of a stage."""
    names = problem.names[first : first + len(ops)]
    for at in range(1, len(ops)):
        have, want = _shardings(names[at - 1], *ops[at - 1][:3])[1], _shardings(names[at], *ops[at][:3])[0]
        step = _collectives(have, want) if have and want else None
        kinds, group = step or ((), 1)
        for kind in kinds:
            time_ms = problem.tables.exact_collective_ms(kind, group, float(rows[at, 2]), problem.model)
            if time_ms is None or time_ms >= min(SENTINELS):
                raise InputError(f"{problem.tables.name} has no {kind} of {rows[at, 2]:.0f} MB, which the plan asks for at {names[at]}.")
            yield 1000 * time_ms


def _shardings(op: str, tp: int, dp: int, algo: int) -> tuple[_Sharding | None, _Sharding | None]:
    """How an op wants its input divided, and how it leaves its output; None where nothing is compared."""
    replicated, last = _Sharding(tp, (1, dp, 1)), _Sharding(1, (1, dp, tp))
    heads, samples = _Sharding(1, (dp, tp, 1)), _Sharding(tp, (dp, 1, 1))
    if op in (*_COLUMN, *_ROW):
        return (replicated, last) if (op in _COLUMN) == (algo == 0) else (last, replicated)
    known: dict[str, tuple[_Sharding | None, _Sharding | None]] = {
        "encoder-embedding": (None, replicated), "enc-attention-score": (last, heads), "enc-attention-softmax": (heads, heads),
        "enc-attention-dropout": (heads, heads), "enc-attention-context": (heads, last), "enc-MLP-gelu": (last, last),
        "final-layernorm": (replicated, samples), "gpt-post-process": (samples, None),
    }  # fmt: skip
    return known.get(op, (replicated, replicated) if op.startswith("enc-") else (samples, samples))


def _collectives(have: _Sharding, want: _Sharding) -> tuple[tuple[str, ...], int] | None:
    """The collectives forward and backward that turn one sharding into another, and over how many GPUs; None where one step does not do."""
    pairs = list(zip(have.parts, want.parts, strict=True))
    if have.copies > want.copies:  # each keeps a part; its gradient is gathered
        return (("all_gather",), have.copies // want.copies) if any(a < b for a, b in pairs) else None
    for at, (a, b) in enumerate(pairs):
        if a > b and have.copies < want.copies:
            return ("all_gather",), a // b
        if a > b and any(c < d for other, (c, d) in enumerate(pairs) if other != at):
            return ("all_to_all", "all_to_all"), a // b
    return None


def grid_plans(plan: AcesoPlan, per_node: int) -> Iterator[AcesoPlan]:
    """Megatron-LM's grid on the same GPUs: one tp and dp, stages of equally many ops, all recomputed or nothing."""
    gpus, ops = sum(plan.num_gpus), sum(plan.num_ops_in_each_stage)
    for depth, tp, again in product(range(1, min(gpus, 16) + 1), (1, 2, 4, 8), (0, 1)):
        each = gpus // depth
        if depth * each == gpus and each % tp == 0 and (each <= per_node or each % per_node == 0) and each <= 8:
            counts = tuple(len(part) for part in np.array_split(np.arange(ops), depth))
            yield replace(
                plan, num_stages=depth, num_gpus=(each,) * depth, num_ops_in_each_stage=counts,
                checkpoint_activations=(bool(again),) * depth, resharding_stages=(False,) * depth,
                model_parallel_size_of_each_op=tuple((tp,) * n for n in counts),
                data_parallel_size_of_each_op=tuple((each // tp,) * n for n in counts),
                recompute_ops=tuple((again,) * n for n in counts), algo_of_each_op=tuple((0,) * n for n in counts),
            )  # fmt: skip
