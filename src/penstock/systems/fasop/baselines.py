"""What simpler planners would find by FASOP's tables: one tp and dp for all stages, with equal layers, with layers that suit the GPUs, or
with layers that suit their average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.costs.table import Floats
from penstock.systems.fasop.rows import FasopRow
from penstock.systems.fasop.rules import Case, FasopProblem
from penstock.systems.fasop.scoring import placed_row, row_time_s
from penstock.systems.fasop.search import placed, sizes_of, uniform_stages
from penstock.systems.fasop.tables import FasopTables

__all__ = ["amp_choice_s", "simpler_spaces"]


def simpler_spaces(tables: FasopTables, setting: str) -> dict[str, float]:
    """Seconds of the best plan of each space, infinite where none fits; kinds of nodes in any order, all GPUs used."""
    problem = FasopProblem.of(tables, setting)
    equal_s = suited_s = np.inf
    for samples, size in sizes_of(problem).items():
        whole = [np.array([c]) for c, option in enumerate(size.options) if option.num_devices == problem.num_devices]
        for chosen in (*whole, *uniform_stages(problem, size.options)):
            draft = placed(size.case, samples, chosen)
            suited_s = min(suited_s, draft.time_s)
            equal_s = min(equal_s, _equal_layers_s(size.case, chosen, draft.rows[2], draft.tail, len(problem.model.layer_types)))
    return {"Megatron-LM's grid": float(equal_s), "AMP's choice": amp_choice_s(problem), "FASOP's space": float(suited_s)}


def amp_choice_s(problem: FasopProblem) -> float:
    """Seconds of AMP's own choice, infinite if nothing fits: the first plan of its ranking that does, timed as all plans are.

    AMP ranks every (tp, dp, pp, micro-batch) on nodes in their order by (m - 1) × slowest stage + all stages + messages + the longest
    gradient sum, at the average speed of the nodes and with the layers that are best by that; it knows no memory.
    """
    ranked = sorted(_amp_rows(problem), key=lambda scored: scored[0])
    return next((time_s for _, row in ranked if (time_s := row_time_s(problem, row)) < np.inf), np.inf)


def _amp_rows(problem: FasopProblem) -> Iterator[tuple[float, FasopRow]]:
    """Every row of AMP's space with its estimate."""
    instances = tuple(kind.instance for kind, count in zip(problem.kinds.values(), problem.counts, strict=True) for _ in range(count))
    share = np.array(problem.counts) / sum(problem.counts)
    batch, num_layers = problem.model.global_batch_size, len(problem.model.layer_types)
    for tp, mbs in sorted({(tp, mbs) for _, tp, mbs in problem.times_s}):
        own = [problem.times_s.get((kind.gpu, tp, mbs)) for kind in problem.kinds.values()]
        known = [times for times in own if times is not None and np.isfinite(times).all()]
        for dp in range(1, problem.num_devices // tp + 1):
            pp = problem.num_devices // (tp * dp)
            if len(known) < len(own) or pp * tp * dp != problem.num_devices or pp > num_layers or batch % (dp * mbs):
                continue
            layers = _least_slowest(share @ np.array(known), pp, problem.required_cuts)
            row = FasopRow(mbs, tp, dp, pp, instances, layers)
            if layers and (placed := placed_row(problem, row)) is not None:
                ends = np.cumsum(layers)
                stages_s = np.add.reduceat(share @ np.array(known), [0, *ends[:-1].tolist()])
                bits = np.diff(placed.case.gradient_bits[np.append(0, ends)])
                sums_s = 2 * (dp - 1) / dp * bits / placed.ring_bits_per_s
                fill_s = stages_s.sum() + placed.hops_s.sum()
                yield float((batch // (dp * mbs) - 1) * stages_s.max() + fill_s + sums_s.max()), row


def _least_slowest(layer_s: Floats, pp: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage so that the slowest takes least, by a programme over (stages, layers); a pipeline has the cuts that it must
    have. Empty where there are more cuts than stages allow."""
    before = np.append(0.0, np.cumsum(layer_s))
    stage_s = np.where(np.tri(len(before), k=-1, dtype=bool).T, before[None, :] - before[:, None], np.inf)  # [first, end]
    for cut in cuts if pp > 1 else ():
        stage_s[:cut, cut + 1 :] = np.inf
    best, steps = stage_s[0], []
    for _ in range(pp - 1):
        longest = np.maximum(best[:, None], stage_s)
        steps.append(longest.argmin(axis=0))
        best = longest.min(axis=0)
    if not np.isfinite(best[-1]):
        return ()
    ends = [len(layer_s)]
    for step in reversed(steps):
        ends.append(int(step[ends[-1]]))
    return tuple(int(count) for count in np.diff([0, *reversed(ends)]))


def _equal_layers_s(case: Case, chosen: np.ndarray, spread: np.ndarray, tail: int, num_layers: int) -> float:
    """The same stages on the same nodes, with as many layers each as the next."""
    from penstock.systems.fasop import kernels as kernels

    layers = np.array([len(part) for part in np.array_split(np.arange(num_layers), len(chosen))])
    nodes = np.zeros((len(chosen), int(case.dp[chosen].max())), np.int64)
    kernels.deal(case, np.ascontiguousarray(chosen), np.ascontiguousarray(spread), tail, False, nodes)
    hops, ring, compute, ends = (np.zeros(len(chosen)) for _ in range(4))
    tied = kernels.messages(case, chosen, nodes, hops, ring)
    return float(kernels.judge(case, layers, chosen, hops, ring, tied, np.inf, compute, ends))
