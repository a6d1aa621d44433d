"""Where ranks are, as the launcher reads it: by whom others wait, and who only waits himself."""

from __future__ import annotations

from penstock.programs.instructions import Forward, Instruction, Load, ReceiveWait, SendWait, Step
from penstock.runtime.telemetry.status import Status, StatusBoard


class Few:
    """What a rank's side of the board looks at in a program."""

    def __init__(self, iteration: int, *instructions: Instruction) -> None:
        self.iteration, self.instructions = iteration, instructions


def test_each_rank_has_its_place_and_computes_or_waits() -> None:
    board = StatusBoard(3)
    ranks = [Status(board.memory, rank) for rank in range(3)]
    program = Few(7, Load(1, 2, 0), ReceiveWait("activation", 0, 2, 0), Forward(1, 2, 0, 0), SendWait("activation", 1, 2, 2), Step())
    for rank in ranks[1:]:
        rank.begin(program)  # type: ignore[arg-type]
    found = []
    for index in range(len(program.instructions)):
        ranks[1].at(index)
        found.append(board.position(1))
        ranks[1].done(index, 0, 1)
    assert [position for position, _ in found] == [(7, index) for index in range(5)]
    assert [computes for _, computes in found] == [True, False, True, False, False]
    assert board.position(0) == ((-1, -1), False) and board.where(0) == "before its first program"
    assert board.position(1) == ((7, -1), False) and board.where(1) == "after iteration 7"
    ranks[2].at(2)
    assert board.where(2) == "at Forward of stage 1, micro-batch 2 (iteration 7, instruction 2 of 5)"
    assert board.where(1) == "after iteration 7"
    board.clear()
    assert board.where(2) == "before its first program"


def test_a_signal_reaches_all_ranks_and_touches_no_place() -> None:
    board = StatusBoard(2)
    ranks = [Status(board.memory, rank) for rank in range(2)]
    ranks[1].begin(Few(0, Step()))  # type: ignore[arg-type]
    ranks[1].at(0)
    assert [rank.asked_to_end() for rank in ranks] == [0, 0]
    board.ask_to_end(15)
    assert [rank.asked_to_end() for rank in ranks] == [15, 15] and board.position(1)[0] == (0, 0)
