"""`penstock train --device paced`: real losses at the pace of the plan's devices, disturbed as a file says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.telemetry.steps import read_steps

STORY = """
- {rank: 1, factor: 3, shape: pulse, from: 3, steps: 2}
"""


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """Two stages on devices that are far slower than this machine."""
    (tmp_path / "slow.yaml").write_text(
        "devices: [{name: abacus, memory_gb: 8, memory_bandwidth_gb_per_s: 4, fp32_tflops: 0.01}]\nnodes: [{device: abacus, gpus: 2}]\n",
        encoding="utf-8",
    )
    given = uniform_plan("gpt-tiny", str(tmp_path / "slow.yaml"), global_batch=16, micro_batch=4, pp=2, layout="packed", precision="fp32")
    write_plan(tmp_path / "plan.json", given)
    return str(tmp_path / "plan.json")


def trained(plan: str, data: str, out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["train", plan, "--data", data, "--steps", "6", "--out", str(out), "--json", *options]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_losses_of_the_processor_at_the_pace_of_the_plan(plan: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "story.yaml").write_text(STORY, encoding="utf-8")
    plain = trained(plan, data, tmp_path / "plain", capsys, "--device", "cpu")
    calm = trained(plan, data, tmp_path / "calm", capsys, "--device", "paced", "--compare")
    slowed = trained(plan, data, tmp_path / "slowed", capsys, "--device", "paced", "--disturb", str(tmp_path / "story.yaml"))
    assert plain["losses"] == calm["losses"] == slowed["losses"]
    assert calm["time_s"] == pytest.approx(calm["predicted_time_s"], rel=1e-3) and slowed["checkpoint"]
    times = [[record.time_s for record in read_steps(tmp_path / name / "steps.jsonl")] for name in ("calm", "slowed")]
    factors = [b / a for a, b in zip(*times, strict=True)]
    assert factors[:3] + factors[5:] == pytest.approx([1.0] * 4, rel=1e-6) and min(factors[3:5]) > 2.0


@pytest.mark.parametrize(
    ("story", "options", "message"),
    [
        ("- {rank: 2, factor: 2}", ("--device", "paced"), "rank 2 is to be slower, but the plan has ranks 0 to 1"),
        ("- {rank: 1, factor: 0}", ("--device", "paced"), "rank 1 is to take 0 times as long"),
        ("- {rank: 1, factor: 2, shape: saw}", ("--device", "timed"), "shape 'saw' is not known"),
        ("- {rank: 1, factor: 2}", ("--device", "cpu"), "rank 1 is to be slower, which only timed and paced devices can be"),
        ("- {link: 0-1, factor: 2}", ("--device", "cpu"), "link 0-1 is to be slower, which only timed and paced devices can be"),
        ("a: [", ("--device", "paced"), "story.yaml"),
    ],
)
def test_stories_that_are_refused(
    plan: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], story: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "story.yaml").write_text(story, encoding="utf-8")
    given = ["--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--disturb", str(tmp_path / "story.yaml"), *options]
    assert run(["train", plan, *given]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()


def test_a_missing_story(plan: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--device", "paced", "--disturb", "nowhere.yaml"]
    assert run(["train", plan, *given]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err
