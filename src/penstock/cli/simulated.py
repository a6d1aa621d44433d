"""What `penstock simulate` runs: a plan as it is, a batch planned for it, or a configuration of another system."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.configured import CONFIGURED, configured_costs
from penstock.cli.plan_words import plan_name, ranks_words
from penstock.errors import InputError, near_misses, plural

if TYPE_CHECKING:
    from penstock.batching.costs import PipelineCosts
    from penstock.batching.plan import BatchPlan
    from penstock.batching.ways import BatchWays
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.schedules.actions import Schedule
    from penstock.timing.workload import Workload

__all__ = ["SimulatedReplica", "subjects"]


@dataclass(frozen=True)
class _Words:
    """Words for a plan, or for a configuration of another system."""

    title: str
    """Which model on which devices."""
    ranks: list[str]
    """The ranks of each device group, in one replica or in all."""
    training: str = ""
    """Precision and the like with a semicolon, where something says it."""
    schedule: str | None = None


@dataclass(frozen=True)
class SimulatedReplica:
    """The replica that is simulated."""

    words: _Words
    order: str
    """The plan's schedule, how its batch was ordered, or the order to look at instead."""
    replica: int | None
    """None: all replicas run as many micro-batches, and the slowest stands for them."""
    what: str
    workload: Workload
    schedule: Schedule
    predicted: str
    """Where `predicted_s` comes from."""
    predicted_s: float
    source: str
    notes: tuple[str, ...] = ()
    num_batches: int = 1
    """Global batches without a break between them, under an asynchronous schedule; times are told of one."""


def subjects(
    plan: Path | None, costs: str | None, lengths: Path | None, batch: Path | None, schedule: str | None, ways: BatchWays
) -> tuple[SimulatedReplica, SimulatedReplica]:
    """The replica that the options ask for: in the plan's own order, and in the order that `schedule` names (the same without one)."""
    from penstock.batching.ways import BatchWays

    if lengths is not None and batch is not None:
        raise InputError("--lengths plans a batch and --batch has one planned. Give one of them.")
    if lengths is None and ways != BatchWays():
        raise InputError("--order, --split, --recompute and --memory-limit say how a batch is planned. Give its --lengths.")
    given = lengths or batch
    if costs is not None and costs.partition(":")[0] in CONFIGURED:
        if plan is not None or given is None:
            raise InputError(f"--costs {costs}: the configuration is the plan. Give --lengths or --batch, and no plan file.")
        own = _configured(costs, given, lengths is None, ways)
        return own, own if schedule is None else _made_order(schedule, own)
    if plan is None:
        raise InputError("a plan file is missing, as in `penstock simulate plan.json`; with --costs dynapipe:DIR/NAME there is none.")
    asked = _asked(plan, costs)
    own = _planned(*asked) if given is None else _batched(given, lengths is None, ways, *asked)
    return own, own if schedule is None else _reordered(schedule, own, given is not None, *asked)


def _asked(path: Path, costs: str | None) -> tuple[Plan, Model, Cluster, CostSource]:
    from penstock.costs.sources import open_costs
    from penstock.plans.references import cluster_of, model_of
    from penstock.plans.schema import read_plan
    from penstock.plans.validity import require_valid

    plan = read_plan(path)
    require_valid(plan, where=f"plan '{path}'")
    cluster = cluster_of(plan)
    return plan, model_of(plan), cluster, open_costs(costs or plan.costs, cluster)


def _planned(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> SimulatedReplica:
    """Equal micro-batches, as the plan has them."""
    from penstock.timing.planned import planned_pipeline

    found = planned_pipeline(plan, model, cluster, source)
    where = "by the closed formula that bounds are of, where no message is hidden behind compute"
    replica = found.estimate.replica if plan.micro_batching.per_replica else None
    what = f"schedule {plan.schedule}" if plan.num_groups > 1 else "one stage"
    return SimulatedReplica(
        _words(plan, replica), plan.schedule, replica, what, found.workload, found.schedule, where, found.estimate.time_s,
        found.estimate.source, found.estimate.notes, found.num_batches,
    )  # fmt: skip


def _words(plan: Plan, replica: int | None) -> _Words:
    from penstock.plans.precision import described_training
    from penstock.plans.texts import format_ranks

    groups = [stage.devices for stage in plan.stages[: plan.num_groups]]
    ranks = [ranks_words(group) if replica is None else format_ranks(group[replica]) for group in groups]
    return _Words(plan_name(plan), ranks, f"{described_training(plan)}; ", plan.schedule)


def _batched(
    path: Path, is_planned: bool, ways: BatchWays, plan: Plan, model: Model, cluster: Cluster, source: CostSource
) -> SimulatedReplica:
    """Micro-batches planned for the lengths of a batch: in a file already, or now."""
    from penstock.batching.lengths import read_lengths
    from penstock.batching.plan import read_batch_plan
    from penstock.batching.planned import planned_costs
    from penstock.batching.planner import cut_by_lengths

    plan = cut_by_lengths(plan)
    if is_planned:
        batch = _fitting(read_batch_plan(path), path, plan)
        prices = planned_costs(plan, model, cluster, source, *batch.longest)
    else:
        samples = read_lengths(path)
        longest, longest_dec = max(sample.length for sample in samples), max(sample.dec_length for sample in samples)
        prices = ways.limited(planned_costs(plan, model, cluster, source, longest, longest_dec))
        batch = ways.planned(samples, prices)
    replica = max(range(len(batch.replicas)), key=lambda index: batch.replicas[index].predicted_s)
    return _slowest(batch, prices, path, replica, _words(plan, replica))


def _slowest(batch: BatchPlan, prices: PipelineCosts, path: Path, replica: int, words: _Words) -> SimulatedReplica:
    from penstock.batching.workloads import batch_workload

    own = batch.replicas[replica]
    what = f"{len(own.micro_batches)} of {batch.num_micro_batches} micro-batches of {path.name}"
    return SimulatedReplica(
        words, own.order, replica, what, batch_workload(prices, own.micro_batches, replica), own.schedule, "by the planner of batches",
        batch.predicted_s, batch.costs,
    )  # fmt: skip


def _configured(costs: str, path: Path, is_planned: bool, ways: BatchWays) -> SimulatedReplica:
    """A batch in a configuration of another system, planned already or now."""
    from penstock.batching.lengths import read_lengths
    from penstock.batching.plan import read_batch_plan
    from penstock.batching.workloads import require_priced

    samples = [] if is_planned else read_lengths(path)
    prices = ways.limited(configured_costs(costs, samples))
    batch = read_batch_plan(path) if is_planned else ways.planned(samples, prices)
    require_priced(batch, prices, f"batch '{path}'")
    replica = max(range(len(batch.replicas)), key=lambda index: batch.replicas[index].predicted_s)
    return _slowest(batch, prices, path, replica, _Words(costs, [f"of stage {s}" for s in range(prices.num_stages)]))


def _fitting(batch: BatchPlan, path: Path, plan: Plan) -> BatchPlan:
    """The batch, if it was planned for as many replicas and stages as the plan has."""
    replicas, stages = len(batch.replicas), {len(replica.schedule) for replica in batch.replicas}
    if replicas != plan.num_replicas or stages != {plan.num_groups}:
        raise InputError(
            f"batch '{path}' is for {plural(replicas, 'replica')} of {', '.join(map(str, sorted(stages)))} stages, the plan has "
            f"{plan.num_replicas} of {plan.num_groups}. Give the plan it was made with."
        )
    patterns = [len(stage.recompute) or 1 for stage in plan.stages]
    for micro in (micro for replica in batch.replicas for micro in replica.micro_batches):
        if len(micro.recompute) > len(patterns) or any(used >= known for used, known in zip(micro.recompute, patterns, strict=False)):
            raise InputError(f"batch '{path}' uses recomputation patterns that the plan does not have. Give the plan it was made with.")
    return batch


def _reordered(
    name: str, own: SimulatedReplica, dynamic: bool, plan: Plan, model: Model, cluster: Cluster, source: CostSource
) -> SimulatedReplica:
    """The replica with its stages and micro-batches in another order."""
    from penstock.ordering.choose import MADE, ORDERS
    from penstock.plans.validity import require_valid
    from penstock.schedules.rules import SCHEDULES

    if name not in ORDERS:
        raise InputError(f"--schedule is '{name}'. {near_misses(name, ORDERS)}")
    if name in MADE and SCHEDULES[plan.schedule].asynchronous:
        raise InputError(f"--schedule {name}: under '{plan.schedule}' the order says when weights are updated. Use one of the schedules.")
    if name in SCHEDULES and not dynamic:
        other = replace(plan, schedule=name, predicted=None)
        require_valid(other, model, cluster, where=f"the plan under the schedule '{name}'")
        return _planned(other, model, cluster, source)
    return _made_order(name, own)


def _made_order(name: str, own: SimulatedReplica) -> SimulatedReplica:
    """The replica with its micro-batches in an order made for them, or in that of a plain schedule."""
    from penstock.ordering.choose import MADE, ORDERS, order_of
    from penstock.schedules.rules import SCHEDULES

    if name not in ORDERS:
        raise InputError(f"--schedule is '{name}'. {near_misses(name, ORDERS)}")
    if name in SCHEDULES and not SCHEDULES[name].whole_passes:
        plain = ", ".join(known for known, rules in SCHEDULES.items() if rules.whole_passes)
        raise InputError(f"--schedule {name}: micro-batches of a batch run in whole passes. Use {plain} or {', '.join(MADE)}.")
    return replace(own, order=name, what=f"{own.what}, order {name}", schedule=order_of(name, own.workload))
