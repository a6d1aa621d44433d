"""The views of a plan: at a glance, its ops and stages, where time and memory go, and its timeline as the simulator has it."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import plural, shell_words
from penstock.plans.plan import Plan
from penstock.plans.precision import described_training
from penstock.plans.references import cluster_of, model_of
from penstock.plans.telling import model_title
from penstock.plans.texts import format_ranks
from penstock.reports.blocks import Block, ChainOp, Command, Fact, Facts, MemoryLine, OpChain, Spans, Stack, Subject, Table, Text, View
from penstock.reports.span_lanes import SpanLanes
from penstock.reports.units import format_time
from penstock.schedules.actions import KINDS
from penstock.timing.critical_path import critical_path
from penstock.timing.execution import Execution, execute
from penstock.timing.iteration_estimate import Estimate
from penstock.timing.planned import PlannedPipeline, clocked, planned_pipeline

if TYPE_CHECKING:
    from penstock.models.ops import Model

__all__ = [
    "add_critical", "add_execution", "critical_causes", "device_names", "execution_spans", "execution_subject", "passes_of",
    "plan_subject", "plan_views", "priced",
]  # fmt: skip

_MAX_ACTIONS = 2_000_000
"""Beyond it the timeline of a plan is left out: nobody looks at so many passes, and a page of them opens slowly."""
_CAUSES = (
    "forward",
    "backward",
    "recomputation",
    "tp collectives",
    "transfers",
    "waiting for the host",
    "bubble",
    "gradient sync",
    "optimizer",
)


def priced(plan: Plan, costs: str | None = None) -> tuple[Model, PlannedPipeline]:
    """The model of a valid plan, and one replica of it by its costs."""
    from penstock.costs.sources import open_costs

    model, cluster = model_of(plan), cluster_of(plan)
    return model, planned_pipeline(plan, model, cluster, open_costs(costs or plan.costs, cluster))


def plan_subject(name: str, plan: Plan) -> Subject:
    """A plan, ready to be shown."""
    return Subject("plan", name, tuple(plan_views(name, plan)))


def plan_views(name: str, plan: Plan) -> list[View]:
    """Glance, Plan, Stages and Timeline of a valid plan."""
    model, found = priced(plan)
    estimate = clocked(plan, found.estimate)
    return [
        View("glance", "Glance", _glance(name, plan, estimate)),
        View("plan", "Plan", _ops(plan, model, estimate)),
        View("stages", "Stages", _stages(estimate)),
        View("timeline", "Timeline", _timeline(plan, found)),
    ]


def _glance(name: str, plan: Plan, found: Estimate) -> list[Block]:
    predicted, tight = plan.predicted, max(found.stages, key=lambda stage: stage.memory.total_bytes / stage.limit_bytes)
    bound_s = predicted.lower_bound_s if predicted else None
    fits = "" if found.fits else " It does not fit into memory."
    cluster = plan.cluster if isinstance(plan.cluster, str) else str(plan.cluster.get("name", "a cluster"))
    sentence = (
        f"{model_title(plan)} on {cluster}: {plural(plan.num_groups, 'stage')}, {plural(plan.num_replicas, 'replica')}, "
        f"schedule {plan.schedule}, {format_time(found.time_s)} per iteration of {plural(plan.global_batch, 'sample')}.{fits}"
    )
    facts = [
        Fact("iteration", found.time_s, "time", f"simulated, {found.source}"),
        Fact("tokens/s", found.tokens_per_s, "count")
        if found.tokens_per_s is not None
        else Fact("samples/s", found.samples_per_s, "number"),
        Fact("MFU", found.mfu, "share"),
        Fact("USD per iteration", found.price_usd, "usd", "" if found.price_usd_per_h is None else f"{found.price_usd_per_h:,.2f} USD/h"),
        Fact("memory left", tight.limit_bytes - tight.memory.total_bytes, "bytes", f"on the fullest device, stage {tight.index}"),
    ]
    if bound_s:
        facts.append(Fact("bound", bound_s, "time", "no plan of the searched kinds is faster, by formula"))
        facts.append(Fact("gap", found.formula_s / bound_s - 1, "share", "above the bound, by formula"))
    command = shell_words("penstock", "train", name, "--data", "DATA", "--steps", 1000, "--out", "run")
    notes = dict.fromkeys((*plan.notes, *found.notes))
    return [Text(sentence), Facts(tuple(fact for fact in facts if fact.value is not None)), Command(command), *map(Text, notes)]


def _ops(plan: Plan, model: Model, found: Estimate) -> list[Block]:
    """The chain of ops by stage, and how each stage is divided."""
    ops = []
    for index, stage in enumerate(plan.stages):
        again = stage.recomputed()
        places = [(place.block, place.index - stage.first in again) for place in model.ops[stage.first : stage.last]]
        ops += [ChainOp(block, len(list(run)), index, recomputed) for (block, recomputed), run in groupby(places)]
    rows, said = [], []
    for stage, own in zip(plan.stages, found.stages, strict=True):
        ranks = " | ".join(map(format_ranks, stage.devices[:8])) + (" | …" if len(stage.devices) > 8 else "")
        tp, dp = stage.degrees.tp, stage.degrees.dp
        rows.append((own.index, f"{stage.first}:{stage.last}", own.device, ranks, tp, dp, len(stage.recomputed()), own.zero,
                     "yes" if own.sequence_parallel else "no"))  # fmt: skip
        said.append(f"stage {own.index}: ops {stage.first}:{stage.last} on {own.device}, ranks {ranks}, tp {tp}, dp {dp}")
    columns = ("stage", "ops", "device", "ranks", "tp", "dp", "recomputed ops", "ZeRO", "sequence parallel")
    units = ("number", "text", "text", "text", "number", "number", "number", "number", "text")
    nodes = Counter(node.name for node in cluster_of(plan).nodes)
    where = ", ".join(f"{count} × {name}" for name, count in nodes.items())
    return [
        Text(f"{described_training(plan)}; on {where}"), OpChain("ops by stage", tuple(ops), tuple(said)),
        Table("how stages are divided", columns, units, tuple(rows)),
    ]  # fmt: skip


def _stages(found: Estimate) -> list[Block]:
    """Time of an iteration by cause, and memory by purpose against its limit."""
    count, times = found.num_micro_batches, []
    for stage in found.stages:
        work = stage.work
        passes = (work.forward_s, work.backward_s, work.recompute_s, work.tp_s, work.transfer_in_s + work.transfer_out_s, work.waiting_s)
        times.append((*(time_s * count for time_s in passes), stage.bubble_s, stage.sync_s, stage.optimizer_s))
    names = tuple(f"stage {stage.index}" for stage in found.stages)
    purposes = tuple(name for name, _, _ in found.stages[0].memory.rows()[:-1])
    memory = tuple(tuple(size for _, size, _ in stage.memory.rows()[:-1]) for stage in found.stages)
    shares = tuple((name, time_s, time_s / found.time_s) for name, time_s in found.shares() if time_s)
    return [
        Stack("time of an iteration by cause", names, _CAUSES, "time", tuple(times)),
        Stack("memory of the fullest device", names, purposes, "bytes", memory, tuple(stage.limit_bytes for stage in found.stages)),
        Table(f"one iteration, seen from stage {found.bottleneck}, for which the others wait", ("what", "time", "share"),
              ("text", "time", "share"), shares),
    ]  # fmt: skip


def device_names(plan: Plan) -> list[str]:
    """The ranks of each device group, in the first of several replicas."""
    groups, more = [stage.devices for stage in plan.stages[: plan.num_groups]], "" if plan.num_replicas == 1 else " …"
    return [f"device {number}: ranks {format_ranks(group[0])}{more}" for number, group in enumerate(groups)]


def _timeline(plan: Plan, found: PlannedPipeline) -> list[Block]:
    if sum(map(len, found.schedule)) > _MAX_ACTIONS:
        return [Text(f"The timeline of {sum(map(len, found.schedule)):,} passes is left out; `penstock simulate` has its sums.", note=True)]
    what = "one iteration" if found.num_batches == 1 else f"{found.num_batches} iterations without a break"
    block = execution_spans(execute(found.schedule, found.workload), device_names(plan), f"{what} of the slowest replica, simulated")
    return [block, *critical_causes(block)]


def execution_spans(run: Execution, names: list[str], title: str) -> Spans:
    """A simulated iteration as a timeline with memory."""
    lanes = SpanLanes()
    add_execution(lanes, run, names)
    memory = []
    for device, name in enumerate(names):
        own = run.memory_device == device
        limit = float(run.workload.limit_bytes[device])
        times, held = (np.rint(values[own]).astype(np.int64) for values in (run.memory_time_s * 1e9, run.memory_bytes))
        memory.append(MemoryLine(name, times, held, limit if np.isfinite(limit) else None))
    return lanes.block(title, memory=tuple(memory) if np.any(run.memory_bytes > 0) else ())


def execution_subject(name: str, run: Execution) -> Subject:
    """A simulated iteration by itself."""
    busy, end_s = run.device_busy_s(), run.makespan_s
    sentence = f"{plural(len(run.schedule), 'device')}, {format_time(end_s)} in all, of which devices compute {busy.mean() / end_s:.1%}."
    block = execution_spans(run, [f"device {number}" for number in range(len(run.schedule))], "simulated")
    facts = Facts((Fact("iteration", end_s, "time", "simulated"), Fact("devices compute", float(busy.mean() / end_s), "share"),
                   Fact("most held", float(run.peak_bytes.max()), "bytes", "by one device")))  # fmt: skip
    return Subject("timeline", name, (View("glance", "Glance", [Text(sentence), facts]),
                                      View("timeline", "Timeline", [block, *critical_causes(block)])))  # fmt: skip


def add_execution(lanes: SpanLanes, run: Execution, names: list[str], replica: int = 0) -> None:
    """The lanes of a simulated iteration: passes of each device, what it sends and does after the last of them; then the critical path."""
    devices = run.workload.devices
    sends: list[list[tuple[float, float, str, int, int]]] = [[] for _ in names]
    for direction, cut, micro_batch in np.argwhere(np.isfinite(run.transfer_end_s)).tolist():
        where = direction, cut, micro_batch
        sender, receiver = devices[cut + direction], devices[cut + 1 - direction]
        if sender != receiver and run.transfer_start_s[where] < run.transfer_end_s[where]:
            letter = "gradient" if direction else "activation"
            sends[sender].append((float(run.transfer_start_s[where]), float(run.transfer_end_s[where]), letter, cut, micro_batch))
    for stage, (start, end) in enumerate(zip(run.after_start_s.tolist(), run.after_end_s.tolist(), strict=True)):
        if start < end < np.inf:
            sends[devices[stage]].append((start, end, "after", stage, -1))
    for device, name in enumerate(names):
        lanes.add(name, f"device {device}", "predicted", passes_of(run, device), replica=replica)
        for row in _apart(sends[device]):
            lanes.add(f"device {device} sends", f"device {device}", "sends", row, replica=replica)
    add_critical(lanes, run, 0, replica)


def passes_of(run: Execution, device: int) -> list[tuple[float, float, str, int, int]]:
    """The passes of a device, as spans of a lane."""
    return [(*run.span_s(action), KINDS[action.kind], action.stage, action.micro_batch) for action in run.schedule[device]]


def add_critical(lanes: SpanLanes, run: Execution, begin_ns: int, replica: int) -> None:
    """A lane of what the iteration could not be shorter than."""
    steps = [(one.start_s, one.end_s, one.cause, one.stage, one.micro_batch) for one in critical_path(run)]
    lanes.add("critical path", "critical path", "critical", steps, begin_ns, replica)


def critical_causes(block: Spans) -> list[Block]:
    """Seconds of each kind of work on the critical paths of a timeline."""
    own = [slice(lane.first, lane.first + lane.count) for lane in block.lanes if lane.role == "critical"]
    times = np.zeros(len(block.kinds))
    for lane in own:
        np.add.at(times, block.kind[lane], block.length_ns[lane] * block.tick_ns * 1e-9)
    rows = [(kind.name, float(time_s), float(time_s / times.sum())) for kind, time_s in zip(block.kinds, times, strict=True) if time_s > 0]
    rows.sort(key=lambda row: -row[1])
    columns, units = ("what", "time", "share"), ("text", "time", "share")
    return [Table("the critical path by cause, predicted", columns, units, tuple(rows))] if rows else []


def _apart(spans: list[tuple[float, float, str, int, int]]) -> list[list[tuple[float, float, str, int, int]]]:
    """Divides spans into as few rows as possible, in which no two overlap."""
    rows: list[list[tuple[float, float, str, int, int]]] = []
    for span in sorted(spans):
        row = next((row for row in rows if row[-1][1] <= span[0]), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows
