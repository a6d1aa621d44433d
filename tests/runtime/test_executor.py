"""The loop: every kind has its handler, instructions run in order, failures say where, and the loop itself costs little."""

from __future__ import annotations

import pytest
from counted_work import counted_calls

from penstock.errors import InputError
from penstock.models.micro_batch import MicroBatch
from penstock.programs.instructions import INSTRUCTIONS, Forward, Free, Instruction, Program, ReceiveWait, SendWait, Step, stage_of
from penstock.programs.text import describe
from penstock.runtime.executor import ExecutionError, Executor


def program(*steps: Instruction) -> Program:
    return Program(3, 7, 0, 1, 2, 1, 1, (), (MicroBatch(0, (0,), "packed", (1,)),), steps)


def full_executor(seen: list[Instruction]) -> Executor:
    executor = Executor()
    for kind in INSTRUCTIONS:
        executor.register(kind, seen.append)
    return executor


def test_instructions_reach_their_handlers_in_order() -> None:
    seen: list[Instruction] = []
    executor = full_executor([])
    executor.handlers[Free] = seen.append
    executor.run(program(Free((1,)), Step(), Free((2,))))
    assert seen == [Free((1,)), Free((2,))]
    assert executor.program is None


def test_a_handler_sees_the_program() -> None:
    executor = full_executor([])
    found: list[int] = []
    executor.handlers[Step] = lambda step: found.append(executor.program.iteration if executor.program else -1)
    executor.run(program(Step()))
    assert found == [7]


def test_all_kinds_need_a_handler() -> None:
    executor = Executor().register(Forward, lambda step: None)
    assert Forward not in executor.missing() and len(executor.missing()) == len(INSTRUCTIONS) - 1
    with pytest.raises(InputError, match=r"no handler for Load, Backward, .*StepStage\. Register one for each kind"):
        executor.run(program())


def test_a_kind_has_one_handler() -> None:
    executor = Executor().register(Forward, lambda step: None)
    with pytest.raises(InputError, match="Forward has a handler already"):
        executor.register(Forward, lambda step: None)
    with pytest.raises(InputError, match=r"is no kind of instruction\. Known: Load, Forward"):
        executor.register(int, lambda step: None)  # type: ignore[arg-type]


def test_a_failure_names_rank_stage_instruction_and_micro_batch() -> None:
    executor = full_executor([])

    def fail(step: Instruction) -> None:
        raise ZeroDivisionError("by zero")

    executor.handlers[Forward] = fail
    with pytest.raises(ExecutionError, match=r"rank 3 failed in iteration 7 at forward of stage 1, micro-batch 0 \(instruction 1 of 3\): "
                                             "ZeroDivisionError: by zero") as caught:  # fmt: skip
        executor.run(program(Free((0,)), Forward(1, 0, 0, 0), Step()))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


class Watching:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.at_: list[int] = []
        self.spans: list[tuple[int, int, int]] = []

    def begin(self, program: Program) -> None:
        self.began.append(program.iteration)

    def at(self, index: int) -> None:
        self.at_.append(index)

    def done(self, index: int, start_ns: int, end_ns: int) -> None:
        self.spans.append((index, start_ns, end_ns))


def test_an_observer_is_told_every_instruction() -> None:
    executor = full_executor([])
    executor.observer = watching = Watching()
    executor.run(program(Free((0,)), Step()))
    assert watching.began == [7] and watching.at_ == [0, 1]
    assert [span[0] for span in watching.spans] == [0, 1] and all(start <= end for _, start, end in watching.spans)


def test_an_instruction_costs_the_loop_few_calls() -> None:
    """Two looks at the clock, the handler, and the observer before and after it."""
    executor = full_executor([])
    executor.observer = Watching()
    steps = program(*[Free((0,)), Step()] * 200)
    assert counted_calls(lambda: executor.run(steps)) / 400 < 10


@pytest.mark.parametrize(
    ("step", "stage"),
    [
        (SendWait("activation", 2, 0, 5), 2),
        (SendWait("gradient", 2, 0, 5), 3),
        (ReceiveWait("activation", 2, 0, 5), 3),
        (ReceiveWait("gradient", 2, 0, 5), 2),
        (Forward(4, 0, 0, 0), 4),
        (Step(), -1),
    ],
)
def test_a_transfer_belongs_to_the_stage_at_its_end(step: Instruction, stage: int) -> None:
    assert stage_of(step) == stage
    assert describe(step).startswith(type(step).__name__.lower()[:4])
