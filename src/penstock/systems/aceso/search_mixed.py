"""Search over Aceso's tables with degrees and splits of each op, as its Wide-ResNet plans need them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from penstock.costs.table import Floats
from penstock.search.op_degrees import LazyStages, MixedCosts, OpChoice, SolvedStage
from penstock.systems.aceso.links import SENTINELS
from penstock.systems.aceso.rules import AcesoProblem, shares_storage, starts_segment

__all__ = ["MixedAnswer", "best_mixed"]

PRICES = 10
"""Prices of memory at which stages are bounded."""
GOOD_GAP = 0.02
"""Sizes whose bound is further below the plan found are bounded stage by stage."""
BUCKETS = 2000
"""Steps of memory of which the fastest chain is kept."""


@dataclass(frozen=True)
class MixedAnswer:
    """The stages of the best plan, and its time."""

    micro_batch: int
    stages: tuple[SolvedStage, ...]
    time: float


def _lazy(problem: AcesoProblem, micro_batch: int, known: float) -> LazyStages:
    machine = problem.machine()
    costs = [c for devices in (1, 2, 4, 8) if devices <= problem.per_node and (c := _costs(problem, micro_batch, devices))]
    prices = _prices(costs) if costs else np.zeros(1)
    return LazyStages(costs, machine, problem.global_batch // micro_batch, known, min(machine.num_devices, 16), prices, BUCKETS)


def best_mixed(problem: AcesoProblem, known: float) -> tuple[MixedAnswer | None, float]:
    """The best plan faster than `known` microseconds, if there is one, and the bound over all micro-batch sizes."""
    sizes = [b for b in problem.micro_batches if problem.global_batch % b == 0]
    best: MixedAnswer | None = None
    with ThreadPoolExecutor(2) as pool:
        lazies = dict(zip(sizes, pool.map(lambda b: _lazy(problem, b, known), sizes), strict=True))
        for everywhere in (False, True):
            promises = dict(zip(sizes, pool.map(lambda lazy: lazy.promise(everywhere), lazies.values()), strict=True))  # noqa: B023
            if min(known, *promises.values()) < np.inf:
                break
        first = min(sizes, key=lambda b: promises[b])
        stages, time = lazies[first].reach(known)
        if stages:
            best, known = MixedAnswer(first, stages, time), time
        bounds = dict(zip(sizes, pool.map(lambda lazy: lazy.bound(known), lazies.values()), strict=True))
    for micro_batch in sorted(sizes, key=lambda b: bounds[b]):
        if bounds[micro_batch] < known:
            stages, time = lazies[micro_batch].solve(known)
            if stages and time < known:
                best, known = MixedAnswer(micro_batch, stages, time), time
    with ThreadPoolExecutor(2) as pool:
        loose = [b for b in sizes if bounds[b] < known * (1 - GOOD_GAP)]
        for b, least in zip(loose, pool.map(lambda b: lazies[b].proven(known, known * (1 - GOOD_GAP)), loose), strict=True):
            bounds[b] = max(bounds[b], least)
    return best, min(bounds.values())


def _costs(problem: AcesoProblem, micro_batch: int, devices: int) -> MixedCosts | None:
    """The tables of every (tp, dp, algo) on this many devices; None where there are none."""
    choices, tables = [], []
    for tp in (1, 2, 4, 8):
        for algo in (0, 1):
            dp = devices // tp
            rows = problem.tables.op_rows(problem.model, micro_batch // dp, tp, algo, partial=True) if tp * dp == devices else None
            if rows is not None and micro_batch % dp == 0:
                choices.append(OpChoice(tp, dp, algo))
                tables.append(rows)
    if not tables:
        return None
    columns = np.stack(tables).transpose(2, 0, 1)
    forward, backward, entering, leaving, weights, activations, forward_reserve, backward_reserve = columns
    allowed = np.isfinite(forward) & np.isfinite(backward)
    stem = np.array([name == "conv1" for name in problem.names])
    allowed &= ~(stem[None] & np.array([choice.algo == 1 for choice in choices])[:, None])
    kept = problem.kept_share * activations
    links = (problem.tables.p2p_intra, problem.tables.p2p_inter)
    enter, leave = (np.stack([link.each_us(sizes) for link in links]) for sizes in (entering, leaving))
    names = problem.names
    edge = np.array([i > 0 and starts_segment(names[i]) and not shares_storage(names[i - 1]) for i in range(len(names))])
    compute, forward = (np.ascontiguousarray(np.where(allowed, x, 0.0)) for x in (forward + backward, forward))
    weights, forward_reserve, backward_reserve, entering = map(np.ascontiguousarray, (weights, forward_reserve, backward_reserve, entering))
    reshard = _reshard(problem, choices, entering)
    return MixedCosts(
        devices, tuple(choices), compute, forward, forward, kept, weights, forward_reserve, backward_reserve, entering, enter, leave,
        reshard, np.zeros_like(reshard), np.ascontiguousarray(np.broadcast_to(edge, reshard.shape)), allowed,
    )  # fmt: skip


def _reshard(problem: AcesoProblem, choices: Sequence[OpChoice], entering: Floats) -> Floats:
    """What moving an op's input takes, in microseconds: samples are gathered when dp falls, their gradients when it rises."""
    table = np.zeros((len(choices), len(choices), entering.shape[1]))
    for a, have in enumerate(choices):
        for b, want in enumerate(choices):
            if have.tp == want.tp:
                continue
            group = max(have.tp, want.tp) // min(have.tp, want.tp)
            for op in range(1, entering.shape[1]):
                time_ms = problem.tables.exact_collective_ms("all_gather", group, float(entering[b, op]), problem.model)
                table[a, b, op] = np.inf if time_ms is None or time_ms >= min(SENTINELS) else 1000 * time_ms
    return table


def _prices(costs: Sequence[MixedCosts]) -> Floats:
    """No price, a range around what recomputation saves per microsecond, and one at which only memory counts."""
    ratios = np.concatenate([(c.forward[c.kept > 1] / c.kept[c.kept > 1]) for c in costs])
    prices = np.geomspace(0.3 * np.quantile(ratios, 0.05), 30 * np.quantile(ratios, 0.95), PRICES)
    return np.concatenate([[0.0], prices, [1e6 * prices[-1]]])
