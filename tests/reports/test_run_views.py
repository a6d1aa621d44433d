"""The numbers of a run's page are those of the run: medians, what was predicted, passes and time computed, all by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.plans.build import uniform_plan
from penstock.reports.blocks import Block, Charts, Facts, Heat, Table, Text
from penstock.reports.run_views import RunFacts, RunMemo, _chosen, _curves, _devices, _glance, _notes, _passes, _timeline
from penstock.reports.tables import table_of
from penstock.runtime.telemetry.spans import COMPUTE, KINDS, RECORD, TRANSFER, WAIT
from penstock.runtime.telemetry.spans_reader import RankSpans
from penstock.runtime.telemetry.steps import StepRecord
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import Execution, execute
from penstock.timing.workload import workload_of

MS = 1_000_000
PLAN = uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=1, pp=2, replicas=2)
"""Ranks 0 and 1 are the first stage, 2 and 3 the second; each replica has two micro-batches."""
STEPS = (StepRecord(0, 9.0, 0.9, tokens_per_s=10.0, mfu=0.1), StepRecord(1, 5.0, 0.2, tokens_per_s=30.0, mfu=0.3),
         StepRecord(2, 4.0, 0.3, tokens_per_s=40.0, mfu=0.4))  # fmt: skip


def rank_spans(rank: int, forward_ms: int = 2, backward_ms: int = 4, steps: int = 3) -> RankSpans:
    """Steps of 100 ms: two forward and backward passes end to end, a wait and a message, and an evaluation at the end of each step."""
    rows, stage = [], rank // 2
    for step in range(steps):
        at = 100 * step * MS
        for number in range(2):
            for name, length in (("Forward", forward_ms), ("Backward", backward_ms)):
                rows.append((KINDS[name], COMPUTE, stage, number, at, at + length * MS))
                at += length * MS
        rows.append((KINDS["ReceiveWait"], WAIT, 0, 0, at, at + 10 * MS))
        rows.append((KINDS["SendStart"], TRANSFER, 0, 0, at + 10 * MS, at + 12 * MS))
        at = (100 * step + 90) * MS
        rows.append((KINDS["Forward"], COMPUTE, stage, 0, at, at + 5 * MS))  # of the evaluation
    names = {number: name for name, number in KINDS.items()}
    evaluations = tuple((100 * step + 90) * MS for step in range(steps))
    return RankSpans(rank, names, np.array(rows, RECORD), {step: 100 * step * MS for step in range(steps)}, {}, evaluations=evaluations)


def facts_of(**more: Any) -> RunFacts:
    ranks = tuple(rank_spans(rank) for rank in range(4))
    return replace(RunFacts("run", Path("nowhere"), PLAN, {0: PLAN}, STEPS, ranks, (), ()), **more)


def predicted(*scales: float) -> list[Execution]:
    """Two stages and two micro-batches for each replica: forward passes of 1 ms, backward passes of 2 ms, times a scale."""
    durations = np.stack([np.full((2, 2), 1e-3), np.full((2, 2), 2e-3)])
    return [execute(schedule_of("1f1b", 2, 2), workload_of(scale * durations)) for scale in scales]


def values(blocks: list[Block]) -> dict[str, Any]:
    return {fact.label: fact.value for block in blocks if isinstance(block, Facts) for fact in block.facts}


def test_a_glance_has_medians_and_the_last_loss() -> None:
    """Of the steps that were predicted, the slower replica: nine passes' worth of time of the first stage, twice as long on the second."""
    executions = {step: predicted(1.0, 10.0) for step in range(3)}
    blocks = _glance(facts_of(), executions)
    slow_s = executions[0][1].makespan_s
    assert values(blocks) == {"step": 0.3, "predicted": pytest.approx(slow_s), "tokens/s": 30.0, "MFU": 0.3, "loss": 4.0, "events": 0}
    [text] = [block for block in blocks if isinstance(block, Text)]
    assert text.text == f"A run of 3 steps, the last of them 2, 300 ms each in the median, {0.3 / slow_s:.2f} times what was predicted."


def test_a_glance_holds_the_last_steps_against_predictions_of_the_same_ones() -> None:
    """The first step, which compiles, is not predicted where the timeline begins later."""
    executions = {step: predicted(1.0) for step in (1, 2)}
    alone_s = executions[1][0].makespan_s
    blocks = _glance(facts_of(), executions)
    [text] = [block for block in blocks if isinstance(block, Text)]
    assert text.text.endswith(f"300 ms each in the median, {0.25 / alone_s:.2f} times what was predicted in steps 1 to 2.")
    assert values(blocks)["step"] == 0.3


def test_a_loss_that_is_not_of_the_last_step_says_so() -> None:
    """One that is not a number is left out of its step."""
    steps = (*STEPS, StepRecord(3, None, 0.3))
    [facts] = [block.facts for block in _glance(facts_of(steps=steps), {}) if isinstance(block, Facts)]
    assert [(fact.value, fact.note) for fact in facts if fact.label == "loss"] == [(4.0, "of step 2, the last that had one")]


def test_evaluations_are_drawn_beside_the_loss() -> None:
    """Where there were any, as points among steps without; the last of them is told."""
    steps = (STEPS[0], msgspec.structs.replace(STEPS[1], held_out_loss=6.0, held_out_accuracy=0.25), STEPS[2])
    assert values(_glance(facts_of(steps=steps), {}))["held-out loss"] == 6.0
    [charts] = [block for block in _curves(facts_of(steps=steps), {}) if isinstance(block, Charts)]
    found = {tuple(line.name for line in lines): [line.values.tolist() for line in lines] for lines in charts.charts}
    assert found["loss", "held-out loss"] == [[9.0, 5.0, 4.0], pytest.approx([np.nan, 6.0, np.nan], nan_ok=True)]
    assert found["held-out accuracy",] == [pytest.approx([np.nan, 0.25, np.nan], nan_ok=True)]
    [charts] = [block for block in _curves(facts_of(), {}) if isinstance(block, Charts)]
    assert ("loss",) in [tuple(line.name for line in lines) for lines in charts.charts]


def test_lost_spans_of_all_ranks_and_missing_ranks_are_told() -> None:
    ranks = tuple(replace(rank_spans(rank), num_lost=rank) for rank in range(3))
    notes = [block.text for block in _notes(facts_of(ranks=ranks), "")]  # type: ignore[union-attr]
    assert notes == ["3 spans not recorded, since the disk was slow", "no spans of ranks 3"]


def test_mean_passes_are_held_against_those_that_were_predicted() -> None:
    """Of the last plan alone; rank 3 takes twice as long as the others. Evaluations are no passes of a step."""
    ranks = (*(rank_spans(rank) for rank in range(3)), rank_spans(3, 4, 8))
    before = replace(PLAN, global_batch=8)
    run = facts_of(ranks=ranks, plans={0: before, 1: PLAN})
    [table] = _passes(run, {0: predicted(7.0, 7.0), 1: predicted(1.0, 2.0), 2: predicted(1.0, 2.0)})
    assert isinstance(table, Table)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows[0] == pytest.approx((0, 2e-3, 1e-3, 2.0, 4e-3, 2e-3, 2.0))
    assert rows[1] == pytest.approx((0, 2e-3, 2e-3, 1.0, 4e-3, 4e-3, 1.0))  # the second replica, which was predicted to be slower
    assert rows[3] == pytest.approx((1, 4e-3, 2e-3, 2.0, 8e-3, 4e-3, 2.0))


def test_the_halves_of_a_backward_pass_are_one() -> None:
    own = rank_spans(0)
    spans = own.spans.copy()
    halves = np.flatnonzero(spans["kind"] == KINDS["Backward"])
    spans["kind"][halves[::2]], spans["kind"][halves[1::2]] = KINDS["BackwardInput"], KINDS["BackwardWeight"]
    [table] = _passes(facts_of(ranks=(replace(own, spans=spans),)), {})
    assert isinstance(table, Table) and table.rows[0][5] == pytest.approx(8e-3)  # 4 ms each


def test_a_timeline_has_the_last_steps_unless_others_are_asked_for() -> None:
    run = facts_of(ranks=tuple(rank_spans(rank, steps=13) for rank in range(4)))
    assert (
        _chosen(run, None, None) == ([*range(3, 13)], []) and _chosen(run, 2, 4) == ([2, 3, 4], []) and _chosen(run, 5, None) == ([5], [])
    )


def test_time_computed_is_held_against_the_median_of_the_stage() -> None:
    """Waits, messages and evaluations are not computing; a rank is not held against those of another stage."""
    ranks = (rank_spans(0), rank_spans(1, 6, 12), rank_spans(2, 20, 10), rank_spans(3, 20, 10))
    [heat] = [block for block in _devices(facts_of(ranks=ranks)) if isinstance(block, Heat)]
    assert heat.rows == ("rank 0", "rank 1", "rank 2", "rank 3") and heat.x.tolist() == [0, 1, 2]
    assert heat.values == pytest.approx(np.array([[0.5] * 3, [1.5] * 3, [1.0] * 3, [1.0] * 3]))


def test_predictions_begin_with_their_step_and_the_path_is_that_of_the_slowest_replica() -> None:
    shifted = []
    for rank in range(4):
        own = rank_spans(rank)
        spans = own.spans.copy()
        for name in ("start_ns", "end_ns"):
            spans[name] += 7_000 * MS  # clocks begin anywhere
        shifted.append(replace(own, spans=spans, iterations={step: begin + 7_000 * MS for step, begin in own.iterations.items()},
                               evaluations=tuple(begin + 7_000 * MS for begin in own.evaluations)))  # fmt: skip
    executions = {1: predicted(1.0, 3.0), 2: predicted(1.0, 3.0)}
    block, _ = _timeline(facts_of(ranks=tuple(shifted)), [1, 2], executions)
    table = table_of(block)
    assert table is not None
    starts: dict[tuple[str, str], list[int]] = {}
    for name, role, _, _, _, start, _ in table[1]:
        starts.setdefault((name, role), []).append(start)
    assert starts["rank 0", "measured"][0] == 0 and max(starts["rank 0", "measured"]) == 122 * MS  # up to the message of step 2
    assert min(starts["rank 1 predicted", "predicted"]) == 0 and 100 * MS in starts["rank 1 predicted", "predicted"]
    lasts = [row[5] + row[6] for row in table[1] if row[1] == "critical"]
    assert max(lasts) == pytest.approx(100 * MS + executions[2][1].makespan_s * 1e9)


def test_the_plan_of_a_step_is_the_one_that_began_last() -> None:
    before = replace(PLAN, global_batch=8)
    run = facts_of(plans={0: before, 2: PLAN})
    assert [run.plan_at(step) for step in (0, 1, 2, 3)] == [before, before, PLAN, PLAN]


def test_what_is_remembered_of_a_run_is_of_its_plan() -> None:
    memo = RunMemo().of(PLAN)
    memo.predicted[3] = predicted(1.0)
    assert memo.of(PLAN).predicted and not memo.of(replace(PLAN, global_batch=8)).predicted
