"""The list of planted bugs keeps up with the sources: every bug can still be planted, and every room has some."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "penstock"
NO_LOGIC = {"__main__", "__init__", "kernels"}
"""No room, or nothing in it that could be wrong without every test failing."""


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUGS = _load("planted_bugs").PLANTED


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


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    """What plants them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return _load("mutants")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_one_of_each_room_is_quick(mutants: ModuleType) -> None:
    quick = mutants.chosen(None, None, True)
    assert [bug.room for bug in quick] == list(dict.fromkeys(bug.room for bug in BUGS))
    assert mutants.chosen("clusters", None, False) == [bug for bug in BUGS if bug.room == "clusters"]


def test_a_bug_is_caught_and_a_change_that_is_none_survives(
    mutants: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bug,) = mutants.chosen(None, "half characters are read", False)
    same = replace(bug, name="the same in other words", new=bug.old.replace("):", ") is not None:"))
    mutants.copy_sources(tmp_path)
    caught = [mutants.try_bug(one, tmp_path) for one in (bug, same, bug)]
    assert caught == [True, False, True] and mutants.told([bug, same, bug], caught) == 1
    assert f"survived: the same in other words ({bug.file})" in capsys.readouterr().out
