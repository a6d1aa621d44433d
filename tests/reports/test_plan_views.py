"""The numbers of a plan's page: by hand where the timeline is small, else those of the estimate, which add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.models.catalog import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan, Predicted
from penstock.reports import span_lanes
from penstock.reports.blocks import Facts, OpChain, Spans, Stack, Subject, Table, Text
from penstock.reports.plan_views import critical_causes, execution_spans, execution_subject, plan_subject, priced
from penstock.reports.tables import table_of
from penstock.schedules.rules import schedule_of
from penstock.timing.estimate import Estimate
from penstock.timing.execution import Execution, execute
from penstock.timing.planned import clocked
from penstock.timing.workload import workload_of

S = 10**9
MODEL = resolve_model("gpt-1.3b")
PLAN = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=2, replicas=2, zero=1)
PLAN = replace(PLAN, stages=(PLAN.stages[0], replace(PLAN.stages[1], recompute=(((PLAN.stages[1].first, PLAN.stages[1].first + 3),),))))


def one(subject: Subject, kind: type[Any], title: str = "") -> Any:
    [found] = [block for view in subject.views for block in view.blocks if isinstance(block, kind) and title in getattr(block, "title", "")]
    return found


def facts(subject: Subject) -> dict[str, Any]:
    return {fact.label: fact.value for fact in one(subject, Facts).facts}


def estimate(plan: Plan) -> Estimate:
    return clocked(plan, priced(plan)[1].estimate)


def test_a_glance_tells_what_is_left_on_the_fullest_device_and_the_gap_by_formula() -> None:
    found = estimate(PLAN)
    assert PLAN.predicted is None
    bounded = uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=2, replicas=2, zero=1)
    own = facts(plan_subject("x", PLAN))
    assert own["memory left"] == min(stage.limit_bytes - stage.memory.total_bytes for stage in found.stages)
    assert own["iteration"] == found.time_s and own["tokens/s"] == pytest.approx(16 * 2048 / found.time_s)
    assert "gap" not in own
    formula_s = estimate(bounded).formula_s
    known = facts(plan_subject("x", replace(bounded, predicted=Predicted(formula_s, "roofline", lower_bound_s=formula_s / 1.25))))
    assert known["gap"] == pytest.approx(0.25) and known["bound"] == pytest.approx(formula_s / 1.25)


def test_times_by_cause_are_those_of_all_micro_batches() -> None:
    found, stack = estimate(PLAN), one(plan_subject("x", PLAN), Stack, "time of an iteration")
    assert found.num_micro_batches == 4 and stack.rows == ("stage 0", "stage 1")
    for stage, values in zip(found.stages, stack.values, strict=True):
        told = dict(zip(stack.parts, values, strict=True))
        assert told["forward"] == 4 * stage.work.forward_s and told["backward"] == 4 * stage.work.backward_s
        assert told["recomputation"] == 4 * stage.work.recompute_s and (told["recomputation"] > 0) == (stage.index == 1)
        assert told["transfers"] == pytest.approx(4 * (stage.work.transfer_in_s + stage.work.transfer_out_s)) and told["transfers"] > 0
        assert (told["bubble"], told["gradient sync"], told["optimizer"]) == (stage.bubble_s, stage.sync_s, stage.optimizer_s)
        assert told["gradient sync"] != told["optimizer"]


def test_memory_by_purpose_adds_up_to_what_the_device_holds() -> None:
    found, stack = estimate(PLAN), one(plan_subject("x", PLAN), Stack, "memory of the fullest")
    assert stack.limits == tuple(stage.limit_bytes for stage in found.stages)
    for stage, values in zip(found.stages, stack.values, strict=True):
        told = dict(zip(stack.parts, values, strict=True))
        assert sum(values) == pytest.approx(stage.memory.total_bytes)
        assert told["weights"] == stage.memory.weights_bytes and told["activations"] == stage.memory.activations_bytes


def test_recomputed_ops_are_marked_in_their_stage() -> None:
    chain = one(plan_subject("x", PLAN), OpChain)
    ops = [(op.stage, op.recomputed) for op in chain.ops for _ in range(op.count)]
    first = PLAN.stages[1].first
    assert ops == [(0, False)] * first + [(1, True)] * 3 + [(1, False)] * (MODEL.num_ops - first - 3)


def small(**more: Any) -> Execution:
    """Two stages, one micro-batch: F 1 s and B 2 s on the first, F 3 s and B 4 s on the second; messages take 0.5 s there, 0.25 s back."""
    work = workload_of(np.array([[[1.0], [3.0]], [[2.0], [4.0]]]), np.array([[[0.5]], [[0.25]]]), after_s=[0.0, 1.0], **more)
    return execute(schedule_of("1f1b", 2, 1), work)


def rows(block: Spans) -> set[tuple[str, str, int, int]]:
    table = table_of(block)
    assert table is not None
    return {(row[0], row[2], row[5], row[5] + row[6]) for row in table[1] if row[1] != "critical"}


def test_a_timeline_by_hand() -> None:
    """F0 to 1 s, its message to 1.5 s, F1 to 4.5 s, B1 to 8.5 s, its gradient to 8.75 s, B0 to 10.75 s; the second stage updates then."""
    block = execution_spans(small(), ["first", "second"], "simulated")
    update = ("device 1 sends", "gradients reduced, weights updated", 17 * S // 2, 19 * S // 2)
    assert rows(block) == {
        ("first", "forward", 0, S), ("device 0 sends", "activation sent", S, 3 * S // 2), ("second", "forward", 3 * S // 2, 9 * S // 2),
        ("second", "backward", 9 * S // 2, 17 * S // 2), ("device 1 sends", "gradient sent", 17 * S // 2, 35 * S // 4),
        ("first", "backward", 35 * S // 4, 43 * S // 4), update,
    }  # fmt: skip
    sending = [lane for lane in block.lanes if lane.name == "device 1 sends"]
    assert [lane.count for lane in sending] == [1, 1]  # what overlaps has rows of its own


def test_memory_of_a_timeline_is_that_of_each_device_at_its_moments() -> None:
    run = small(stored_bytes=np.array([[100.0], [7.0]]), base_bytes=np.array([10.0, 20.0]), limit_bytes=np.array([500.0, np.inf]))
    first, second = execution_spans(run, ["first", "second"], "simulated").memory
    assert (first.limit_bytes, second.limit_bytes) == (500.0, None)
    held = dict(zip(first.time_ns.tolist(), first.bytes.tolist(), strict=True))  # the last word of each moment counts
    assert held[0] == 110 and held[43 * S // 4] == 10 and set(first.bytes.tolist()) == {10, 110}
    assert max(second.bytes) == 27 and second.time_ns.tolist()[-1] == 17 * S // 2 and second.bytes.tolist()[-1] == 20
    subject = execution_subject("x", run)
    assert facts(subject)["most held"] == 110.0 and facts(subject)["iteration"] == 10.75
    assert facts(subject)["devices compute"] == pytest.approx((3 + 7) / 2 / 10.75)
    [text] = [block for block in subject.views[0].blocks if isinstance(block, Text)]
    assert text.text == "2 devices, 10.8 s in all, of which devices compute 46.5%."


def test_causes_of_the_critical_path_add_up_to_the_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where spans are told in coarser ticks."""
    for exact in (None, 2):
        if exact:
            monkeypatch.setattr(span_lanes, "_EXACT", exact)
        block = execution_spans(small(), ["first", "second"], "simulated")
        [table] = critical_causes(block)
        assert isinstance(table, Table) and (block.tick_ns > 1) == bool(exact)
        assert sum(row[1] for row in table.rows) == pytest.approx(10.75) and sum(row[2] for row in table.rows) == pytest.approx(1.0)
