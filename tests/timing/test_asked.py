"""Disturbances that are asked for while a run goes on are in force once all ranks have seen them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.timing.asked import ASKED, AskedDisturbance, ask
from penstock.timing.disturbance import Disturbance, DisturbanceChange

SLOW, SLOWER = DisturbanceChange((0,), 2.0, first=5), DisturbanceChange((0,), 3.0, "pulse", 7, 2)


def test_changes_count_from_the_line_that_all_have_seen(tmp_path: Path) -> None:
    own = AskedDisturbance(Disturbance((DisturbanceChange((1,), 4.0),)), str(tmp_path))
    assert own.seen() == 0
    ask(tmp_path, SLOW)
    ask(tmp_path, SLOWER)
    assert own.seen() == 2 and own.now.compute(0, 7) == 1.0
    own.agree(1)
    assert [own.now.compute(0, step) for step in (4, 5, 7)] == [1.0, 2.0, 2.0] and own.now.compute(1, 7) == 4.0
    own.agree(2)
    assert [own.now.compute(0, step) for step in (5, 7, 9)] == [2.0, 6.0, 2.0]


def test_half_a_line_is_not_seen(tmp_path: Path) -> None:
    own = AskedDisturbance(Disturbance(), str(tmp_path))
    ask(tmp_path, SLOW)
    whole = (tmp_path / ASKED).read_bytes()
    (tmp_path / ASKED).write_bytes(whole + whole[:10])
    assert own.seen() == 1
    (tmp_path / ASKED).write_bytes(whole * 2)
    assert own.seen() == 2


def test_lines_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / ASKED).write_text("slower\n")
    with pytest.raises(InputError, match=ASKED):
        AskedDisturbance(Disturbance(), str(tmp_path)).seen()


def test_nobody_asks_a_run_without_a_folder() -> None:
    assert AskedDisturbance(Disturbance()).seen() == 0
