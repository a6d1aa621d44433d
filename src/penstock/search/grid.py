"""The grid of uniform plans, as one would try Megatron-LM's flags: equal stages, one tp degree, one micro-batch size.

    tp            powers of two that divide the devices of every node, and that every op of the model allows
    pp            divisors of the number of devices / tp, up to the number of blocks
    replicas      the devices that are left
    micro-batch   the sizes given, or powers of two that divide a replica's share of the global batch
    recompute     none, or every block ("full")
    zero          0, or 1 where several ranks hold the same weights
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.costs.estimate import Estimate, Estimator, with_prediction
from penstock.costs.pipeline import share_shape
from penstock.costs.sources import open_costs
from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import BESIDE, block_ranges, uniform_stages
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import cluster_reference, model_reference
from penstock.plans.validity import check_plan, require_valid

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model

__all__ = ["Choice", "Request", "best_plans", "frame_of", "micro_batch_sizes", "resolved", "uniform_choices", "uniform_plans"]

_MAX_DEVICES = 100_000
"""Plans name every rank, and a search makes many plans."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with its prediction in it, and the whole estimate behind that."""

    plan: Plan
    estimate: Estimate
    kind: str = "grid"

    @property
    def tp(self) -> int | str:
        """The tensor-parallel degree, or the range of degrees where stages differ."""
        return _range([stage.degrees.tp for stage in self.plan.stages])

    @property
    def dp(self) -> int | str:
        """The same for the degree that divides a micro-batch."""
        return _range([stage.degrees.dp for stage in self.plan.stages])

    @property
    def recompute(self) -> str:
        """`none`, `full`, or how many ops."""
        again = sum(len(stage.recomputed()) for stage in self.plan.stages)
        return f"{again} ops" if self.uneven and again else _recompute(self.plan)

    @property
    def uneven(self) -> bool:
        """Whether it came from the exact search, with stages of any size."""
        return self.kind == "exact"


@dataclass(frozen=True)
class Request:
    """What a search is asked: the model and cluster that the texts name, what all plans have in common, and who estimates them."""

    model: Model
    cluster: Cluster
    frame: Plan
    estimator: Estimator
    micro_batches: tuple[int, ...]
    memory_limit_bytes: float

    @classmethod
    def of(
        cls, model_ref: str, cluster_ref: str, global_batch: int, costs: str | CostSource, seq_length: int | None,
        micro_batches: Sequence[int], memory_limit_bytes: float,
    ) -> Request:  # fmt: skip
        """Reads the texts; what is wrong with them is said now."""
        if not memory_limit_bytes > 0:
            raise InputError(f"the memory limit is {memory_limit_bytes} bytes; more than 0 was expected.")
        model, cluster = resolved(model_ref, cluster_ref)
        source = open_costs(costs, cluster) if isinstance(costs, str) else costs
        frame = frame_of(model_ref, cluster_ref, model, cluster, global_batch, seq_length)
        shapes = {share_shape(frame, samples) for samples in micro_batch_sizes(global_batch, 1, micro_batches)}
        estimator = Estimator(model, cluster, source, memory_limit_bytes, shapes)
        return cls(model, cluster, frame, estimator, tuple(micro_batches), memory_limit_bytes)


def _range(values: Sequence[int]) -> int | str:
    return values[0] if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _recompute(plan: Plan) -> str:
    return "full" if any(stage.recompute for stage in plan.stages) else "none"


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
    return uniform_choices(request, top, progress, max_tp)


def uniform_choices(request: Request, top: int, progress: Callable[[], None], max_tp: int | None = None) -> list[Choice]:
    """The same for a request that was read already."""
    if top < 1:
        raise InputError(f"top is {top}; 1 or more was expected.")
    plans = _plans(request.model, request.cluster, request.frame, request.micro_batches, max_tp)
    fitting, least, too_large = [], None, set()
    for plan in plans:
        progress()
        kind = (plan.num_stages, plan.stages[0].degrees.tp, _recompute(plan), plan.stages[0].zero)
        if kind in too_large:  # a smaller micro-batch did not fit already
            continue
        choice = Choice(plan, request.estimator.estimate(plan))
        if choice.estimate.fits:
            fitting.append(choice)
            continue
        too_large.add(kind)
        least = choice if least is None else min(least, choice, key=lambda c: c.estimate.peak_bytes)
    if not fitting:
        raise _infeasible(request, least)
    fitting.sort(key=lambda choice: (choice.estimate.time_s, choice.estimate.peak_bytes))
    return [Choice(with_prediction(choice.plan, choice.estimate), choice.estimate) for choice in fitting[:top]]


def uniform_plans(
    model_ref: str, cluster_ref: str, global_batch: int, *, seq_length: int | None = None, micro_batches: Sequence[int] = (),
    max_tp: int | None = None,
) -> Iterator[Plan]:  # fmt: skip
    """Every valid plan of the grid, small micro-batches before large ones."""
    model, cluster = resolved(model_ref, cluster_ref)
    return _plans(model, cluster, frame_of(model_ref, cluster_ref, model, cluster, global_batch, seq_length), micro_batches, max_tp)


def resolved(model_ref: str, cluster_ref: str) -> tuple[Model, Cluster]:
    """The model and the cluster that two texts name."""
    from penstock.clusters import resolve_cluster
    from penstock.models.catalog import resolve_model

    return resolve_model(model_ref), resolve_cluster(cluster_ref)


def frame_of(model_ref: str, cluster_ref: str, model: Model, cluster: Cluster, global_batch: int, seq_length: int | None) -> Plan:
    """What all plans have in common, as the plan for one device; what is wrong with the request is wrong with it."""
    frame = Plan(
        model_reference(model_ref),
        cluster_reference(cluster_ref),
        global_batch,
        (Stage(0, model.num_ops, devices=((0,),)),),
        MicroBatching("padded", "fixed", 1),
        seq_length=model.seq_length if seq_length is None else seq_length,
        dec_length=model.dec_length,
        precision=model.dtype,
    )
    if cluster.num_devices > _MAX_DEVICES:
        raise InputError(
            f"the cluster has {cluster.num_devices} devices ({cluster.describe()}); the search takes up to {_MAX_DEVICES}. Use fewer."
        )
    require_valid(frame, model, cluster, where="the request")
    return frame


def _plans(model: Model, cluster: Cluster, frame: Plan, micro_batches: Sequence[int], max_tp: int | None) -> Iterator[Plan]:
    for tp in _tp_degrees(model, cluster, max_tp):
        for pp in _pipeline_degrees(model, cluster.num_devices // tp):
            replicas = cluster.num_devices // tp // pp
            for recompute in (False, True):
                for zero in (0, 1) if replicas > 1 else (0,):
                    if not (sizes := micro_batch_sizes(frame.global_batch, replicas, micro_batches)):
                        continue
                    stages = uniform_stages(model, pp=pp, tp=tp, replicas=replicas, recompute=recompute, zero=zero)
                    for samples in sizes:
                        batching = replace(frame.micro_batching, samples=samples)
                        plan = replace(frame, stages=stages, num_replicas=replicas, micro_batching=batching)
                        if not check_plan(plan, model, cluster):
                            yield plan


def _tp_degrees(model: Model, cluster: Cluster, max_tp: int | None) -> list[int]:
    largest = min(model.max_tp(), max_tp or model.max_tp())
    powers = [2**k for k in range(largest.bit_length()) if 2**k <= largest]
    return [tp for tp in powers if all(run.node.num_devices % tp == 0 for run in cluster.runs)]


def _pipeline_degrees(model: Model, num_groups: int) -> list[int]:
    most = sum(name not in BESIDE for name, _ in block_ranges(model))
    return [pp for pp in range(1, min(num_groups, most) + 1) if num_groups % pp == 0]


def micro_batch_sizes(global_batch: int, replicas: int, given: Sequence[int]) -> list[int]:
    """Micro-batch sizes that divide a replica's share, smallest first."""
    if given and min(given) < 1:
        raise InputError(f"micro_batches has {min(given)}; 1 or more samples were expected.")
    share, rest = divmod(global_batch, replicas)
    if rest:
        return []
    sizes = sorted(set(given)) or [2**k for k in range(share.bit_length())]
    return [size for size in sizes if share % size == 0]


def _infeasible(request: Request, least: Choice | None) -> InfeasibleError:
    """Why there is no plan: nothing divides, or memory does not suffice, with how much would."""
    model, cluster, micro_batches = request.model, request.cluster, request.micro_batches
    global_batch, limit_bytes = request.frame.global_batch, request.memory_limit_bytes
    if least is None:
        sizes = f" into micro-batches of {', '.join(map(str, micro_batches))}" if micro_batches else ""
        multiple = cluster.num_devices * min(micro_batches, default=1)
        return InfeasibleError(
            f"no uniform plan divides a global batch of {global_batch}{sizes} over the {cluster.num_devices} devices of "
            f"{cluster.describe()}. Use a global batch that is a multiple of {multiple}, or other micro-batches."
        )
    found, plan = least.estimate, least.plan
    stage = max(found.stages, key=lambda s: s.memory.total_bytes)
    purpose, size, _ = max(stage.memory.rows()[:-1], key=lambda row: row[1])
    given = limit_bytes <= stage.limit_bytes
    limit = f"--memory-limit allows {_gb(stage.limit_bytes)}" if given else f"{stage.device} has {_gb(stage.limit_bytes)}"
    return InfeasibleError(
        f"no uniform plan of {model.name} fits on {cluster.describe()}: the least that a device needs is {_gb(stage.memory.total_bytes)} "
        f"({_gb(size)} of it {purpose}; stage {stage.index} with pp {plan.num_stages}, tp {least.tp}, {plan.num_replicas} replicas, "
        f"micro-batch {plan.micro_batching.samples}, recompute {least.recompute}, zero {plan.stages[0].zero}), but {limit}. "
        f"Use {'a higher limit, ' if given else ''}more or larger devices, shorter sequences or smaller micro-batches."
    )


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
