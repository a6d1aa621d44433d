"""The grid of uniform plans, as one would try Megatron-LM's flags: equal stages, one tp degree, one micro-batch size.

tp            powers of two that divide the devices of every node, and that every op of the model allows
pp            divisors of the number of devices / tp, up to the number of blocks
replicas      the devices that are left
micro-batch   the sizes given, or powers of two that divide a replica's share of the global batch
recompute     none, or every block ("full")
sequence      with tp, tokens divided between products or not
zero          0, or where several ranks hold the same weights 1, which is no slower and holds less; without a pipeline 2 and 3, too
order         stages from the first node to the last, and over several kinds of devices from the last to the first
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from penstock.errors import InfeasibleError, InputError, plural
from penstock.models.sequence import divides_tokens
from penstock.plans.build import BESIDE, block_ranges, uniform_stages
from penstock.plans.plan import Plan, Stage
from penstock.plans.validity import check_plan
from penstock.search.assemble import assembled
from penstock.search.choice import Choice
from penstock.search.progress import Progress
from penstock.search.simplicity import fastest_of_each
from penstock.search.space.families import powers
from penstock.search.space.request import Request, micro_batch_sizes

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.timing.iteration_estimate import StageEstimate

__all__ = ["UniformPlans", "best_plans", "plans_of_grid", "uniform_choices"]


_GRID_DEVICES, _GRID_OPS = 256, 2000
"""Clusters and chains up to these sizes are also tried with all uniform plans, to show them beside the best."""


class _Indivisible(InfeasibleError):
    """No uniform plan divides the batch."""


class UniformPlans:
    """The searcher of uniform plans. They are among the exact partitions, which bound them: this one finds good plans at once, says what is
    missing where nothing fits, and shows what a grid would have found."""

    def __init__(self, request: Request, top: int) -> None:
        """Keeps the `top` best."""
        self._request, self._top = request, top

    def bound(self) -> float:
        """Infinite: exact partitions bound these plans too."""
        return math.inf

    def best(self, progress: Progress) -> None:
        """Tries all of them on a cluster of moderate size, elsewhere data parallelism alone."""
        large = self._request.cluster.num_devices > _GRID_DEVICES or self._request.model.num_ops > _GRID_OPS
        try:
            fitting = _fitting(self._request, lambda: progress.tell("uniform plans"), *((1, 1) if large else ()))
        except _Indivisible as error:  # by equal stages; others divide any batch that micro-batches divide
            alone = micro_batch_sizes(self._request.frame.global_batch, 1, self._request.micro_batches)
            progress.reason = None if large or alone else error
            return
        except InfeasibleError as error:
            progress.reason = None if large else error
            return
        # The fastest of each kind besides: a simple one may be what is offered, see `simplicity`.
        kept = {id(choice): choice for choice in (*fitting[: self._top], *fastest_of_each(fitting))}
        progress.choices += [Choice.of(choice.plan, choice.estimate) for choice in kept.values()]

    def prove(self, progress: Progress) -> None:
        """Does nothing: exact partitions prove what there is to prove."""


def best_plans(
    model_ref: str, cluster_ref: str, global_batch: int, *, costs: str | CostSource = "roofline", seq_length: int | None = None,
    micro_batches: Sequence[int] = (), memory_limit_bytes: float = math.inf, max_tp: int | None = None, top: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> list[Choice]:  # fmt: skip
    """The fastest uniform plans that fit, best first; `progress` is called for each plan looked at.

    >>> [choice] = best_plans("gpt-1.3b", "4xa100-40gb", 64, top=1)
    >>> choice.plan.predicted.time_s == choice.estimate.time_s
    True
    """
    request = Request.of(model_ref, cluster_ref, global_batch, costs, seq_length, micro_batches, memory_limit_bytes)
    timed = [choice.clocked() for choice in uniform_choices(request, top, progress, max_tp)]
    return sorted(timed, key=lambda choice: (choice.estimate.time_s, choice.estimate.peak_bytes))


def uniform_choices(request: Request, top: int, progress: Callable[[], None], max_tp: int | None = None) -> list[Choice]:
    """The fastest uniform plans of a request that fit, best first."""
    if top < 1:
        raise InputError(f"top is {top}; 1 or more was expected.")
    return [Choice.of(choice.plan, choice.estimate) for choice in _fitting(request, progress, max_tp)[:top]]


def _fitting(
    request: Request, progress: Callable[[], None], max_tp: int | None = None, max_pp: int | None = None
) -> list[Choice]:  # fmt: skip
    """All that fit, but those that others of the same kind make needless, fastest first; predictions are not in the plans yet."""
    fitting, least, too_large, fits = [], None, set(), defaultdict[object, list[tuple[bool, int]]](list)
    for plan in plans_of_grid(request, max_tp, max_pp):
        progress()
        first, recomputes = plan.stages[0], any(stage.recompute for stage in plan.stages)
        shape = (plan.num_stages, first.degrees.tp, first.sequence_parallel, first.devices)
        kind, alike = (*shape, recomputes, first.zero), fits[*shape, plan.micro_batching.samples]
        # A smaller micro-batch did not fit already; or the same plan fits that recomputes nothing, or divides less, and is faster so.
        if kind in too_large or any(again <= recomputes and zero <= first.zero for again, zero in alike):
            continue
        choice = Choice(plan, request.estimator.estimate(plan))
        if choice.estimate.fits:
            fitting.append(choice)
            alike.append((recomputes, first.zero))
            continue
        too_large.add(kind)
        least = choice if least is None else min(least, choice, key=lambda c: max(map(_fullness, c.estimate.stages)))
    if not fitting:
        raise _infeasible(request, least)
    return sorted(fitting, key=lambda choice: (choice.estimate.time_s, choice.estimate.peak_bytes))


def plans_of_grid(request: Request, max_tp: int | None = None, max_pp: int | None = None) -> Iterator[Plan]:
    """Every valid plan of the grid for a request, small micro-batches before large ones."""
    model, cluster, frame = request.model, request.cluster, request.frame
    for tp in _tp_degrees(model, cluster, max_tp):
        for pp in _pipeline_degrees(model, cluster.num_devices // tp)[:max_pp]:
            replicas = cluster.num_devices // tp // pp
            if not (sizes := micro_batch_sizes(frame.global_batch, replicas, request.micro_batches)):
                continue
            levels = (0,) if replicas == 1 else (1,) if pp > 1 else (1, 2, 3)
            for recompute, rows, zero in product((False, True), (False, True) if tp > 1 and divides_tokens(model) else (False,), levels):
                stages = uniform_stages(
                    model, pp=pp, tp=tp, replicas=replicas, recompute=recompute, zero=zero, sequence_parallel=rows
                )  # fmt: skip
                orders = (stages, _backwards(stages)) if pp > 1 and len(cluster.kinds) > 1 else (stages,)
                for ordered in orders:
                    plans = [assembled(frame, ordered, samples) for samples in sizes]
                    if not check_plan(plans[0], model, cluster):  # all sizes divide the batch, and nothing else depends on them
                        yield from plans


def _backwards(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same stages, the first on the devices of the last."""
    return tuple(replace(stage, devices=other.devices) for stage, other in zip(stages, reversed(stages), strict=True))


def _tp_degrees(model: Model, cluster: Cluster, max_tp: int | None) -> list[int]:
    largest = min(model.max_tp(), max_tp or model.max_tp())
    return [tp for tp in powers(largest) if all(run.node.num_devices % tp == 0 for run in cluster.runs)]


def _pipeline_degrees(model: Model, num_groups: int) -> list[int]:
    most = sum(name not in BESIDE for name, _ in block_ranges(model))
    return [pp for pp in range(1, min(num_groups, most) + 1) if num_groups % pp == 0]


def _infeasible(request: Request, least: Choice | None) -> InfeasibleError:
    """Why there is no plan: nothing divides, or memory does not suffice, with how much would."""
    model, cluster, micro_batches = request.model, request.cluster, request.micro_batches
    global_batch, limit_bytes = request.frame.global_batch, request.memory_limit_bytes
    if least is None:
        sizes = f" into micro-batches of {', '.join(map(str, micro_batches))}" if micro_batches else ""
        multiple = cluster.num_devices * min(micro_batches, default=1)
        return _Indivisible(
            f"no uniform plan divides a global batch of {global_batch}{sizes} over the {plural(cluster.num_devices, 'device')} of "
            f"{cluster.describe()}. Use a global batch that is a multiple of {multiple}, or other micro-batches."
        )
    found, plan = least.estimate, least.plan
    stage = max(found.stages, key=_fullness)
    purpose, size, _ = max(stage.memory.rows()[:-1], key=lambda row: row[1])
    given = limit_bytes <= stage.limit_bytes
    limit = f"--memory-limit allows {_gb(stage.limit_bytes)}" if given else f"{stage.device} has {_gb(stage.limit_bytes)}"
    return InfeasibleError(
        f"no uniform plan of {model.name} fits on {cluster.describe()}: the least that a device needs is {_gb(stage.memory.total_bytes)} "
        f"({_gb(size)} of it {purpose}; stage {stage.index} with pp {plan.num_stages}, tp {least.tp}, "
        f"{plural(plan.num_replicas, 'replica')}, micro-batch {plan.micro_batching.samples}, recompute {least.recompute}, zero "
        f"{plan.stages[0].zero}), but {limit}. Use {'a higher limit, ' if given else ''}more or larger devices, shorter sequences or "
        "smaller micro-batches."
    )


def _fullness(stage: StageEstimate) -> float:
    """How full the fullest device of a stage is; devices of several kinds have unequal limits."""
    return stage.memory.total_bytes / stage.limit_bytes


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
