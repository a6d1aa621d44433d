"""Programs of random plans: proven safe, and run for real on numpy arrays."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.interpreter import run_programs
from programs.cases import SCHEDULES, SIZES, random_case, small

from penstock.batching import plan as planned
from penstock.errors import InputError
from penstock.models.micro_batch import MicroBatch
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.programs import instructions as i
from penstock.programs.binary import decode, encode
from penstock.programs.check import check_programs
from penstock.programs.lower import lower
from penstock.programs.routing import Cut, Side, TensorLayout, carried
from penstock.programs.text import format_instruction, format_program, parse_program
from penstock.programs.work import ReplicaWork, work_of
from penstock.schedules.actions import Action
from penstock.schedules.rules import schedule_of


@given(st.integers(0, 10**9))
@settings(max_examples=60)
def test_programs_are_safe_and_move_every_tensor_where_it_belongs(seed: int) -> None:
    case = random_case(seed)
    assert check_programs(case.programs, case.plan, case.model) == []
    run_programs(case.programs, case.plan, case.model)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", sorted(SIZES))
def test_every_schedule_and_family(schedule: str, family: str) -> None:
    for seed in range(3):
        case = random_case(seed, family=family, schedule=schedule, groups=2)
        assert check_programs(case.programs, case.plan, case.model) == []
        run_programs(case.programs, case.plan, case.model)


@given(st.integers(0, 10**9))
@settings(max_examples=30)
def test_both_forms_give_the_program_back(seed: int) -> None:
    for program in random_case(seed).programs:
        assert parse_program(format_program(program)) == program
        assert decode(encode(program)) == program


def plan_of(*degrees: tuple[int, int], replicas: int = 1, family: str = "gpt", schedule: str = "1f1b") -> Plan:
    """Stages of these (tp, dp), cut into about equal numbers of ops."""
    model, stages, rank = small(family), [], 0
    for index, (tp, dp) in enumerate(degrees):
        first, last = (model.num_ops * at // len(degrees) for at in (index, index + 1))
        size = tp * dp
        devices = tuple(tuple(range(rank + r * size, rank + (r + 1) * size)) for r in range(replicas))
        stages.append(Stage(first, last, devices, Degrees(tp, dp)))
        rank += size * replicas
    return Plan("test", "cpu", 1, tuple(stages), MicroBatching(policy="dynamic"), replicas, schedule)


def packed(count: int, length: int = 5, start: int = 0, **more: Any) -> tuple[MicroBatch, ...]:
    return tuple(MicroBatch(m, (start + m,), "packed", (length + m,), **more) for m in range(count))


def test_a_pipeline_of_two_stages_is_as_drawn() -> None:
    """The first rank of 1F1B with two micro-batches."""
    plan, model = plan_of((1, 1), (1, 1)), small("gpt")
    first, second = lower(plan, model, [ReplicaWork(packed(2), schedule_of("1f1b", 2, 2))])
    assert [format_instruction(step) for step in first.instructions] == [
        "load s0 m0 b0 inputs",
        "load s0 m1 b1 inputs",
        "forward s0 m0 p0 batch b0 result b2 hidden:fp32[5x8] residual:fp32[5x8]",
        "free b0",
        "send-start activation c0 m0 to 1 b2 hidden:fp32[5x8] residual:fp32[5x8]",
        "forward s0 m1 p0 batch b1 result b0 hidden:fp32[6x8] residual:fp32[6x8]",
        "free b1",
        "send-start activation c0 m1 to 1 b0 hidden:fp32[6x8] residual:fp32[6x8]",
        "receive-start gradient c0 m0 from 1 b1 hidden:fp32[5x8] residual:fp32[5x8]",
        "receive-start gradient c0 m1 from 1 b3 hidden:fp32[6x8] residual:fp32[6x8]",
        "receive-wait gradient c0 m0 from 1",
        "backward s0 m0 source b1",
        "free b1",
        "receive-wait gradient c0 m1 from 1",
        "backward s0 m1 source b3",
        "free b3",
        "send-wait activation c0 m0 to 1",
        "free b2",
        "send-wait activation c0 m1 to 1",
        "free b0",
        "sync-tied embedding send s0:s1:r1 receive s0:s1:r1",
        "step",
    ]
    assert "labels" in format_instruction(next(step for step in second.instructions if isinstance(step, i.Load)))


def test_queries_keys_and_values_are_divided_one_by_one() -> None:
    model = small("gpt")
    qkv = next(place.index for place in model.ops if place.name == "layers.0.qkv")
    cut = Cut(Side(1, 1), Side(2, 1), carried(model, qkv + 1))
    micro = packed(1)[0]
    messages = cut.messages(TensorLayout(cut.before, micro), TensorLayout(cut.after, micro))
    sent = {message.receiver: [part.columns for part in message.sent if part.name == "qkv"] for message in messages}
    assert sent == {0: [(0, 4), (8, 12), (16, 20)], 1: [(4, 8), (12, 16), (20, 24)]}
    got = {message.receiver: [part.columns for part in message.received if part.name == "qkv"] for message in messages}
    assert got == {0: [(0, 4), (4, 8), (8, 12)], 1: [(0, 4), (4, 8), (8, 12)]}


@given(st.integers(0, 10**9), st.integers(1, 3))
@settings(max_examples=40)
def test_no_more_receives_are_under_way_than_buffers(seed: int, depth: int) -> None:
    case = random_case(seed)
    for program in lower(case.plan, case.model, case.work, depth=depth):
        held: dict[int, tuple[str, int]] = {}
        for step in program.instructions:
            if isinstance(step, i.ReceiveStart):
                held[step.buffer] = (step.what, step.cut)
                assert max(Counter(held.values()).values()) <= depth
            elif isinstance(step, i.Free):
                for buffer in step.buffers:
                    held.pop(buffer, None)


def test_a_receive_begins_while_the_rank_still_computes() -> None:
    """In the steady state of a pipeline of four stages, passes lie between the start of a receive and its wait."""
    plan, model = plan_of((1, 1), (1, 1), (1, 1), (1, 1)), small("gpt")
    programs = lower(plan, model, [ReplicaWork(packed(12), schedule_of("gpipe", 4, 12))])
    for program in programs[1:]:
        begun: dict[int, int] = {}
        overlapped = done = 0
        for step in program.instructions:
            done += isinstance(step, i.Forward | i.Backward)
            if isinstance(step, i.ReceiveStart) and step.what == "activation":
                begun[step.micro_batch] = done
            elif isinstance(step, i.ReceiveWait) and step.what == "activation":
                overlapped += done > begun[step.micro_batch]
        assert overlapped >= 9


@given(st.integers(0, 10**9), st.data())
@settings(max_examples=40)
def test_any_durations_give_safe_programs(seed: int, data: st.DataObject) -> None:
    """Whatever the actions are said to take, even nothing: the order of transfers changes, nothing else may."""
    case = random_case(seed)
    times = st.sampled_from([0.0, 1e-9, 0.5, 1.0, 7.0, 1e6])
    work = [
        dataclasses.replace(own, durations_s=[[[data.draw(times) for _ in own.micro_batches] for _ in case.plan.stages] for _ in range(4)])
        for own in case.work
    ]
    programs = lower(case.plan, case.model, work)
    assert check_programs(programs, case.plan, case.model) == []


def test_evaluation_is_forward_passes_alone() -> None:
    plan, model = plan_of((1, 1), (1, 2), replicas=2), small("gpt")
    micro_batches = [tuple(msgspec.structs.replace(m, bounds={2: (0, 1, 1)}) for m in packed(2, start=2 * r)) for r in range(2)]
    forward = tuple(tuple(Action(stage, 0, m) for m in range(2)) for stage in range(2))
    programs = lower(plan, model, [ReplicaWork(own, forward) for own in micro_batches], training=False)
    assert check_programs(programs, plan, model) == []
    kinds = {type(step) for program in programs for step in program.instructions}
    assert kinds == {i.Load, i.Forward, i.Free, i.SendStart, i.SendWait, i.ReceiveStart, i.ReceiveWait}
    run_programs(programs, plan, model)


def test_a_replica_without_micro_batches_still_reduces_and_steps() -> None:
    plan, model = plan_of((1, 1), (1, 1), replicas=2), small("gpt")
    programs = lower(plan, model, [ReplicaWork(packed(3), schedule_of("1f1b", 2, 3)), ReplicaWork((), ((), ()))])
    assert check_programs(programs, plan, model) == []
    idle = next(program for program in programs if program.replica == 1)
    assert [type(step) for step in idle.instructions] == [i.ReduceStart, i.ReduceWait, i.SyncTied, i.Step]


def test_a_planned_batch_is_lowered() -> None:
    plan, model = plan_of((1, 2), (1, 1), family="t5"), small("t5")
    micro = MicroBatch(0, (4, 9, 2), "padded", (5, 3, 5), (2, 2, 1), 6, 2, recompute=(0, 0))
    batch = planned.BatchPlan(
        (planned.ReplicaBatch((micro,), schedule_of("1f1b", 2, 1), 1.0, (0.0, 0.0)),), 1.0, 1.0, ((1.0, 1.0),), "test"
    )
    programs = lower(plan, model, work_of(batch, plan, counted={4: 1, 9: 2, 2: 1}))
    assert check_programs(programs, plan, model) == []
    assert programs[0].loss_tokens == 4 and programs[0].micro_batches[0].bounds == {2: (0, 2, 3)}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda work, _: [work, work], "work for 2 replicas was given, the plan has 1"),
        (lambda work, _: [dataclasses.replace(work, micro_batches=work.micro_batches[:1])], "there is no 0F1 with 2 stages and 1"),
        (lambda _, one: [one(lambda actions: actions[:-1])], "4 forward and 3 backward passes .* need 4 and 4"),
        (lambda _, one: [one(lambda actions: (*actions, Action(0, 0, 0)))], "0F0 is there twice"),
        (lambda _, one: [one(lambda actions: (*actions, Action(2, 0, 0)))], "there is no 2F0"),
        (lambda _, one: [one(lambda actions: (*actions, Action(1, 0, 0)))], "stage 1 has actions on devices 0 and 1"),
        (lambda _, one: [one(lambda actions: (*actions, Action(0, 2, 0)))], "0I0 is a second backward pass"),
        (lambda _, one: [one(lambda actions: actions[::-1])], "schedule deadlocks: action 0B1 waits for 0F1"),
        (lambda work, _: [dataclasses.replace(work, micro_batches=packed(2, counted=(0,)))], "none to train on"),
    ],
)
def test_work_that_does_not_fit_is_refused(change: Any, told: str) -> None:
    plan, model = plan_of((1, 1), (1, 1)), small("gpt")
    work = ReplicaWork(packed(2), schedule_of("1f1b", 2, 2))

    def first_changed(new: Callable[[Any], Any]) -> ReplicaWork:
        return dataclasses.replace(work, schedule=(new(work.schedule[0]), work.schedule[1]))

    with pytest.raises(InputError, match=told):
        lower(plan, model, change(work, first_changed))


def test_ops_of_different_degrees_need_samples_on_every_rank() -> None:
    plan, model = plan_of((1, 2), (1, 1)), small("gpt")
    first = dataclasses.replace(plan.stages[0], runs=(OpRun(0, 1, 2, 1),))
    plan = dataclasses.replace(plan, stages=(first, plan.stages[1]))
    with pytest.raises(InputError, match=r"micro-batch 1 \(1 sample\) leaves a rank of dp 2 without any"):
        micro_batches = (MicroBatch(0, (4, 5), "packed", (3, 3), bounds={2: (0, 1, 2)}), packed(2, bounds={2: (0, 1, 1)})[1])
        lower(plan, model, [ReplicaWork(micro_batches, schedule_of("1f1b", 2, 2))])


def test_shares_must_be_given() -> None:
    with pytest.raises(InputError, match="micro-batch 0 has no bounds for dp 2"):
        lower(plan_of((1, 2), (1, 1)), small("gpt"), [ReplicaWork(packed(2), schedule_of("1f1b", 2, 2))])
    with pytest.raises(InputError, match="depth is 0"):
        lower(plan_of((1, 1)), small("gpt"), [ReplicaWork(packed(1), schedule_of("1f1b", 1, 1))], depth=0)
