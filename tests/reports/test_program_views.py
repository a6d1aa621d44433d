"""Programs as a source of the report: simulated where a plan prices them, in their order where none does, and whether they are safe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.models.catalog import resolve_model
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import write_plan
from penstock.programs.files import write_programs
from penstock.programs.instructions import Forward, Program, ReceiveWait
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.reports.blocks import Spans, Subject, Text
from penstock.reports.report import kind_of, report_of
from penstock.reports.tables import table_of
from penstock.schedules.rules import schedule_of

COUNT = 4


def a_plan(**degrees: Any) -> Plan:
    return uniform_plan("gpt-tiny", "4xa100-40gb", global_batch=2 * COUNT, micro_batch=2, layout="packed", **degrees)


def programs_of(plan: Plan) -> tuple[Program, ...]:
    count = COUNT // plan.num_replicas
    order = schedule_of(plan.schedule, plan.num_stages, count, plan.num_chunks)
    works = [
        ReplicaWork(tuple(MicroBatch(m, (8 * r + 2 * m, 8 * r + 2 * m + 1), "packed", (20 + m, 30)) for m in range(count)), order)
        for r in range(plan.num_replicas)
    ]  # fmt: skip
    return lower(plan, resolve_model("gpt-tiny"), works)


def written(folder: Path, plan: Plan) -> tuple[Path, Path]:
    write_plan(folder / "plan.json", plan)
    write_programs(folder / "iteration", programs_of(plan), text=True)
    return folder / "plan.json", folder / "iteration"


def timeline(subject: Subject) -> tuple[Spans, list[Any]]:
    [block] = [block for view in subject.views if view.name == "timeline" for block in view.blocks if isinstance(block, Spans)]
    table = table_of(block)
    assert table is not None
    return block, list(table[1])


@pytest.mark.parametrize("degrees", [{"pp": 2, "replicas": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "schedule": "interleaved", "chunks": 2}])
def test_a_plan_beside_them_says_what_they_take(tmp_path: Path, degrees: dict[str, Any]) -> None:
    plan = a_plan(**degrees)
    subject = report_of([*written(tmp_path, plan)]).subjects[-1]
    block, rows = timeline(subject)
    passes = [row for row in rows if row[1] == "predicted"]
    assert len(passes) == 2 * plan.num_stages * COUNT and len({lane.name for lane in block.lanes if lane.role == "predicted"}) == (
        2 * plan.num_replicas
    )
    for program in programs_of(plan):
        own = [(row[3], row[4]) for row in passes if row[0] == f"rank {program.rank}" and row[2] == "forward"]
        if own:  # of ranks that share a stage one stands for all
            assert own == [(step.stage, step.micro_batch) for step in program.instructions if isinstance(step, Forward)]
    ends = {row[5] + row[6] for row in rows if row[1] == "critical"}
    assert max(row[5] + row[6] for row in rows) - max(ends) <= 1  # a nanosecond of rounding
    assert any("proven safe" in one.text for one in subject.views[0].blocks if isinstance(one, Text))


def test_alone_they_are_shown_in_their_order(tmp_path: Path) -> None:
    _, folder = written(tmp_path, a_plan(pp=2))
    assert kind_of(folder)[0] == "programs" == kind_of(folder / "rank-0.txt")[0]
    [subject] = report_of([folder]).subjects
    block, rows = timeline(subject)
    programs = programs_of(a_plan(pp=2))
    assert [row[2] for row in rows] == [type(step).__name__ for program in programs for step in program.instructions]
    assert {lane.role for lane in block.lanes} == {"in order"}
    [other] = report_of([folder / "rank-0.txt"]).subjects
    assert "this rank alone is consistent" in other.views[0].blocks[0].text  # type: ignore[union-attr]
    assert len(timeline(other)[1]) == len(programs[0].instructions)


def test_what_is_not_safe_is_said(tmp_path: Path) -> None:
    programs = programs_of(a_plan(pp=2))
    steps = tuple(step for step in programs[1].instructions if not isinstance(step, ReceiveWait))
    write_programs(tmp_path, [programs[0], msgspec.structs.replace(programs[1], instructions=steps)])
    [subject] = report_of([tmp_path]).subjects
    texts = [block for block in subject.views[0].blocks if isinstance(block, Text)]
    assert "they are not safe" in texts[0].text and texts[1].note
