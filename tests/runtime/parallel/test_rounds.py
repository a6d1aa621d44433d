"""Ranks with different numbers of micro-batches run the same rounds of passes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.parallel.rounds import joined_passes

F, B = False, True


def test_those_with_less_to_do_join() -> None:
    gpipe = [[F, F, F, B, B, B], [F, F, B, B], []]
    assert joined_passes(gpipe, 0) == [[], [], [], [], [], [], []]
    assert joined_passes(gpipe, 1) == [[], [], [F], [], [B]]
    assert joined_passes(gpipe, 2) == [[F, F, F, B, B, B]]


def test_one_forward_one_backward_stays_in_step() -> None:
    assert joined_passes([[F, B, F, B], [F, B]], 1) == [[], [], [F, B]]
    assert joined_passes([[], []], 0) == [[]]


@st.composite
def orders(draw: st.DrawFn) -> list[bool]:
    """Any order in which each micro-batch goes back after it came."""
    passes: list[bool] = []
    running, left = 0, draw(st.integers(0, 5))
    while running or left:
        backward = bool(running) and (not left or draw(st.booleans()))
        running, left = (running - 1, left) if backward else (running + 1, left - 1)
        passes.append(backward)
    return passes


@given(st.lists(orders(), min_size=1, max_size=4))
def test_all_ranks_see_the_same_rounds(passes: list[list[bool]]) -> None:
    seen = []
    for rank, own in enumerate(passes):
        joins = joined_passes(passes, rank)
        assert len(joins) == len(own) + 1
        seen.append([kind for before, mine in zip(joins, [[one] for one in own] + [[]], strict=True) for kind in before + mine])
    assert all(one == seen[0] for one in seen)
    assert len(seen[0]) <= sum(map(len, passes))
