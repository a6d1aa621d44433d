"""`penstock train --device timed`: a plan for devices that are not here, planned, executed and recorded by real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import with_last_values

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.schema import write_plan
from penstock.runtime.telemetry.steps import read_steps

STEPS = 5


def plan_of(**changes: Any) -> Plan:
    fields = {
        "model_ref": "gpt-6.7b",
        "cluster_ref": "8xa100-80gb",
        "global_batch": 32,
        "micro_batch": 4,
        "pp": 4,
        "layout": "packed",
    } | changes
    return uniform_plan(**fields)


def rehearsed(plan: Plan, data: str, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    write_plan(folder / "plan.json", plan)
    capsys.readouterr()
    given = ["--data", data, "--steps", str(STEPS), "--device", "timed", "--out", str(folder / "run"), "--json", "--compare", *options]
    assert run(["train", str(folder / "plan.json"), *given]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["losses"] == [] and found["checkpoint"] is None and not (folder / "run" / "checkpoints").exists()
    return found


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(global_batch=64, replicas=2),
        replace(plan_of(), micro_batching=MicroBatching("packed", "dynamic")),
        plan_of(model_ref="gpt-1.3b", pp=2, chunks=2, schedule="interleaved", replicas=2),
    ],
    ids=["fixed", "dynamic", "interleaved"],
)
def test_measured_is_what_was_predicted(plan: Plan, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing ends before it was predicted to; how much later it does depends on what else the machine runs. A step after a late one may
    be shorter, since devices keep to their clock."""
    found = rehearsed(plan, data, tmp_path, capsys)
    records = read_steps(tmp_path / "run" / "steps.jsonl")
    assert max(record.time_s or 0.0 for record in records) > 0.9 * found["predicted_time_s"]
    for stage in found["stages"]:
        for kind in ("forward", "backward"):
            assert stage[f"{kind}_measured_s"] > 0.75 * stage[f"{kind}_predicted_s"] - 0.01
    assert [record.step for record in records] == list(range(STEPS)) and all(record.loss is None and record.tokens for record in records)
    assert run(["trace", str(tmp_path / "run"), "--out", str(tmp_path / "trace.json"), "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert traced["predicted"] and len(traced["ranks"]) == len(plan.ranks)
    assert all(rank["steps"] == STEPS and rank["compute"] > 0.1 for rank in traced["ranks"])


def test_a_slow_rank_slows_the_run(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = rehearsed(plan_of(), data, tmp_path, capsys, "--slow", "2=3")
    ratios = [stage["forward_measured_s"] / stage["forward_predicted_s"] for stage in found["stages"]]
    assert ratios[2] > 2.1 and ratios[2] == max(ratios)  # the others, on the same machine at the same time, are not slowed
    assert found["time_s"] > 1.5 * found["predicted_time_s"]
    assert found["cause"]["rank"] == 2 and "ward passes of stage 2 took" in found["cause"]["sentence"]  # others wait for it


def test_it_says_that_nothing_was_computed(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", plan_of())
    assert (
        run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "1", "--device", "timed", "--out", str(tmp_path / "run")])
        == 0
    )
    assert "rehearsed 1 step on timed devices" in (told := capsys.readouterr().out) and "no losses and no checkpoint" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--resume", "run"), "--resume: a timed device computes nothing"),
        (("--weights", "hf:x", "--lr", "3e-4"), "--lr, --weights: a timed device computes nothing"),
        (("--eval-every", "2"), "--eval-every: a timed device"),
        (("--checkpoint-every", "2"), "--checkpoint-every: a timed device"),
        (("--torch-profile", "1"), "--torch-profile: a timed device"),
        (("--on-death", "recover"), "--on-death: a timed device"),
        (("--device", "cpu", "--on-death", "live"), "--on-death is 'live'; end or recover was expected"),
        (("--slow", "x"), "--slow is 'x'; a rank and a factor such as 3=1.5 were expected"),
        (("--slow", "4=2"), "rank 4 is to be slower, but the plan has ranks 0 to 3"),
        (("--slow", "1=0"), "rank 1 is to take 0 times as long"),
        (("--slow", "1=nan"), "rank 1 is to take nan times as long"),
        (("--device", "cpu", "--slow", "1=2"), "which only timed and paced devices can be"),
    ],
)
def test_options_that_make_no_sense(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    write_plan(tmp_path / "plan.json", plan_of())
    given = ["--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--device", "timed", *options]
    assert run(with_last_values(["train", str(tmp_path / "plan.json"), *given])) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()


def test_one_machine_only(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    write_plan(tmp_path / "plan.json", plan_of())
    assert (
        run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--device", "timed"])
        == 2
    )
    assert "Run them without torchrun" in capsys.readouterr().err
