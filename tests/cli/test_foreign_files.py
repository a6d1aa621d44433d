"""Files that others wrote: a batch, a run and the record of a search with any field replaced end with an answer or one message."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import console
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.request import TrainRequest
from penstock.runtime.trainer import PlanTrainer

VALUES = (None, True, -1, 0, 1.5, 10**29, 10**400, float("nan"), float("inf"), 1e300, "x", "\x1b[2J", "9" * 5000, "\ud800", [0], ["x"], {})
TRIED = 50
"""Of each kind; which ones depends on the seed alone."""


@pytest.fixture(scope="module")
def made(data: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, a batch that was planned with it, a run of it, and the record of a search."""
    folder = tmp_path_factory.mktemp("foreign")
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2)
    write_plan(folder / "plan.json", plan)
    (folder / "lengths.csv").write_text("length\n10\n20\n30\n40\n")
    words = f"batch --lengths {folder}/lengths.csv --plan {folder}/plan.json --budget-steps 0 --out {folder}/batch.json"
    assert run(words.split()) == 0
    assert run(f"search --model gpt-tiny --cluster 2xcpu --global-batch 8 --top 1 --baselines --out {folder}/found.json".split()) == 0
    PlanTrainer(TrainRequest(plan, data, 1, str(folder / "run"))).train()
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a JSON value, lists by their first two."""
    if path:
        yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def with_value(whole: Any, path: tuple[Any, ...], value: Any) -> Any:
    changed = deepcopy(whole)
    owner = changed
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    return changed


@pytest.mark.parametrize(
    ("file", "command"),
    [("batch.json", "simulate plan.json --batch batch.json"), ("batch.json", "simulate plan.json --batch batch.json --json"),
     ("batch.json", "report batch.json --out page.html"), ("found.search.json", "report found.search.json --out page.html"),
     ("run/run.json", "report run --out page.html"), ("run/run.json", "trace run --out trace.json")],
)  # fmt: skip
def test_any_field_may_be_anything(
    file: str, command: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    whole = json.loads(Path(file).read_text(encoding="utf-8"))
    assert run(command.split()) == 0
    cases = [(path, value) for path in places(whole) for value in VALUES]
    for path, value in random.Random(command).sample(cases, min(TRIED, len(cases))):
        Path(file).write_text(json.dumps(with_value(whole, path, value)), encoding="utf-8")
        console.out.cache_clear()
        console.err.cache_clear()
        capsys.readouterr()
        status = run(command.split())
        said = capsys.readouterr()
        where = f"{'/'.join(map(str, path))} = {str(value)[:40]!a}: {said.err[:300]}"
        assert status in (0, 2) and said.err.count("error:") == status // 2, where
        assert "\x1b[2J" not in said.out + said.err and (status == 2 or "nan" not in said.out.lower().split()), where


@pytest.mark.parametrize(
    ("file", "path", "value", "told"),
    [
        ("batch.json", ("replicas", 0, "micro_batches", 0, "dec_lengths"), [1], "has dec_lengths of 1"),
        ("batch.json", ("predicted_s",), float("nan"), "a time or a size is nan"),
        ("batch.json", ("costs",), "\ud800", "half of a character"),
        ("found.search.json", ("bound_s",), "x", "mistakes 'bound_s'"),
        ("found.search.json", ("formula_s",), "x", "mistakes 'formula_s'"),
        ("run/run.json", ("search_steps",), 10**29, "search_steps"),
        ("run/run.json", ("data",), "\ud800", "half of a character"),
    ],
)  # fmt: skip
def test_what_was_wrong_is_named(
    file: str, path: tuple[Any, ...], value: Any, told: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    place = tmp_path / file
    place.write_text(json.dumps(with_value(json.loads(place.read_text(encoding="utf-8")), path, value)), encoding="utf-8")
    source = place.parent if file == "run/run.json" else place
    status = run(["trace" if source.is_dir() else "report", str(source), "--out", str(tmp_path / "out")])
    assert status == (0 if source.is_dir() else 2) and told in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("steps", ["9" * 5000, "1-" + "9" * 5000, "x", "3-", "-3", "5-3"])
@pytest.mark.parametrize("verb", ["trace", "report"])
def test_steps_that_are_none(verb: str, steps: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, str(made / "run"), f"--steps={steps}", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --steps is ") and len(said) < 300
