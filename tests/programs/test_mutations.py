"""Every kind of corruption of a random valid program is caught: 17 kinds, 300 cases each, 5,100 in all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
from programs.cases import Case, random_case, small

from penstock.models.micro_batch import MicroBatch
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.programs import instructions as i
from penstock.programs.check import check_programs
from penstock.programs.lower import lower
from penstock.programs.problems import picture
from penstock.programs.work import ReplicaWork
from penstock.schedules.actions import FORWARD
from penstock.schedules.rules import schedule_of

CASES = 300
POOL = 50

Programs = list[i.Program]
Steps = list[i.Instruction]
Mutation = Callable[[random.Random, Case], "Programs | None"]


@cache
def pool() -> list[Case]:
    """Small cases, none with a problem of its own; each has at least one transfer."""
    cases = [random_case(seed, groups=2, most=2) for seed in range(POOL)]
    for case in cases:
        assert check_programs(case.programs, case.plan, case.model) == []
    return cases


def replace(step: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(step, **fields)


def changed(case: Case, which: int, steps: Steps) -> Programs:
    programs = list(case.programs)
    programs[which] = replace(programs[which], instructions=tuple(steps))
    return programs


def pick(draw: random.Random, case: Case, wanted: Callable[[i.Instruction], bool]) -> tuple[int, Steps, int] | None:
    """(program, its instructions, the position of one that is wanted)."""
    places = [(p, at) for p, program in enumerate(case.programs) for at, step in enumerate(program.instructions) if wanted(step)]
    if not places:
        return None
    which, at = draw.choice(places)
    return which, list(case.programs[which].instructions), at


def mutate(draw: random.Random, case: Case, wanted: Callable[[Any], bool], change: Callable[[Any], Any]) -> Programs | None:
    """One of the wanted instructions changed."""
    found = pick(draw, case, wanted)
    if found is None:
        return None
    which, steps, at = found
    steps[at] = change(steps[at])
    return changed(case, which, steps)


def has(*names: str) -> Callable[[Any], bool]:
    return lambda step: all(getattr(step, name, None) is not None for name in names)


def other(draw: random.Random, value: int, most: int) -> int:
    return draw.choice([number for number in range(most + 1) if number != value])


def drop(draw: random.Random, case: Case) -> Programs | None:
    found = pick(draw, case, lambda step: True)
    assert found
    which, steps, at = found
    del steps[at]
    return changed(case, which, steps)


def duplicate(draw: random.Random, case: Case) -> Programs | None:
    found = pick(draw, case, lambda step: not isinstance(step, i.Free) or bool(step.buffers))
    assert found
    which, steps, at = found
    steps.insert(draw.choice([at + 1, at + 1, draw.randint(at + 1, len(steps))]), steps[at])
    return changed(case, which, steps)


def swap(draw: random.Random, case: Case) -> Programs | None:
    """Two neighbours of which the second needs the first, or two transfers with the same rank."""
    which = draw.randrange(len(case.programs))
    steps = list(case.programs[which].instructions)
    needs = [at for at in range(len(steps) - 1) if _needs(steps[at], steps[at + 1])]
    starts = [at for at, step in enumerate(steps) if isinstance(step, i.SendStart | i.ReceiveStart)]
    pairs = [(a, b) for a in starts for b in starts if a < b and steps[a].peer == steps[b].peer]  # type: ignore[union-attr]
    choices = [(at, at + 1) for at in needs] + pairs
    if not choices:
        return None
    one, two = draw.choice(choices)
    steps[one], steps[two] = steps[two], steps[one]
    return changed(case, which, steps)


def _needs(one: i.Instruction, two: i.Instruction) -> bool:
    passes = i.Forward | i.Backward | i.BackwardInput
    if isinstance(one, i.ReceiveWait):
        return isinstance(two, passes)
    if isinstance(one, passes):
        return isinstance(two, i.Free) or (isinstance(two, i.SendStart) and two.buffer == one.result)
    return isinstance(two, i.Step) or (isinstance(one, i.SendWait) and isinstance(two, i.Free))


def retarget(draw: random.Random, case: Case) -> Programs | None:
    return mutate(draw, case, has("peer"), lambda step: replace(step, peer=other(draw, step.peer, len(case.programs))))


def _with_tensors(step: Any) -> bool:
    return bool(getattr(step, "parts", ()) or getattr(step, "tensors", ()))


def _change_tensor(draw: random.Random, step: Any, change: Callable[[Any], Any]) -> Any:
    field = "parts" if hasattr(step, "parts") else "tensors"
    tensors = list(getattr(step, field))
    at = draw.randrange(len(tensors))
    tensors[at] = change(tensors[at])
    return replace(step, **{field: tuple(tensors)})


def wrong_shape(draw: random.Random, case: Case) -> Programs | None:
    def change(tensor: Any) -> Any:
        dim = draw.randrange(len(tensor.shape))
        size = other(draw, tensor.shape[dim], tensor.shape[dim] + 3)
        return replace(tensor, shape=(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))

    return mutate(draw, case, _with_tensors, lambda step: _change_tensor(draw, step, change))


def wrong_dtype(draw: random.Random, case: Case) -> Programs | None:
    dtypes = ("bf16", "fp16", "int64")
    return mutate(draw, case, _with_tensors, lambda s: _change_tensor(draw, s, lambda t: replace(t, dtype=draw.choice(dtypes))))


def wrong_tensor(draw: random.Random, case: Case) -> Programs | None:
    """One tensor less, or under another name."""
    if draw.random() < 0.5:
        return mutate(draw, case, _with_tensors, lambda s: _change_tensor(draw, s, lambda t: replace(t, name=f"{t.name}2")))
    field = lambda step: "parts" if hasattr(step, "parts") else "tensors"  # noqa: E731
    return mutate(draw, case, _with_tensors, lambda step: replace(step, **{field(step): getattr(step, field(step))[1:]}))


def wrong_part(draw: random.Random, case: Case) -> Programs | None:
    """Other rows or columns of the same tensor."""

    def change(part: i.Part) -> i.Part:
        field, dim = draw.choice([("rows", 0), ("columns", -1)])
        size = part.shape[dim]
        first, last = getattr(part, field) or (0, size)
        moved = draw.choice([(first + 1, last + 1), (first, last + 1), (max(0, first - 1), last - 1) if first else (first, last + 2)])
        return replace(part, **{field: moved})

    return mutate(draw, case, lambda step: bool(getattr(step, "parts", ())), lambda step: _change_tensor(draw, step, change))


def early_free(draw: random.Random, case: Case) -> Programs | None:
    """A buffer is freed before what uses it last."""
    found = pick(draw, case, lambda step: isinstance(step, i.Free))
    assert found
    which, steps, at = found
    step = steps.pop(at)
    assert isinstance(step, i.Free)
    while at and not _uses(steps[at - 1], step.buffers, steps[:at]):
        at -= 1
    steps.insert(at - 1, step)
    return changed(case, which, steps)


def _uses(step: i.Instruction, buffers: Sequence[int], before: Steps) -> bool:
    names = {getattr(step, name, None) for name in ("batch", "source", "result", "buffer")} - {None}
    if isinstance(step, i.SendWait):  # of the last send before it that this is the wait of
        key = (step.what, step.cut, step.micro_batch, step.peer)
        names = {s.buffer for s in before if isinstance(s, i.SendStart) and (s.what, s.cut, s.micro_batch, s.peer) == key}
    return bool(names & set(buffers))


def missing_wait(draw: random.Random, case: Case) -> Programs | None:
    found = pick(draw, case, lambda step: isinstance(step, i.SendWait | i.ReceiveWait | i.ReduceWait))
    if found is None:
        return None
    which, steps, at = found
    del steps[at]
    return changed(case, which, steps)


def wrong_micro_batch(draw: random.Random, case: Case) -> Programs | None:
    return mutate(draw, case, has("micro_batch"), lambda step: replace(step, micro_batch=other(draw, step.micro_batch, 3)))


def wrong_stage(draw: random.Random, case: Case) -> Programs | None:
    if draw.random() < 0.5:
        return mutate(draw, case, has("cut"), lambda step: replace(step, cut=other(draw, step.cut, 4)))
    return mutate(draw, case, has("stage"), lambda step: replace(step, stage=other(draw, step.stage, 4)))


def wrong_buffer(draw: random.Random, case: Case) -> Programs | None:
    name = draw.choice(["buffer", "source", "batch", "result"])
    return mutate(draw, case, has(name), lambda step: replace(step, **{name: other(draw, getattr(step, name), 6)}))


def changed_weight(draw: random.Random, case: Case) -> Programs | None:
    """Another total in one program or in all, or another count of one sample on all ranks of its replica."""
    programs = list(case.programs)
    field = draw.choice(["loss_tokens", "num_samples"])
    how = draw.randrange(3)
    if how == 0:
        which = draw.randrange(len(programs))
        programs[which] = replace(programs[which], **{field: getattr(programs[which], field) + 1})
    elif how == 1:
        programs = [replace(program, **{field: getattr(program, field) + 1}) for program in programs]
    else:
        replica = draw.randrange(case.plan.num_replicas)
        for which, program in enumerate(programs):
            if program.replica == replica:
                micro = program.micro_batches[0]
                counts = micro.counted or micro.dec_lengths or micro.lengths or (1,) * len(micro.samples)
                micro = replace(micro, counted=(counts[0] + 1, *counts[1:]))
                programs[which] = replace(program, micro_batches=(micro, *program.micro_batches[1:]))
    return programs


def wrong_samples(draw: random.Random, case: Case) -> Programs | None:
    """A sample is lost, comes twice, or is another one on one rank."""
    programs = list(case.programs)
    how = draw.randrange(3)
    which = draw.randrange(len(programs))
    replica, micro = programs[which].replica, programs[which].micro_batches[-1]
    first = programs[which].micro_batches[0].samples[0]
    if how == 0:
        micro = replace(micro, samples=micro.samples[:-1])
    elif how == 1:
        everywhere = [s for p in programs for m in p.micro_batches for s in m.samples]
        micro = replace(micro, samples=(*micro.samples[:-1], draw.choice([s for s in everywhere if s != micro.samples[-1]] or [first])))
        if micro == programs[which].micro_batches[-1]:
            return None
    else:
        if sum(program.replica == replica for program in programs) < 2:
            return None
        micro = replace(micro, samples=(*micro.samples[:-1], 77_777))
    for at, program in enumerate(programs):
        if program.replica == replica and (how != 2 or at == which):
            programs[at] = replace(program, micro_batches=(*program.micro_batches[:-1], micro))
    return programs


def dropped_reduction(draw: random.Random, case: Case) -> Programs | None:
    """A rank, or a whole stage, does not sum its gradients; or with other ranks."""
    found = pick(draw, case, lambda step: isinstance(step, i.ReduceStart))
    if found is None:
        return None
    which, steps, at = found
    step = steps[at]
    assert isinstance(step, i.ReduceStart)
    how = draw.randrange(3)
    if how == 0:
        group = step.groups[0]
        steps[at] = replace(step, groups=(replace(group, ranks=group.ranks[:-1]), *step.groups[1:]))
        return changed(case, which, steps)
    everywhere = how == 1
    return [
        replace(program, instructions=tuple(
            s for s in program.instructions if not (isinstance(s, i.ReduceStart | i.ReduceWait) and s.stage == step.stage)))
        if everywhere or at_program == which else program
        for at_program, program in enumerate(case.programs)
    ]  # fmt: skip


def dropped_tied(draw: random.Random, case: Case) -> Programs | None:
    """A shared weight is not kept equal on one rank, or on all, or with other rows."""
    found = pick(draw, case, lambda step: isinstance(step, i.SyncTied))
    if found is None:
        return None
    which, steps, at = found
    step = steps[at]
    assert isinstance(step, i.SyncTied)
    how = draw.randrange(3)
    if how == 0:
        return [replace(p, instructions=tuple(s for s in p.instructions if not isinstance(s, i.SyncTied))) for p in case.programs]
    if how == 1:
        del steps[at]
    else:
        end = step.receives[0]
        steps[at] = replace(
            step, receives=(replace(end, rows=(1, 2) if end.rows is None else (end.rows[0], end.rows[1] + 1)), *step.receives[1:])
        )
    return changed(case, which, steps)


KINDS: tuple[Mutation, ...] = (
    drop, duplicate, swap, retarget, wrong_shape, wrong_dtype, wrong_tensor, wrong_part, early_free, missing_wait, wrong_micro_batch,
    wrong_stage, wrong_buffer, changed_weight, wrong_samples, dropped_reduction, dropped_tied,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_corruption_is_caught(kind: Mutation) -> None:
    draw = random.Random(kind.__name__)
    done = 0
    while done < CASES:
        case = draw.choice(pool())
        programs = kind(draw, case)
        if programs is None:
            continue
        problems = check_programs(programs, case.plan, case.model)
        assert problems, f"case {done} of {kind.__name__} was not caught"
        if done % 100 == 0:
            assert str(problems[0]) in picture(programs, problems[0])
        done += 1


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_buffer_must_be_freed(training: bool) -> None:
    """Each `Free` left out in turn, in a program that uses no number twice: what lies there at the end is told by its number."""
    model = small("gpt")
    plan = Plan("test", "cpu", 1, (Stage(0, model.num_ops, ((0,),)),), MicroBatching(policy="dynamic"))
    micros = tuple(MicroBatch(m, (m,), "packed", (5 + m,)) for m in range(3))
    order = schedule_of("gpipe", 1, 3)
    if not training:
        order = tuple(tuple(action for action in actions if action.kind == FORWARD) for actions in order)
    (program,) = lower(plan, model, [ReplicaWork(micros, order)], training=training)
    program = with_own_numbers(program)
    assert check_programs([program], plan, model) == []
    frees = [at for at, step in enumerate(program.instructions) if isinstance(step, i.Free)]
    assert len(frees) == 3
    for at in frees:
        (number,) = program.instructions[at].buffers  # type: ignore[union-attr]
        steps = [step for place, step in enumerate(program.instructions) if place != at]
        problems = check_programs([replace(program, instructions=tuple(steps))], plan, model)
        assert [problem.text for problem in problems] == [f"buffer {number} (batch (0, {number})) is never freed"]


def with_own_numbers(program: i.Program) -> i.Program:
    """A program of loads and forward passes of one stage, micro-batch m in buffer m."""
    steps: Steps = []
    numbers: dict[int, int] = {}
    for step in program.instructions:
        if isinstance(step, i.Load):
            numbers[step.buffer] = step.micro_batch
            step = replace(step, buffer=step.micro_batch)
        elif isinstance(step, i.Forward):
            step = replace(step, batch=step.micro_batch)
        elif isinstance(step, i.Free):
            step = i.Free(tuple(numbers[number] for number in step.buffers))
        steps.append(step)
    return replace(program, instructions=tuple(steps))
