"""The report: what its sources are, which views they give together, and the file it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import penstock
from penstock.batching.plan import BatchPlan, read_batch_plan
from penstock.errors import InputError, PenstockError
from penstock.files import read_json
from penstock.plans.plan import Plan
from penstock.plans.schema import read_plan
from penstock.plans.validity import require_valid
from penstock.programs.files import holds_programs, read_programs
from penstock.programs.instructions import Program
from penstock.reports.batch_views import batch_views
from penstock.reports.blocks import Block, Fact, Facts, Subject, Table, Text, View
from penstock.reports.document import document
from penstock.reports.notebook import Framed, static_html
from penstock.reports.plan_views import execution_subject, plan_subject
from penstock.reports.program_views import programs_subject
from penstock.reports.run_views import read_run_facts, run_subject
from penstock.reports.search_views import pareto_views, search_views
from penstock.runtime.request import TrainResult
from penstock.timing.execution import Execution

__all__ = ["Report", "kind_of", "report", "report_of"]

_PARETO, _SEARCH = "penstock-pareto", "penstock-search"
_VERSION = 1
_MOST_PLANS = 12
"""Plans of one page: beyond it nobody finds one again."""
_MEASURED = {
    "plan": ("simulated", "by the plan's costs"), "run": ("measured", "by the run itself; predictions are simulated by the plan's costs"),
    "search": ("simulated", "bounds by formula"), "pareto": ("simulated", "prices as published"),
    "batch": ("simulated", "by the planner of batches"), "timeline": ("simulated", "by the costs that it was given"),
    "programs": ("simulated", "by the costs of a plan given beside them, if any"),
}  # fmt: skip


@dataclass
class Report:
    """The content of one page."""

    subjects: list[Subject] = field(default_factory=list)
    shared: list[View] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Kind and name of each."""

    @property
    def title(self) -> str:
        """The names of what is shown."""
        return ", ".join(name for _, name in self.sources)

    @property
    def views(self) -> list[tuple[str, View]]:
        """Every view with the name of its subject, empty where it is of all."""
        return [*((one.name, view) for one in self.subjects for view in one.views), *(("", view) for view in self.shared)]

    def _repr_html_(self) -> str:
        """HTML that a notebook shows, and keeps."""
        return static_html(self)

    def framed(self) -> Framed:
        """The page for a notebook, in a frame of its own."""
        return Framed(self.html())

    def html(self, *, with_paths: bool = False) -> str:
        """The page."""
        return document(self.title, self.subjects, self.shared, with_paths=with_paths)


def kind_of(path: Path) -> tuple[str, Any]:
    """`plan`, `run`, `search`, `pareto`, `batch` or `programs`, and what was read of it already."""
    if path.is_dir():
        if (path / "pareto.json").is_file():
            return "pareto", _record(path / "pareto.json", _PARETO)
        if (path / "plan.json").is_file():
            return "run", None
        if holds_programs(path):
            return "programs", read_programs(path)
        raise InputError(
            f"'{path}' is neither the folder of a run (it has no plan.json) nor of choices of nodes (no pareto.json) nor of programs. "
            "Give what `penstock train --out` or `penstock pareto --out` was given."
        )
    if holds_programs(path):
        return "programs", read_programs(path)
    data = read_json(path, "source")
    if not isinstance(data, dict):
        raise InputError(f"'{path}' holds {type(data).__name__}; a plan, a search record or a batch was expected.")
    if data.get("format") in (_SEARCH, _PARETO):
        return str(data["format"]).removeprefix("penstock-"), _record(path, str(data["format"]))
    if "micro_batching" in data or "stages" in data:
        return "plan", None
    if "replicas" in data:
        return "batch", read_batch_plan(path)
    raise InputError(f"'{path}' is no plan, search record, batch, run, program or folder of choices that a report knows.")


def _record(path: Path, wanted: str) -> dict[str, Any]:
    data = read_json(path, "record")
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (wanted, _VERSION):
        raise InputError(f"'{path}' is not version {_VERSION} of '{wanted}'. Write it again with this version of Penstock.")
    return data


def report_of(paths: Sequence[Path], steps: tuple[int | None, int | None] = (None, None)) -> Report:
    """Reads all sources; of a search or a choice of nodes also the plans beside it."""
    report, plans, programs = Report(), list[Plan](), list[tuple[str, list[Program]]]()
    for path in paths:
        kind, data = kind_of(path)
        report.sources.append((kind, path.name or str(path)))
        if kind == "plan":
            plans.append(_add_plan(report, path, path.name))
        elif kind == "run":
            run = read_run_facts(path)
            plans += run.plans.values()
            report.subjects.append(run_subject(run, *steps))
        elif kind == "programs":
            programs.append((path.name, data))
        elif kind == "batch":
            assert isinstance(data, BatchPlan)
            report.shared += batch_views(data)
        else:
            folder = path if path.is_dir() else path.parent
            opens = _add_plans_beside(report, folder, data)
            report.shared += (search_views if kind == "search" else pareto_views)(data, str(path), opens)
    report.subjects += [programs_subject(name, own, plans) for name, own in programs]
    if len(report.subjects) > 1:
        report.shared.append(View("compare", "Compare", _compared(report.subjects)))
    report.shared.append(View("sources", "Sources", _sources(report.sources)))
    return report


def report(*sources: str | Path | Plan | BatchPlan | Execution | TrainResult) -> Report:
    """A report of plans, batches, timelines and results, or of files and folders as `penstock report` takes them: shown by a notebook, as a
    page there by `.framed()`, or as a file by `.html()`.

    >>> report("examples/plans/gpt-1.3b-pp4.json").title
    'gpt-1.3b-pp4.json'
    """
    found = report_of([Path(one) for one in map(_run_of, sources) if isinstance(one, str | Path)])
    for number, one in enumerate(sources):
        if isinstance(one, Plan):
            require_valid(one, where="the plan")
            found.sources.append(("plan", f"plan {number}"))
            found.subjects.append(plan_subject(f"plan {number}", one))
        elif isinstance(one, BatchPlan):
            found.sources.append(("batch", f"batch {number}"))
            found.shared += batch_views(one)
        elif isinstance(one, Execution):
            found.sources.append(("timeline", f"timeline {number}"))
            found.subjects.append(execution_subject(f"timeline {number}", one))
    return found


def _run_of(source: str | Path | Plan | BatchPlan | Execution | TrainResult) -> str | Path | Plan | BatchPlan | Execution:
    """A source, where it is the result of a run the folder of that."""
    if not isinstance(source, TrainResult):
        return source
    if source.checkpoint is None:
        raise InputError("this run was rehearsed and kept no checkpoint, by which its folder is known. Give the folder of the run.")
    return Path(source.checkpoint).parent


def _add_plan(report: Report, path: Path, name: str) -> Plan:
    plan = read_plan(path)
    require_valid(plan, where=f"plan '{path}'")
    report.subjects.append(plan_subject(name, plan))
    return plan


def _add_plans_beside(report: Report, folder: Path, record: dict[str, Any]) -> dict[str, int]:
    """The plans that a record names, as far as they are there; the number of the subject that each becomes."""
    opens: dict[str, int] = {}
    rows = record.get("candidates") or record.get("choices") or []
    for row in rows if isinstance(rows, list) else []:
        name = row.get("file") if isinstance(row, dict) else None
        if not isinstance(name, str) or Path(name).name != name or len(opens) >= _MOST_PLANS or not (folder / name).is_file():
            continue
        known = next((number for number, one in enumerate(report.subjects) if one.name == name), None)
        if known is None:
            try:
                _add_plan(report, folder / name, name)
            except PenstockError as error:
                report.shared.append(View("notes", "Notes", [Text(f"left out: {error}", note=True)]))
                continue
            known = len(report.subjects) - 1
        opens[name] = known
    return opens


def _compared(subjects: Sequence[Subject]) -> list[Block]:
    """The facts of all subjects beside each other, those that differ first."""
    facts = [_facts(one) for one in subjects]
    labels = list(dict.fromkeys(label for own in facts for label in own))
    rows = []
    for label in labels:
        values = [own.get(label, Fact(label, None)).value for own in facts]
        numbers = [value for value in values if isinstance(value, int | float)]
        spread = max(numbers) / min(numbers) - 1 if len(numbers) > 1 and min(numbers) > 0 else None
        unit = next(own[label].unit for own in facts if label in own)
        rows.append((spread, (label, *(_said(value, unit) for value in values), spread)))
    rows.sort(key=lambda row: -(row[0] or 0.0))
    return [Table("what differs most, first", ("what", *(one.name for one in subjects), "largest over least"),
                  ("text", *("text" for _ in subjects), "share"), tuple(row for _, row in rows))]  # fmt: skip


def _said(value: Any, unit: str) -> str:
    from penstock.reports.units import shown

    return shown(value, unit)


def _facts(subject: Subject) -> dict[str, Fact]:
    return {fact.label: fact for view in subject.views for block in view.blocks if isinstance(block, Facts) for fact in block.facts}


def _sources(sources: Sequence[tuple[str, str]]) -> list[Block]:
    rows = tuple((name, kind, *_MEASURED[kind]) for kind, name in sources)
    return [
        Table("where numbers come from", ("source", "is a", "its numbers are", "how"), ("text",) * 4, rows),
        Text(f"Written by Penstock {penstock.__version__}. The page loads nothing and sends nothing."),
    ]
