"""The checker on programs written by hand, on nonsense, on too little memory; and the picture it draws."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs.cases import random_case
from programs.strategies import programs as nonsense

from penstock.errors import InputError
from penstock.programs import instructions as i
from penstock.programs.check import check_programs, require_safe
from penstock.programs.problems import picture
from penstock.programs.text import parse_program

FIRST = """penstock-program 1
program rank 0 iteration 0 replica 0/1 stages 2 loss-tokens 8 samples 2
place s0 ops 0:3 index 0 entry tp1 dp1 exit tp1 dp1
micro-batch m0 packed samples 7 lengths 5
micro-batch m1 packed samples 9 lengths 3
load s0 m0 b0 inputs
forward s0 m0 p0 batch b0 result b1 hidden:fp32[5x4]
free b0
send-start activation c0 m0 to 1 b1 hidden:fp32[5x4]
load s0 m1 b0 inputs
forward s0 m1 p0 batch b0 result b2 hidden:fp32[3x4]
free b0
send-start activation c0 m1 to 1 b2 hidden:fp32[3x4]
receive-start gradient c0 m0 from 1 b0 hidden:fp32[5x4]
send-wait activation c0 m0 to 1
free b1
receive-wait gradient c0 m0 from 1
backward s0 m0 source b0
free b0
receive-start gradient c0 m1 from 1 b0 hidden:fp32[3x4]
receive-wait gradient c0 m1 from 1
backward s0 m1 source b0
free b0
send-wait activation c0 m1 to 1
free b2
step
"""
SECOND = """penstock-program 1
program rank 1 iteration 0 replica 0/1 stages 2 loss-tokens 8 samples 2
place s1 ops 3:6 index 0 entry tp1 dp1 exit tp1 dp1
micro-batch m0 packed samples 7 lengths 5
micro-batch m1 packed samples 9 lengths 3
receive-start activation c0 m0 from 0 b0 hidden:fp32[5x4]
receive-start activation c0 m1 from 0 b1 hidden:fp32[3x4]
load s1 m0 b2 labels
receive-wait activation c0 m0 from 0
forward s1 m0 p0 batch b2 source b0
free b2 b0
backward s1 m0 result b0 hidden:fp32[5x4]
send-start gradient c0 m0 to 0 b0 hidden:fp32[5x4]
load s1 m1 b2 labels
receive-wait activation c0 m1 from 0
forward s1 m1 p0 batch b2 source b1
free b2 b1
backward s1 m1 result b1 hidden:fp32[3x4]
send-start gradient c0 m1 to 0 b1 hidden:fp32[3x4]
send-wait gradient c0 m0 to 0
send-wait gradient c0 m1 to 0
free b0 b1
step
"""


def problems_of(first: str = FIRST, second: str = SECOND) -> list[str]:
    return [str(problem) for problem in check_programs([parse_program(first), parse_program(second)])]


def test_a_program_written_by_hand_is_safe() -> None:
    assert problems_of() == []


def test_a_deadlock_only_under_rendezvous_is_found() -> None:
    """Both ranks wait for their own send before they begin the receive that the other one's send needs."""
    first = FIRST.replace("receive-start gradient c0 m0 from 1 b0 hidden:fp32[5x4]\n", "").replace(
        "receive-wait gradient c0 m0", "receive-start gradient c0 m0 from 1 b0 hidden:fp32[5x4]\nreceive-wait gradient c0 m0")  # fmt: skip
    assert problems_of(first) == []  # it is only later
    late = "receive-start activation c0 m1 from 0 b1 hidden:fp32[3x4]\n"
    waits = "send-wait activation c0 m1 to 1\n"
    first = first.replace(waits + "free b2\n", "").replace("send-wait activation c0 m0", waits + "free b2\nsend-wait activation c0 m0")
    second = SECOND.replace(late, "").replace("load s1 m1 b2", late + "load s1 m1 b2").replace("send-wait gradient c0 m0 to 0\n", "")
    second = second.replace(late, "send-wait gradient c0 m0 to 0\n" + late)
    found = problems_of(first, second)
    assert any("deadlock with rendezvous sends" in text for text in found)
    assert not any("eager" in text for text in found)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("lengths 5", "lengths 4", "micro-batches differ"),
        ("loss-tokens 8", "loss-tokens 9", "loss_tokens is 8, but 9"),
        ("ops 0:3", "ops 1:3", "stage 0 begins at op 1, but the ops before it end at 0"),
        ("index 0", "index 1", "needs indices 0 to 0 once, has \\[1\\]"),
        ("load s0 m0 b0 inputs", "load s0 m0 b0", "rank 0, instruction 0: the first stage needs 'inputs'"),
        ("free b1\n", "", "buffer 1 .* is never freed"),
        ("send-wait activation c0 m0 to 1\n", "", "frees buffer 1 while .* is under way"),
        ("receive-wait gradient c0 m0 from 1\n", "", "before the receive from rank \\[1\\] was waited for"),
        ("backward s0 m1 source b0\n", "", "does not complete micro-batch 1: forward is done, not done"),
        ("to 1 b2 hidden:fp32[3x4]", "to 1 b2 hidden:fp32[3x4]@0:2,*", "hidden:fp32\\[2x4\\] is sent, hidden:fp32\\[3x4\\] is expected"),
        ("from 1 b0 hidden:fp32[3x4]", "from 1 b0 hidden:fp32[3x5]", "the gradient of 'hidden' is .*, that of the carry that left"),
        ("\nstep", "", "has no step"),
        ("\nstep", "\nstep\nfree b0", "comes after the step"),
    ],
)
def test_problems_are_told_with_their_place(old: str, new: str, told: str) -> None:
    assert old in FIRST
    found = problems_of(FIRST.replace(old, new, 1) if old != "loss-tokens 8" else FIRST.replace(old, new))
    with pytest.raises(AssertionError, match=told):
        raise AssertionError("\n".join(found))


def test_the_picture_marks_the_step() -> None:
    programs = [parse_program(FIRST), parse_program(SECOND.replace("backward s1 m0", "backward s1 m1", 1))]
    problem = check_programs(programs)[0]
    lines = picture(programs, problem).splitlines()
    assert lines[0] == "rank 0 │ 0F0   0F1   0B0   0B1"
    assert lines[1] == "rank 1 │ 1F0  [1B1]  1F1   1B1"
    assert "→    6  backward s1 m1" in lines[7]
    with pytest.raises(InputError, match=r"(?s)the programs have \d+ problems:.*\[1B1\]"):
        require_safe(programs)


@given(st.lists(nonsense, max_size=3))
@settings(max_examples=80)
def test_nonsense_is_refused_and_never_breaks_the_checker(programs: list[i.Program]) -> None:
    problems = check_programs(programs)
    assert problems
    for problem in problems[:3]:
        assert picture(programs, problem)


@given(st.integers(0, 10**6), st.data())
@settings(max_examples=60)
def test_shuffled_instructions_never_break_the_checker(seed: int, data: st.DataObject) -> None:
    case = random_case(seed, groups=2, most=2)
    programs = [msgspec.structs.replace(p, instructions=tuple(data.draw(st.permutations(p.instructions)))) for p in case.programs]
    for problem in check_programs(programs, case.plan, case.model):
        assert str(problem)


def test_no_programs_are_a_problem() -> None:
    assert [str(problem) for problem in check_programs([])] == ["there are no programs"]
