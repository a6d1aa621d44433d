"""What simpler planners would find by FASOP's tables: one tp and dp for all stages, with equal layers or with layers that suit the GPUs."""

from __future__ import annotations

import numpy as np

from penstock.systems.fasop.rules import Case, FasopProblem
from penstock.systems.fasop.search import placed, sizes_of, uniform_stages
from penstock.systems.fasop.tables import FasopTables

__all__ = ["simpler_spaces"]


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
    return {"Megatron-LM's grid": float(equal_s), "FASOP's space": float(suited_s)}


def _equal_layers_s(case: Case, chosen: np.ndarray, spread: np.ndarray, tail: int, num_layers: int) -> float:
    """The same stages on the same nodes, with as many layers each as the next."""
    from penstock.systems.fasop import kernels as kernels

    layers = np.array([len(part) for part in np.array_split(np.arange(num_layers), len(chosen))])
    nodes = np.zeros((len(chosen), int(case.dp[chosen].max())), np.int64)
    kernels.deal(case, np.ascontiguousarray(chosen), np.ascontiguousarray(spread), tail, False, nodes)
    hops, ring, compute, ends = (np.zeros(len(chosen)) for _ in range(4))
    tied = kernels.messages(case, chosen, nodes, hops, ring)
    return float(kernels.judge(case, layers, chosen, hops, ring, tied, np.inf, compute, ends))
