"""The views of a run, finished, killed or going on: its steps, its devices, and what was measured above what was predicted.

What is damaged is left out and named. Predictions come from what the run kept in its folder; one without it, of an earlier version, loses
them with its data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from penstock.adapting.events import RunEvent, read_events
from penstock.errors import InputError, PenstockError, plural
from penstock.plans.plan import Plan
from penstock.plans.ranks import device_of_ranks, seats_of
from penstock.reports.blocks import Block, ChartLine, Charts, Fact, Facts, Heat, SpanKind, Subject, Table, Text, View, as_array
from penstock.reports.plan_views import add_critical, critical_causes, passes_of, plan_views
from penstock.reports.span_lanes import LETTERS, SpanLanes
from penstock.reports.units import format_time
from penstock.runtime.telemetry.spans import COMPUTE, NO_STAGE
from penstock.runtime.telemetry.spans_reader import RankSpans, SpanFile, aligned
from penstock.runtime.telemetry.steps import StepRecord, read_steps
from penstock.schedules.rules import SCHEDULES
from penstock.timing.execution import Execution
from penstock.timing.pipeline import micro_batches

__all__ = ["RunFacts", "RunMemo", "read_run_facts", "run_subject"]

_LAST = 10
"""Steps of a timeline, unless others are asked for."""
_MAX_SPANS = 4_000_000
"""Beyond it fewer steps are shown, and the page says so."""
_CATEGORY = ("other", "wait", "transfer")


@dataclass(frozen=True, eq=False)
class RunFacts:
    """The content of a run's folder, as far as it can be read."""

    name: str
    folder: Path
    plan: Plan
    """The one in force, or that was at the end."""
    plans: dict[int, Plan]
    """All that it had, by their first steps."""
    steps: tuple[StepRecord, ...]
    ranks: tuple[RankSpans, ...]
    events: tuple[RunEvent, ...]
    damaged: tuple[str, ...]

    def devices(self, rank: int) -> tuple[int, int]:
        """Replica and device of a rank under the last plan that it had work in."""
        return next(own[rank] for own in map(device_of_ranks, (self.plan, *reversed(self.plans.values()))) if rank in own)

    def plan_at(self, step: int) -> Plan:
        """The plan that a step ran under."""
        return self.plans[max((first for first in self.plans if first <= step), default=min(self.plans))]

    @property
    def spanned(self) -> list[int]:
        """The steps that some rank has spans of."""
        return sorted({step for one in self.ranks for step in one.iterations})


def read_run_facts(folder: Path, files: dict[Path, SpanFile] | None = None) -> RunFacts:
    """Reads a run; InputError where it has not begun. `files` has span files that were read before, of which only what is new is read."""
    from penstock.runtime.run_folder import STEPS, plan_of_run
    from penstock.runtime.run_predictions import kept_plan, kept_plans

    plan, plans, damaged = kept_plan(folder, plan_of_run(folder)), kept_plans(folder), list[str]()
    steps = read_steps(folder / STEPS, damaged) if (folder / STEPS).is_file() else []
    ranks, known = [], {} if files is None else files
    for path in sorted(folder.glob("*.spans")):
        try:
            ranks.append(known.setdefault(path, SpanFile(path)).read())
        except InputError as error:
            damaged.append(f"{path.name}: {error}")
    planned = {rank for one in (plan, *plans.values()) for rank in one.ranks}
    ranks = sorted((one for one in ranks if one.rank in planned), key=lambda one: one.rank)
    events = tuple(read_events(folder, damaged))
    if not steps and not any(len(one.spans) for one in ranks):
        raise InputError(f"run '{folder}' holds no step yet: neither {STEPS} nor span files. Wait for its first step.")
    return RunFacts(folder.name, folder, plan, plans, tuple(steps), tuple(aligned(ranks) if ranks else ()), events, tuple(damaged))


@dataclass
class RunMemo:
    """Facts that stay as they are while a run goes on, for whoever shows it again and again."""

    plan: Plan | None = None
    views: list[View] = field(default_factory=list)
    predicted: dict[int, list[Execution]] = field(default_factory=dict)
    files: dict[Path, SpanFile] = field(default_factory=dict)

    def of(self, plan: Plan) -> RunMemo:
        """The memo, emptied where the run goes on under another plan."""
        if plan != self.plan:
            self.plan, self.views, self.predicted = plan, [], {}
        return self


def run_subject(run: RunFacts, first: int | None = None, last: int | None = None, memo: RunMemo | None = None) -> Subject:
    """A run, ready to be shown; `first` to `last` are the steps of its timeline."""
    known = (memo or RunMemo()).of(run.plan)
    chosen, note = _chosen(run, first, last)
    predicted, why = _predicted(run, chosen, known)
    known.views = known.views or _plan_part(run)
    of_plan = {view.name: view for view in known.views}
    views = [View("glance", "Glance", [*_glance(run, predicted), *_notes(run, why)])]
    views += [of_plan[name] for name in ("plan", "stages") if name in of_plan]
    views += [
        View("timeline", "Timeline", [*note, *_timeline(run, chosen, predicted)]),
        View("run", "Run", _curves(run, predicted)),
        View("devices", "Devices", _devices(run)),
    ]
    return Subject("run", run.name, tuple(views))


def _plan_part(run: RunFacts) -> list[View]:
    """Views of the plan; none where its costs are not there any more."""
    try:
        return plan_views("plan.json", run.plan)
    except PenstockError:
        return []


def _chosen(run: RunFacts, first: int | None, last: int | None) -> tuple[list[int], list[Block]]:
    """The steps to draw, and a note where they are fewer than asked for."""
    known = run.spanned
    if not known:
        return [], [Text("This run has no span files: its timeline is not known.", note=True)]
    if first is not None:
        asked = [step for step in known if first <= step <= (first if last is None else last)]
        if not asked:
            raise InputError(f"--steps: run '{run.name}' has spans of steps {known[0]} to {known[-1]}, none of those asked for.")
    else:
        asked = known[-_LAST:]
    each = max(1, sum(len(one.spans) for one in run.ranks) // len(known))
    most = max(1, _MAX_SPANS // each)
    if len(asked) <= most:
        return asked, []
    return asked[:most], [
        Text(f"{len(asked)} steps were asked for; the first {most} are shown, with about {each:,} instructions each.", note=True)
    ]


def _predicted(run: RunFacts, steps: Sequence[int], known: RunMemo) -> tuple[dict[int, list[Execution]], str]:
    from penstock.runtime.run_predictions import plan_in_force, predicted_executions

    try:
        missing = [step for step in steps if step not in known.predicted]
        new = predicted_executions(run.folder, run.plans, plan_in_force(run.plans, missing))
        known.predicted = {step: (known.predicted | new)[step] for step in steps}
        return known.predicted, ""
    except (PenstockError, OSError, IndexError) as error:
        return {}, f"without a prediction of its steps: {error}"


def _notes(run: RunFacts, why: str) -> list[Block]:
    lost = sum(one.num_lost for one in run.ranks)
    missing = sorted(set(run.plan.ranks) - {one.rank for one in run.ranks})
    notes = [*(f"left out as damaged: {what}" for what in run.damaged), *([why] if why else [])]
    notes += [f"{plural(lost, 'span')} not recorded, since the disk was slow"] if lost else []
    notes += [f"no spans of ranks {', '.join(map(str, missing[:20]))}{' …' if len(missing) > 20 else ''}"] if missing and run.ranks else []
    return [Text(note, note=True) for note in notes]


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _steps_s(run: RunFacts, predicted: dict[int, list[Execution]]) -> dict[int, float]:
    """Each of the predicted steps; of several that are one program of an asynchronous plan, an equal part."""
    found = {}
    for step, replicas in predicted.items():
        plan, slowest = run.plan_at(step), max(replicas, key=lambda one: one.makespan_s)
        of_step = micro_batches(plan)[1][0] if SCHEDULES[plan.schedule].asynchronous else slowest.workload.num_micro_batches
        found[step] = slowest.makespan_s * of_step / slowest.workload.num_micro_batches
    return found


def _glance(run: RunFacts, predicted: dict[int, list[Execution]]) -> list[Block]:
    steps = run.steps
    time_s, by_step = _median([one.time_s for one in steps]), _steps_s(run, predicted)
    same = [one for one in steps if one.step in by_step and one.time_s is not None]
    same_s = _median([one.time_s for one in same])
    expected_s = _median([by_step[step] for step in ([one.step for one in same] or by_step)])
    which = f" in steps {same[0].step} to {same[-1].step}" if 0 < len(same) < len(steps) else ""
    loss, held_out = (_last((one.step, getattr(one, name)) for one in steps) for name in ("loss", "held_out_loss"))
    done = plural(len(steps), "step") + (f", the last of them {steps[-1].step}" if steps else "")
    middle = "" if time_s is None else f", {format_time(time_s)} each in the median"
    beside = "" if same_s is None or expected_s is None else f", {same_s / expected_s:.2f} times what was predicted{which}"
    simulated = f"simulated{which}" if which else "the same steps, simulated"
    of_loss = "of the last step" if steps and loss[0] == steps[-1].step else f"of step {loss[0]}, the last that had one"
    facts = [
        Fact("step", time_s, "time", "measured, median"), Fact("predicted", expected_s, "time", simulated),
        Fact("tokens/s", _median([one.tokens_per_s for one in steps]), "count", "measured, median"),
        Fact("MFU", _median([one.mfu for one in steps]), "share"),
        Fact("loss", loss[1], "number", of_loss),
        Fact("held-out loss", held_out[1], "number", "of the last evaluation"),
        Fact("waiting for programs", _median([one.planning_wait_s for one in steps]), "time", "median of a step"),
        Fact("events", len(run.events), "count", "noticed or decided"),
    ]  # fmt: skip
    return [Text(f"A run of {done}{middle}{beside}."), Facts(tuple(fact for fact in facts if fact.value is not None))]


def _last(values: Iterable[tuple[int, float | None]]) -> tuple[int, float | None]:
    """Step and value of the last that is known."""
    known = [found for found in values if found[1] is not None]
    return known[-1] if known else (0, None)


def _timeline(run: RunFacts, steps: Sequence[int], predicted: dict[int, list[Execution]]) -> list[Block]:
    """Each rank as it was measured, its prediction right below."""
    if not steps:
        return []
    begins = {step: min(one.iterations[step] for one in run.ranks if step in one.iterations) for step in steps}
    origin, lanes, devices = min(begins.values()), SpanLanes(), {step: device_of_ranks(run.plan_at(step)) for step in steps}
    for one in run.ranks:
        own = one.only(steps).spans
        own = own[np.argsort(own["start_ns"], kind="stable")]
        names = {number: one.kinds.get(number, f"kind {number}") for number in np.unique(own["kind"]).tolist()}
        numbers = np.zeros(256, np.int64)
        for number, name in names.items():
            category = int(own["category"][own["kind"] == number][0]) % 3
            letter, colour = LETTERS.get(name, (name, _CATEGORY[category]))
            numbers[number] = lanes.kind(name, SpanKind(name, letter, colour))
        replica, device = run.devices(one.rank)
        stage = np.where(own["stage"] == NO_STAGE, -1, own["stage"].astype(np.int64))
        group = f"replica {replica}, device {device}"
        lanes.add_arrays(f"rank {one.rank}", group, "measured", own["start_ns"] - origin, own["end_ns"] - origin,
                         numbers[own["kind"]], stage, own["micro_batch"].astype(np.int64), replica=replica)  # fmt: skip
        for step in steps:
            if step in predicted and one.rank in devices[step]:  # a plan may leave a rank out
                its_replica, its_device = devices[step][one.rank]
                spans = passes_of(predicted[step][its_replica], its_device)
                lanes.add(f"rank {one.rank} predicted", group, "predicted", spans, begins[step] - origin, its_replica)
    for step, replicas in predicted.items():
        slowest = max(range(len(replicas)), key=lambda number: replicas[number].makespan_s)
        add_critical(lanes, replicas[slowest], begins[step] - origin, slowest)
    marks = tuple((begin - origin, f"step {step}") for step, begin in begins.items())
    block = lanes.block("measured, and below it predicted", marks=marks)
    return [block, *critical_causes(block)]


def _curves(run: RunFacts, predicted: dict[int, list[Execution]]) -> list[Block]:
    steps = run.steps
    if not steps:
        return [Text("No step has ended yet.", note=True)]
    columns = {
        "held_out_accuracy": ("held-out accuracy", "share"), "tokens_per_s": ("tokens/s", "count"), "mfu": ("MFU", "share"),
        "gradient_norm": ("gradient norm", "number"), "learning_rate": ("learning rate", "number"),
        "padding_share": ("padding, replica of rank 0", "share"), "planning_wait_s": ("waiting for programs", "time"),
        "bubble_share": ("not computing, rank 0", "share"), "allocated_bytes": ("memory in use, rank 0", "bytes"),
    }  # fmt: skip
    times = [ChartLine("step, measured", "time", as_array(one.time_s for one in steps))]
    if predicted:
        expected = _steps_s(run, predicted)
        times.append(ChartLine("step, predicted", "time", as_array(expected.get(one.step) for one in steps)))
    charts = [tuple(times), _lines(steps, {"loss": ("loss", "number"), "held_out_loss": ("held-out loss", "number")})]
    charts += [_lines(steps, {name: line}) for name, line in columns.items()]
    charts = [lines for lines in charts if lines]
    return [Charts("steps", "step", np.array([one.step for one in steps], np.int64), tuple(charts)), *_passes(run, predicted)]


def _lines(steps: Sequence[StepRecord], columns: Mapping[str, tuple[str, str]]) -> tuple[ChartLine, ...]:
    """Lines of one chart, by field of a step its title and unit; those of which no step knows anything are left out."""
    found = {name: [getattr(one, name) for one in steps] for name in columns}
    return tuple(ChartLine(*columns[name], as_array(values)) for name, values in found.items() if any(one is not None for one in values))


def _passes(run: RunFacts, predicted: dict[int, list[Execution]]) -> list[Block]:
    """Mean forward and backward pass of each rank and stage under the last plan, measured against predicted."""
    rows, devices = [], device_of_ranks(run.plan)
    predicted = {step: found for step, found in predicted.items() if run.plan_at(step) == run.plan}
    for one in (one for one in run.ranks if one.rank in devices):
        own = one.only(list(predicted) or [step for step in run.spanned[-_LAST:] if run.plan_at(step) == run.plan]).spans
        for seat in seats_of(run.plan)[one.rank]:
            measured = [_mean_s(one, own, seat.stage, kinds) for kinds in (("Forward",), ("Backward", "BackwardInput", "BackwardWeight"))]
            works = [replicas[devices[one.rank][0]].workload.durations_s for replicas in predicted.values()]
            expected: list[float | None] = [None, None]
            if works:
                expected = [float(np.mean([work[kind, seat.stage].mean() for work in works])) for kind in (0, 1)]
            rows.append((one.rank, seat.stage, measured[0], expected[0], _ratio(measured[0], expected[0]), measured[1], expected[1],
                         _ratio(measured[1], expected[1])))  # fmt: skip
    columns = ("rank", "stage", "forward", "predicted", "ratio", "backward", "predicted", "ratio")
    units = ("number", "number", "time", "time", "number", "time", "time", "number")
    return [Table("mean pass of a micro-batch, measured against predicted", columns, units, tuple(rows))] if rows else []


def _mean_s(one: RankSpans, spans: np.ndarray, stage: int, names: Sequence[str]) -> float | None:
    numbers = [number for number, name in one.kinds.items() if name in names]
    own = spans[np.isin(spans["kind"], numbers) & (spans["stage"] == stage)]
    batches = len(np.unique(own["start_ns"])) / max(1, len(np.unique(own["kind"])))
    return float((own["end_ns"] - own["start_ns"]).sum()) * 1e-9 / batches if batches else None


def _ratio(measured: float | None, expected: float | None) -> float | None:
    return measured / expected if measured is not None and expected else None


def _devices(run: RunFacts) -> list[Block]:
    """Charts how long each rank computed in each step, against the median of the ranks of its stage; and what was noticed."""
    blocks: list[Block] = []
    known = run.spanned
    if known and run.ranks:
        busy = np.full((len(run.ranks), len(known)), np.nan)
        for row, one in enumerate(run.ranks):
            busy[row] = _busy_s(one, known)
        stages = np.array([run.devices(one.rank)[1] for one in run.ranks])
        usual = np.empty_like(busy)
        for stage in np.unique(stages):
            own = stages == stage
            # Alone in its stage, a rank is held against its own usual step.
            usual[own] = np.nanmedian(busy[own], axis=0) if own.sum() > 1 else np.nanmedian(busy[own])
        names = tuple(f"rank {one.rank}" for one in run.ranks)
        with np.errstate(invalid="ignore", divide="ignore"):
            blocks.append(Heat("time computed, against the median of its stage", names, "step", np.array(known, np.int64), busy / usual))
    rows = tuple((one.step, one.event, one.text) for one in run.events)
    blocks.append(Table("noticed and decided", ("step", "what", "in words"), ("number", "text", "text"), rows) if rows
                  else Text("Nothing was noticed, or the run was not watched."))  # fmt: skip
    return blocks


def _busy_s(one: RankSpans, steps: Sequence[int]) -> np.ndarray:
    """Seconds computed in each step; NaN where the rank did not come to it."""
    starts = one.spans["start_ns"]
    length = np.where(one.spans["category"] == COMPUTE, one.spans["end_ns"] - starts, 0).astype(np.float64)
    order = np.argsort(starts, kind="stable")
    until = np.concatenate([[0.0], np.cumsum(length[order])])
    bounds = np.sort(np.array([*one.iterations.values(), *one.evaluations], np.int64))
    found = np.full(len(steps), np.nan)
    for at, step in enumerate(steps):
        if step in one.iterations:
            begin = one.iterations[step]
            later = bounds[np.searchsorted(bounds, begin, side="right") :][:1]
            first = np.searchsorted(starts[order], begin)
            last = np.searchsorted(starts[order], later[0]) if len(later) else len(starts)
            found[at] = (until[last] - until[first]) * 1e-9 if last > first else np.nan
    return found
