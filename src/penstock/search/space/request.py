"""What a search is asked, read and checked once: model, cluster, batch, costs and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.costs.sources import open_costs
from penstock.errors import InputError, plural
from penstock.models.shapes import Quantity
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.precision import chosen_gradients, chosen_lengths, chosen_precision
from penstock.plans.references import cluster_reference, model_reference
from penstock.plans.validity import require_valid
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES, SEARCHED_SCHEDULES, unchunked
from penstock.search.space.blocks import Blocks, blocks_of
from penstock.search.space.recovery import Recovery
from penstock.timing.estimate import Estimator
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model

__all__ = ["Request", "frame_of", "micro_batch_sizes", "resolved"]

Answer = TypeVar("Answer")

_MAX_DEVICES = 100_000
"""Plans name every rank, and a search makes many plans."""
_MAX_SIZES, _APART = 24, 1.3
"""Micro-batch sizes up to which all are tried, and how many times as large as the one before the next is where there are more."""


@dataclass(frozen=True)
class Request:
    """What a search is asked: the model and cluster that the texts name, what all plans have in common, and who estimates them."""

    model: Model
    cluster: Cluster
    frame: Plan
    estimator: Estimator
    micro_batches: tuple[int, ...]
    memory_limit_bytes: float
    schedules: tuple[str, ...] = SEARCHED_SCHEDULES
    """Those that may be chosen; 1F1B always, unless it is an asynchronous one alone."""
    narrows: bool = False
    """Whether gradients may be summed in the weights' own dtype where nothing fits in fp32."""
    every_node: bool = False
    """Whether plans that would do with a node less are left out, where a cluster without it is searched as well (`money`)."""

    @classmethod
    def of(
        cls, model_ref: str, cluster_ref: str, global_batch: int, costs: str | CostSource, seq_length: int | None,
        micro_batches: Sequence[int], memory_limit_bytes: float, schedules: Sequence[str] = SEARCHED_SCHEDULES,
        precision: str | None = None, gradients: str | None = None,
    ) -> Request:  # fmt: skip
        """Reads the texts; what is wrong with them is said now.

        Without `precision` it is the model's own, or one that all devices have; without `gradients` they are summed in fp32 if any plan
        then fits, else in the weights' dtype.
        """
        if not memory_limit_bytes > 0:
            raise InputError(f"the memory limit is {memory_limit_bytes} bytes; more than 0 was expected.")
        model, cluster, notes = resolved(model_ref, cluster_ref, precision)
        if any(SCHEDULES[name].asynchronous for name in schedules):
            if precision is None and model.dtype == "fp16":  # whose loss scale is one for all stages
                model, cluster, notes = resolved(model_ref, cluster_ref, "fp32")
            notes = (*notes, *_shared_weights(model))
        source = open_costs(costs, cluster) if isinstance(costs, str) else costs
        frame = frame_of(model_ref, cluster_ref, model, cluster, global_batch, seq_length, gradients, notes)
        shapes = {share_shape(frame, samples) for samples in micro_batch_sizes(global_batch, 1, micro_batches)}
        estimator = Estimator(model, cluster, source, memory_limit_bytes, shapes)
        return cls(
            model, cluster, frame, estimator, tuple(micro_batches), memory_limit_bytes, tuple(schedules),
            narrows=gradients is None and frame.precision != "fp32",
        )  # fmt: skip

    @property
    def asynchronous(self) -> bool:
        """Whether stages are to update their weights after every micro-batch."""
        return any(SCHEDULES[name].asynchronous for name in self.schedules)

    @property
    def unchunked(self) -> list[str]:
        """The schedules with one stage per device group that plans may have, of which 1F1B is always one but for asynchronous searches."""
        return unchunked(self.schedules if self.asynchronous else {DEFAULT_SCHEDULE, *self.schedules})

    @cached_property
    def recovery(self) -> tuple[Recovery, Recovery]:
        """What the model's distinct ops keep, and what would bring it back; without and with sequence parallelism."""
        return Recovery.of(self.model), Recovery.of(self.estimator.model_under(self.estimator.divides_tokens))

    @cached_property
    def _common(self) -> dict[tuple[Any, ...], Any]:
        return {}

    def once(self, name: str, key: tuple[Any, ...], make: Callable[[], Answer]) -> Answer:
        """What `make` returns, worked out once for all families of plans, such as the passes of ops at one shape."""
        if (name, *key) not in self._common:
            self._common[name, *key] = make()
        found: Answer = self._common[name, *key]
        return found

    @cached_property
    def carried(self) -> tuple[Quantity, ...]:
        """Bytes that each of the model's distinct ops returns."""
        dtype = self.model.dtype
        return tuple(sum((spec.size_bytes(dtype) for spec in op.carry), Quantity()) for op in self.model.distinct_ops)

    @cached_property
    def blocks(self) -> Blocks:
        """Where the model's chain repeats."""
        return blocks_of(self.model)

    def on_all_of(self, cluster: Cluster) -> Request:
        """The request for plans that use every node of another cluster."""
        return replace(self.on(cluster), every_node=True)

    def narrowed(self) -> Request:
        """The request with gradients in the weights' own dtype."""
        note = f"gradients are summed in {self.frame.precision}: no plan that sums them in fp32 fits."
        return replace(self, frame=replace(self.frame, gradients=self.frame.precision, notes=(*self.frame.notes, note)), narrows=False)

    def on(self, cluster: Cluster) -> Request:
        """The request for another cluster, with the costs and limits of this one."""
        from penstock.clusters import cluster_to_dict

        shapes = {share_shape(self.frame, samples) for samples in micro_batch_sizes(self.frame.global_batch, 1, self.micro_batches)}
        estimator = Estimator(self.model, cluster, self.estimator.source, self.memory_limit_bytes, shapes)
        return replace(self, cluster=cluster, frame=replace(self.frame, cluster=cluster_to_dict(cluster)), estimator=estimator)


def _shared_weights(model: Model) -> Iterator[str]:
    """What a reader of an asynchronous plan should know of weights that ops of several stages may share."""
    for place in model.ops:
        if place.op.tied_to:
            yield (
                f"'{place.op.tied_to}' and '{place.name}' share a weight, which stages that update by themselves cannot: plans with both "
                "on one stage train, others can be simulated and exported. Give a model file `tied: false` to train those."
            )


def resolved(model_ref: str, cluster_ref: str, precision: str | None) -> tuple[Model, Cluster, tuple[str, ...]]:
    """The model, in a precision that the devices have, and the cluster that two texts name; what a reader should know of both."""
    from penstock.clusters import resolve_cluster
    from penstock.models.catalog import resolve_model

    cluster = resolve_cluster(cluster_ref)
    model, notes = chosen_precision(resolve_model(model_ref), cluster, precision)
    return model, cluster, (*model.notes, *notes)


def frame_of(
    model_ref: str, cluster_ref: str, model: Model, cluster: Cluster, global_batch: int, seq_length: int | None,
    gradients: str | None, notes: tuple[str, ...],
) -> Plan:  # fmt: skip
    """What all plans have in common, as the plan for one device; what is wrong with the request is wrong with it."""
    length, dec_length, more = chosen_lengths(model, seq_length)
    frame = Plan(
        model_reference(model_ref, model),
        cluster_reference(cluster_ref),
        global_batch,
        (Stage(0, model.num_ops, devices=((0,),)),),
        MicroBatching("padded", "fixed", 1),
        seq_length=length,
        dec_length=dec_length,
        precision=model.dtype,
        gradients=chosen_gradients(gradients, model.dtype),
        notes=(*notes, *more),
    )
    if cluster.num_devices > _MAX_DEVICES:
        raise InputError(
            f"the cluster has {plural(cluster.num_devices, 'device')} ({cluster.describe()}); the search takes up to {_MAX_DEVICES}. Use "
            "fewer."
        )
    require_valid(frame, model, cluster, where="the request")
    return frame


def micro_batch_sizes(global_batch: int, replicas: int, given: Sequence[int]) -> list[int]:
    """Micro-batch sizes that divide a replica's share, smallest first: those given, or all of them, or as many as are far enough apart."""
    if given and min(given) < 1:
        raise InputError(f"micro_batches has {min(given)}; 1 or more samples were expected.")
    share, rest = divmod(global_batch, replicas)
    if rest:
        return []
    if given:
        return [size for size in sorted(set(given)) if share % size == 0]
    low = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = sorted({*low, *(share // size for size in low)})
    return sizes if len(sizes) <= _MAX_SIZES else _apart(sizes)


def _apart(sizes: Sequence[int]) -> list[int]:
    """Powers of two, and of the others those that are not near one that is kept already."""
    kept = [size for size in sizes if size.bit_count() == 1]
    for size in sizes:
        if all(max(size / other, other / size) >= _APART for other in kept):
            kept.append(size)
    return sorted(kept)
