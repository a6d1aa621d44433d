"""Figures of DynaPipe over tables made here: computed and drawn; what they claim of the published tables need not hold of others."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_tables import dynapipe_tables

from penstock.batching.planned import with_recompute_choices
from penstock.batching.planner import costs_for, plan_batch
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import read_plan
from penstock.plans.validity import require_valid
from penstock.reproduce import dynapipe_grid
from penstock.reproduce.dynapipe_batches import seeded_lengths
from penstock.reproduce.dynapipe_timed import TimedIteration, iteration_of, run_iterations
from penstock.runtime import workers
from penstock.systems.dynapipe.rules import dynapipe_costs
from penstock.systems.dynapipe.tables import open_configuration


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    inputs = dynapipe_tables(folder / "dynapipe") / "inputs"
    inputs.mkdir()
    rows = [f"{sample.length}" for sample in seeded_lengths(120, False)]
    (inputs / "gpt_tok65536_max4096.csv").write_text("\n".join(["length", *rows]) + "\n")
    return folder


def figure(name: str, data: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What is told of a figure in its short form, and its rows."""
    assert run(["reproduce", "dynapipe", "--figure", name, "--data", str(data), "--out", str(out), "--quick", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (out / "dynapipe" / name / "figure.svg").stat().st_size > 1000
    return result, list(csv.DictReader((out / "dynapipe" / name / "figure.csv").open()))


def test_ways_of_micro_batching(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = figure("15a", data, tmp_path, capsys)
    speeds = {row["x"].replace("\n", " "): float(row["y"] or 0) for row in rows}
    assert list(speeds) == ["packed rows", "TB (S)", "TB (T)", "DP (S)", "DP (T)", "Hilbert order and search"]
    assert min(speeds["DP (S)"], speeds["DP (T)"]) > speeds["TB (S)"] > 0


def test_schedules_of_the_same_micro_batches(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, rows = figure("15b", data, tmp_path, capsys)
    speeds = {row["series"]: float(row["y"]) for row in rows if row["x"] == "65,536 tokens"}
    assert speeds["1F1B"] == 1.0 and speeds["adaptive, reordered"] >= speeds["adaptive"] > 0  # as they come is one of the orders
    assert {row["series"] for row in rows if row["published"] == "True"} == {"DynaPipe, adaptive", "DynaPipe, adaptive, reordered"}


def test_plans_of_the_grid_search_can_be_run(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(dynapipe_grid, "TOKENS", 8192)
    result, _ = figure("grid", data, tmp_path, capsys)
    folder, (*plans, configs) = tmp_path / "dynapipe" / "grid", [file["path"] for file in result["files"]]
    assert {Path(path).stem.rpartition("-")[2] for path in plans} == {"best", "packed", "controlled"} and configs == "configs.json"
    assert all(f"dynapipe/grid/{path}" in (tmp_path / "index.html").read_text() for path in plans)
    for way, policy in (("best", "dynamic"), ("packed", "fixed")):
        plan = read_plan(folder / f"plans/t5-11b-1024-{way}.json")
        require_valid(plan, model_of(plan), cluster_of(plan))
        assert plan.micro_batching.policy == policy and plan.seq_length == 1024 and len(plan.ranks) == 8
    degrees = {stage.degrees.tp for stage in read_plan(folder / "plans/gpt-6.7b-1024-controlled.json").stages}
    found = json.loads((folder / configs).read_text())["configs"]["gpt-6.7b-1024-best"]
    assert degrees == {found["tp"]}  # rows are packed under the degrees that were best without
    shutil.copytree(data / "dynapipe", tmp_path / "tables")
    shutil.copy(folder / configs, tmp_path / "tables")
    tables, config = open_configuration(tmp_path / "tables" / "gpt-6.7b-1024-best")
    assert dynapipe_costs(tables, config).num_stages == found["pp"]


class SimulatedRanks:
    """Workers that take a fiftieth more time than planned, and much more whenever the machine is busy: in all rounds but the second."""

    def __init__(self, size: int) -> None:
        assert size == 8

    def __enter__(self) -> SimulatedRanks:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, job: object, plan: Plan, iterations: Sequence[TimedIteration]) -> list[list[float]]:
        assert all([program.rank for program in one.programs] == list(range(8)) for one in iterations)
        count = len(iterations) // 3
        return [[one.planned_s * (1.02 if count <= at < 2 * count else 1.5) for at, one in enumerate(iterations)]] * 8


def test_planned_iterations_beside_timed_ones(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(workers, "WorkerPool", SimulatedRanks)
    result, rows = figure("17", data, tmp_path, capsys)
    assert [round(claim["found"], 6) for claim in result["claims"]] == [0.02, 0.02] and result["verdict"] == "holds"
    assert all(float(row["y"]) == pytest.approx(1.02 * float(row["x"])) for row in rows) and len(rows) == 4


def test_timed_ranks_wait_for_all_that_was_planned() -> None:
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=1, pp=2)
    plan = with_recompute_choices(plan, model_of(plan))
    costs = costs_for(plan, 64)
    batch = plan_batch(seeded_lengths(8, False, longest=64), costs)
    times = workers.launch(run_iterations, 2, plan, [iteration_of(plan, costs, batch, number) for number in range(2)])
    assert times[0] == times[1] and all(time_s >= 0.999 * batch.predicted_s for time_s in times[0])
