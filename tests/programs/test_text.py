"""The readable form parses back to the same program, and what cannot be read is refused with its line."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs.strategies import instructions, programs

from penstock.errors import InputError
from penstock.programs import instructions as i
from penstock.programs.text import format_instruction, format_program, parse_instruction, parse_program

LINES = [
    ("load s1 m0 b3 inputs labels", i.Load(1, 0, 3, ("inputs", "labels"))),
    ("forward s1 m2 p0 batch b3 source b0 result b1 hidden:bf16[24x32]",
     i.Forward(1, 2, 0, 3, 0, 1, (i.Tensor("hidden", "bf16", (24, 32)),))),
    ("backward s0 m2 source b7", i.Backward(0, 2, 7)),
    ("backward-weight s0 m2", i.BackwardWeight(0, 2)),
    ("send-start activation c0 m2 to 5 b1 hidden:bf16[24x32]@0:12,* +bias:fp32[32x4]",
     i.SendStart("activation", 0, 2, 5, 1, (i.Part("hidden", "bf16", (24, 32), (0, 12)), i.Part("bias", "fp32", (32, 4), add=True)))),
    ("receive-wait gradient c0 m2 from 5", i.ReceiveWait("gradient", 0, 2, 5)),
    ("free b1 b0", i.Free((1, 0))),
    ("reduce-start s1 during m3 9:17@1,3", i.ReduceStart(1, (i.ReduceGroup(9, 17, (1, 3)),), 3)),
    ("sync-tied embedding send s0:s3:r6@0:64 receive s0:s3:r6",
     i.SyncTied("embedding", (i.TiedRows(0, 3, 6, (0, 64)),), (i.TiedRows(0, 3, 6),))),
    ("step", i.Step()),
    ("step-stage s1 m3", i.StepStage(1, 3)),
    ("step-stage s1 m3 4:9@2,3", i.StepStage(1, 3, (i.ReduceGroup(4, 9, (2, 3)),))),
]  # fmt: skip

PROGRAM = """penstock-program 1
program rank 1 iteration 0 replica 0/1 stages 2 loss-tokens 24 samples 2
place s1 ops 9:17 index 0 entry tp1 dp1 exit tp1 dp1
micro-batch m0 padded samples 0,1 lengths 12,12 rows 12,0
step
"""


@pytest.mark.parametrize(("line", "step"), LINES)
def test_lines_are_as_written_here(line: str, step: i.Instruction) -> None:
    assert format_instruction(step) == line
    assert parse_instruction(line) == step


@given(instructions)
def test_instructions_parse_back(step: i.Instruction) -> None:
    assert parse_instruction(format_instruction(step)) == step


@given(programs)
def test_programs_parse_back(program: i.Program) -> None:
    assert parse_program(format_program(program)) == program


def test_comments_and_empty_lines_are_skipped() -> None:
    noisy = PROGRAM.replace("step\n", "\n# the end\x85step\nstep   # last\u2028step\r\n")
    assert parse_program(noisy) == parse_program(PROGRAM)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (PROGRAM.replace("step", "stop"), "line 5.*no instruction 'stop'. Did you mean 'step'"),
        (PROGRAM.replace("step", "step now"), "line 5.*'now' was not expected"),
        (PROGRAM.replace("step", "free 3"), "expected bNUMBER, got '3'"),
        (PROGRAM.replace("step", "forward s1 m0 p0 batch b1 hidden:bf17[3]"), "bf17"),
        (PROGRAM.replace("step", "send-start thing c0 m0 to 1 b0"), "thing"),
        (PROGRAM.replace("step", "send-start activation c0 m0 from 1 b0"), "expected 'to', got 'from'"),
        (PROGRAM.replace("step", f"reduce-wait s{10**19}"), "line 5"),
        (PROGRAM.replace("step", "reduce-wait s" + "9" * 5000), "line 5"),
        (PROGRAM.replace("rank 1", "rank -1"), "line 2.*expected a NUMBER, got '-1'"),
        (PROGRAM.replace("padded", "folded"), "line 4.*folded"),
        (PROGRAM.replace("rows 12,0", "rows 12"), "line 4.*two lengths"),
        (PROGRAM.replace("program rank", "# program rank", 1), "no line that begins with 'program rank'"),
        (PROGRAM.replace("program 1\n", "program 2\n", 1), "version 2, but this Penstock reads versions up to 1"),
        (PROGRAM + PROGRAM.splitlines()[1], "second line 'program'"),
        ("", "first line is not 'penstock-program 1'"),
    ],
)
def test_what_cannot_be_read_is_refused(broken: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        parse_program(broken)


@given(programs, st.data())
def test_a_spoilt_text_is_read_or_refused_but_never_breaks(program: i.Program, data: st.DataObject) -> None:
    text = format_program(program)
    at = data.draw(st.integers(0, len(text) - 1))
    spoilt = text[:at] + data.draw(st.sampled_from([*string.printable, "²", ""])) + text[at + 1 :]
    try:
        parse_program(spoilt)
    except InputError as error:
        assert "program" in str(error)
