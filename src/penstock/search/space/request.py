"""What a search is asked, read and checked once: model, cluster, batch, costs and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from penstock.costs.sources import open_costs
from penstock.errors import InputError
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import cluster_reference, model_reference
from penstock.plans.validity import require_valid
from penstock.schedules.rules import SEARCHED_SCHEDULES
from penstock.search.space.blocks import Blocks, blocks_of
from penstock.search.space.recovery import Recovery
from penstock.timing.estimate import Estimator
from penstock.timing.pipeline import share_shape

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model

__all__ = ["Request", "frame_of", "micro_batch_sizes", "resolved"]

_MAX_DEVICES = 100_000
"""Plans name every rank, and a search makes many plans."""


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
    """Those that may be chosen; 1F1B always."""

    @classmethod
    def of(
        cls, model_ref: str, cluster_ref: str, global_batch: int, costs: str | CostSource, seq_length: int | None,
        micro_batches: Sequence[int], memory_limit_bytes: float, schedules: Sequence[str] = SEARCHED_SCHEDULES,
    ) -> Request:  # fmt: skip
        """Reads the texts; what is wrong with them is said now."""
        if not memory_limit_bytes > 0:
            raise InputError(f"the memory limit is {memory_limit_bytes} bytes; more than 0 was expected.")
        model, cluster = resolved(model_ref, cluster_ref)
        source = open_costs(costs, cluster) if isinstance(costs, str) else costs
        frame = frame_of(model_ref, cluster_ref, model, cluster, global_batch, seq_length)
        shapes = {share_shape(frame, samples) for samples in micro_batch_sizes(global_batch, 1, micro_batches)}
        estimator = Estimator(model, cluster, source, memory_limit_bytes, shapes)
        return cls(model, cluster, frame, estimator, tuple(micro_batches), memory_limit_bytes, tuple(schedules))

    @cached_property
    def recovery(self) -> tuple[Recovery, Recovery]:
        """What the model's distinct ops keep, and what would bring it back; without and with sequence parallelism."""
        return Recovery.of(self.model), Recovery.of(self.estimator.model_under(self.estimator.divides_tokens))

    @cached_property
    def blocks(self) -> Blocks:
        """Where the model's chain repeats."""
        return blocks_of(self.model)

    def on(self, cluster: Cluster) -> Request:
        """The request for another cluster, with the costs and limits of this one."""
        from penstock.clusters import cluster_to_dict

        shapes = {share_shape(self.frame, samples) for samples in micro_batch_sizes(self.frame.global_batch, 1, self.micro_batches)}
        estimator = Estimator(self.model, cluster, self.estimator.source, self.memory_limit_bytes, shapes)
        return replace(self, cluster=cluster, frame=replace(self.frame, cluster=cluster_to_dict(cluster)), estimator=estimator)


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


def micro_batch_sizes(global_batch: int, replicas: int, given: Sequence[int]) -> list[int]:
    """Micro-batch sizes that divide a replica's share, smallest first."""
    if given and min(given) < 1:
        raise InputError(f"micro_batches has {min(given)}; 1 or more samples were expected.")
    share, rest = divmod(global_batch, replicas)
    if rest:
        return []
    sizes = sorted(set(given)) or [2**k for k in range(share.bit_length())]
    return [size for size in sizes if share % size == 0]
