"""The list of planted bugs keeps up with the sources: every bug can still be planted, and every room has some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import load_benchmark

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "penstock"
NO_LOGIC = {"__main__", "__init__", "kernels"}
"""No room, or nothing in it that could be wrong without every test failing."""


MUTANTS = load_benchmark("mutants")
BUGS = MUTANTS.PLANTED


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_it_can_still_be_planted(bug: Any) -> None:
    text = (SOURCES / bug.file).read_text()
    planted = bug.planted_in(text)
    assert planted != text
    compile(planted, bug.file, "exec")
    assert bug.tests and all((ROOT / test).exists() for test in bug.tests)


def test_names_are_unique_and_every_room_has_a_bug() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 60
    rooms = {path.name.removesuffix(".py") for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {bug.room for bug in BUGS} == rooms - NO_LOGIC


def test_one_of_each_room_is_quick() -> None:
    quick = MUTANTS.chosen(None, None, True)
    assert [bug.room for bug in quick] == list(dict.fromkeys(bug.room for bug in BUGS))
    assert MUTANTS.chosen("clusters", None, False) == [bug for bug in BUGS if bug.room == "clusters"]


def test_a_bug_is_caught_and_a_change_that_is_none_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bug,) = MUTANTS.chosen(None, "half characters are read", False)
    same = replace(bug, name="the same in other words", new=bug.old.replace("):", ") is not None:"))
    MUTANTS.copy_sources(tmp_path)
    caught = [MUTANTS.try_bug(one, tmp_path) for one in (bug, same, bug)]
    assert caught == [True, False, True] and MUTANTS.told([bug, same, bug], caught) == 1
    assert f"survived: the same in other words ({bug.file})" in capsys.readouterr().out
