"""Plans of one family whose stages give each op degrees and a split of its own, such as early ops data and later ones tensor parallel.

What follows the last micro-batch belongs to the choice: large weights are better divided than made equal. A pipeline takes
(m - 1) · slowest + sum + what follows on the slowest stage, which is at least as long as if each stage took longer by a share of what
follows it: its share of the devices / (1 + (m - 1) · the largest such share). Of one stage that is 1 / m, and it is as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.costs.collectives import group_of
from penstock.costs.table import Floats
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import OpRun, Plan
from penstock.plans.validity import check_plan
from penstock.search.assemble import assembled, best_order, first_fitting, stage_of
from penstock.search.choice import Choice
from penstock.search.op_degrees.lazy_stages import LazyStages, MixedCosts, OpChoice, SolvedStage
from penstock.search.partition.stage_space import Machine
from penstock.search.space.families import PlanFamily
from penstock.search.space.stage_costs import OptionCosts, StageOption
from penstock.timing.pass_times import rerun
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = ["MixedPlans", "free_bound_s", "mixed_plans"]

LEAST_GAIN = 0.005
"""Stages are mixed where some run of ops would be this much faster than with the best degrees for all of it."""
MAX_OPS = 600
"""Chains up to this length are looked at."""
MAX_STAGES = 8
PRICES, BUCKETS = 6, 400
"""Prices of memory at which stages are bounded, and steps of memory of which the fastest chain is kept."""


class MixedPlans:
    """The plans of a family with up to so many stages, some of them mixed."""

    def __init__(self, family: PlanFamily, costs: Sequence[MixedCosts], max_stages: int, known_s: float) -> None:
        self.family, self.max_stages, self._costs, self._known_s = family, max_stages, list(costs), known_s
        self._lazy = self._stages_of(1.0)
        self.bound_s: float = self._lazy.bound(known_s)
        """What none of them that is faster than the known one can be below."""

    def _stages_of(self, share: float) -> LazyStages:
        family = self.family
        pools = tuple(pool.with_share(share) for pool in family.pools)
        machine = Machine(pools, 1.0, 0.0, idle=len(pools) > 1)
        return LazyStages(self._costs, machine, family.count, self._known_s, self.max_stages, _prices(self._costs), BUCKETS)

    def best(self, known_s: float) -> Choice | None:
        """The fastest that fits, if it is faster than `known_s`."""
        found = first_fitting(lambda share: self._best_with(share, known_s))
        return found if found is not None and found.estimate.time_s < known_s else None

    def _best_with(self, share: float, known_s: float) -> Choice | None:
        """The programme's best plan with a share of the memory; None where it would not run."""
        stages, _ = (self._lazy if share == 1.0 else self._stages_of(share)).solve(known_s)
        if not stages:
            return None
        request, plan = self.family.request, _plan(self.family, stages, together=False)
        if check_plan(plan, request.model, request.cluster) or _splits_shared_weights(plan, request.model):
            return None
        return best_order(self.family, "mixed", lambda together: _plan(self.family, stages, together))


def free_bound_s(family: PlanFamily) -> float:
    """What no plan can be below if every op chooses its devices, degrees and split for itself and nothing is ever moved.

    The slowest stage takes at least what a device works on average, and so does what follows the last micro-batch.
    """
    least = np.full(family.request.model.num_ops, np.inf)
    for option in family.options:
        share = option.num_devices / family.num_devices
        after = family.prices.updates.after_s(option)
        for algo in range(_num_algos(family, option)):
            time = family.prices.passes.times(option, algo)[1]
            least = np.minimum(least, time * (1 + (family.count - 1) * share) + share * after)
    return float(least.sum())


def mixed_plans(family: PlanFamily, known_s: float) -> Iterator[MixedPlans]:
    """Where mixing can help: plans of one stage, and plans of several."""
    if family.request.model.num_ops > MAX_OPS:
        return
    num_devices = family.num_devices
    sizes = sorted({(option.pool, option.num_devices) for option in family.options})
    for most in sorted({1, min(MAX_STAGES, num_devices)}):
        wanted = [(pool, size) for pool, size in sizes if (size == num_devices) == (most == 1)]
        largest = max((size for _, size in wanted), default=0)
        found = [_costs(family, pool, size, size / (num_devices + (family.count - 1) * largest)) for pool, size in wanted]
        costs = [c for c in found if c is not None]
        if any(_gain(family, c) >= LEAST_GAIN for c in costs):
            yield MixedPlans(family, costs, most, known_s)


def _gain(family: PlanFamily, costs: MixedCosts) -> float:
    """How much faster a run of ops can be than with the same degrees for all of it; runs begin at the first and last op of each sort."""
    from penstock.search.op_degrees.mixed_kernels import mixing_gain

    numbers, firsts = family.prices.tables.chain
    lasts = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    plain = np.array([choice.algo == 0 for choice in costs.choices])
    time = np.where(costs.allowed, costs.compute, np.inf)
    return float(mixing_gain(time, costs.reshard, plain, np.union1d(firsts, lasts)))


def _costs(family: PlanFamily, pool: int, size: int, share: float) -> MixedCosts | None:
    """All degrees and splits on a number of devices, with a share of what follows; None where the model has none."""
    options = {(o.tp, o.dp): o for o in family.options if (o.pool, o.num_devices) == (pool, size)}
    choices, rows = [], []
    for (tp, dp), option in options.items():
        for algo in range(_num_algos(family, option)):
            choices.append(OpChoice(tp, dp, algo))
            rows.append(_rows(family, option, algo, share))
    if not rows:
        return None
    allowed = np.stack([np.isfinite(costs.compute) for costs in rows])

    def stacked(name: str) -> Floats:
        return np.ascontiguousarray(np.where(allowed, np.stack([getattr(costs, name) for costs in rows]), 0.0))

    enter = np.ascontiguousarray(np.stack([costs.enter[:, :-1] for costs in rows], axis=1))
    leave = np.ascontiguousarray(np.stack([costs.leave[:, 1:] for costs in rows], axis=1))
    reshard, moved, edge = _changes(family, pool, choices, rows)
    return MixedCosts(
        size, tuple(choices), stacked("compute"), stacked("forward"), stacked("ending"), stacked("kept"), stacked("weights"),
        stacked("forward_reserve"), stacked("backward_reserve"), stacked("entering"), enter, leave, reshard, moved, edge, allowed, pool,
    )  # fmt: skip


def _num_algos(family: PlanFamily, option: StageOption) -> int:
    """How many splits the model's ops have at most; an op that is not divided has one."""
    return max(len(op.splits) for op in family.request.model.distinct_ops) if option.tp > 1 else 1


def _rows(family: PlanFamily, option: StageOption, algo: int, share: float) -> OptionCosts:
    """Costs of every op under one option and split, with a share of what follows."""
    costs = family.prices.costs(option)
    if algo:
        forward, compute = family.prices.passes.times(option, algo)
        table, shape = family.prices.tables.of(option)
        at = table.chain, table.shape_index(shape), 0, algo
        numbers, firsts = family.prices.tables.chain
        distinct = [family.request.model.ops[first] for first in firsts]
        light = np.array([not rerun([place], [min(algo, len(place.op.splits) - 1)]) for place in distinct])[numbers]
        costs = replace(
            costs, forward=forward, compute=compute, light=light, kept=table.kept_bytes[at], forward_reserve=table.workspace_bytes[at],
            backward_reserve=table.backward_workspace_bytes[at],
        )  # fmt: skip
    return replace(costs, compute=costs.compute + share * family.prices.updates.after_s(option))


def _changes(
    family: PlanFamily, pool: int, choices: Sequence[OpChoice], rows: Sequence[OptionCosts]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """[Q, Q, N] time and memory of moving an op's input to other degrees, and where a recomputed segment ends."""
    model, shape = family.request.model, (len(choices), len(choices), family.request.model.num_ops)
    reshard, moved = np.zeros(shape), np.zeros(shape)
    begins = [(before.block, before.copy) != (place.block, place.copy) for before, place in pairwise(model.ops)]
    edge = np.array(np.broadcast_to(np.array([True, *begins]), shape), order="C")  # writable, as kernels are compiled for
    gathers_s: dict[tuple[int, int, int], Floats] = {}  # splits of an op move alike
    for a, have in enumerate(choices):
        for b, want in enumerate(choices):
            if have.dp != want.dp:
                coarse, fine = (have, want) if have.dp < want.dp else (want, have)
                if (key := (coarse.tp, coarse.dp, fine.tp)) not in gathers_s:
                    gathers_s[key] = _gathers_s(family, pool, *key)
                reshard[a, b, 1:], moved[a, b, 1:] = gathers_s[key], rows[b].entering[1:]
                edge[a, b] = True
    return reshard, moved, edge


def _gathers_s(family: PlanFamily, pool: int, tp: int, dp: int, fine_tp: int) -> Floats:
    """[N - 1] time to gather what enters each op but the first among the ranks of its tensor-parallel group, as `costs` has it."""
    request, numbers = family.request, family.prices.tables.chain[0]
    shape = share_shape(request.frame, family.samples, dp)
    group = group_of(request.estimator.cluster, family.kinds[pool].ranks[:tp:fine_tp])
    # What enters an op is what the op before it returns.
    sizes = np.array([carried.at(shape) for carried in request.carried])
    return np.asarray(group.times_s("all_gather", sizes)[numbers[:-1]])


def _prices(costs: Sequence[MixedCosts]) -> Floats:
    """No price, and a range around what recomputation saves per second."""
    counted = [(c.kept > 1e-3 * c.kept.max()) & (c.forward > 0) for c in costs]
    ratios = np.concatenate([c.forward[chosen] / c.kept[chosen] for c, chosen in zip(costs, counted, strict=True)])
    if not len(ratios):  # nothing is kept, so that memory has no price
        return np.zeros(1)
    return np.concatenate([[0.0], np.geomspace(0.3 * np.quantile(ratios, 0.05), 30 * np.quantile(ratios, 0.95), PRICES)])


def _plan(family: PlanFamily, stages: Sequence[SolvedStage], together: bool) -> Plan:
    """A stage has the degrees of most of its ops, and runs of ops that have others."""
    found = []
    for stage in stages:
        usual = Counter((op.tp, op.dp) for op in stage.ops).most_common(1)[0][0]
        option = StageOption(stage.num_devices, *usual, stage.pool)
        devices = family.ranks(option, stage.start, together)
        found.append(stage_of(stage.first, stage.last, option, devices, stage.flags, tuple(_runs(stage, usual))))
    return assembled(family.request.frame, found, family.samples)


def _runs(stage: SolvedStage, usual: tuple[int, int]) -> Iterator[OpRun]:
    """The ops that are not split as usual."""
    first = stage.first
    for op, run in groupby(stage.ops):
        last = first + len(list(run))
        if (op.tp, op.dp, op.algo) != (*usual, 0):
            yield OpRun(first, last, op.tp, op.dp, op.algo)
        first = last


def _splits_shared_weights(plan: Plan, model: Model) -> bool:
    """Whether the runtime would refuse the plan's own degrees: it holds a weight of two ops once."""
    plain = replace(plan, stages=tuple(replace(stage, runs=()) for stage in plan.stages))
    return len(unsupported(plan, model)) > len(unsupported(plain, model))
