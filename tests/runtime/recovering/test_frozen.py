"""Which ranks count as frozen, by a clock and states of processes of the test's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.runtime.recovering.frozen import LEAST_S, LOOK_S, MANY_TIMES, STOPPED_S, FrozenRanks


class Scene:
    """Two ranks, looked at every so often."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = {100: False, 101: False}
        self.at = {0: ((0, 0), True), 1: ((0, 0), False)}
        self.ranks = FrozenRanks(lambda: self.now, lambda pid: self.stopped[pid])
        self.board: Any = SimpleNamespace(position=lambda rank: self.at[rank])

    def look(self, seconds: float) -> dict[int, str]:
        """What is first found within some seconds."""
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            if found := self.ranks.look({0: 100, 1: 101}, self.board):
                return found
        return {}


def test_a_rank_that_is_stopped_is_frozen_and_one_that_comes_back_is_not() -> None:
    scene = Scene()
    assert scene.look(1.0) == {}
    scene.stopped[101] = True
    assert scene.look(STOPPED_S / 2) == {}
    scene.stopped[101] = False
    assert scene.look(2 * STOPPED_S) == {}
    scene.stopped[101] = True
    assert scene.look(2 * STOPPED_S) == {1: "was stopped by a signal"}


def test_short_stops_do_not_add_up() -> None:
    scene = Scene()
    for _ in range(8):
        for scene.stopped[101] in (True, False):
            assert scene.look(STOPPED_S / 2) == {}


def test_a_launcher_that_was_stopped_too_starts_counting_anew() -> None:
    """As after Ctrl-Z: it has seen nothing meanwhile."""
    scene = Scene()
    scene.look(1.0)
    scene.stopped[101], scene.now = True, scene.now + 1000.0
    assert scene.ranks.look({1: 101}, scene.board) == {}


@pytest.mark.parametrize("step_s", [0.5, 3.0])
def test_a_pass_that_takes_far_longer_than_any_step_hangs(step_s: float) -> None:
    """The wait of its peer, which began before it, is none; nor is a first step, however long it takes."""
    scene = Scene()
    assert scene.look(100.0) == {}
    for step in range(1, 4):
        scene.at = {0: ((step, 3), True), 1: ((step, 2), False)}
        assert scene.look(step_s) == {}
    scene.ranks._longest_s = step_s
    least = max(LEAST_S, MANY_TIMES * step_s)
    assert scene.look(least - 2 * step_s) == {}
    assert scene.look(3 * step_s) == {0: f"has hung for {least:.0f} s, 10 times as long as any step took,"}


def test_the_longest_step_counts_and_not_the_last() -> None:
    """One that saved a checkpoint, say: the next may take as long."""
    scene = Scene()
    for step, step_s in enumerate((1, 30, 1, 1)):
        for instruction in range(step_s):
            scene.at = {rank: ((step, instruction), not rank) for rank in range(2)}
            assert scene.look(1.0) == {}
    assert scene.look(MANY_TIMES * 30.0 - 5.0) == {} and list(scene.look(10.0)) == [0]
