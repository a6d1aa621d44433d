"""`penstock train` samples its GPUs through NVML: a stand-in for the library and for whose GPU a process has."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from training_jobs import train_sampled

from penstock.cli import main
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.telemetry.nvml import DeviceSample
from penstock.runtime.telemetry.steps import read_lines, read_steps

Train = Callable[[bool], str]
"""Trains with NVML, or without it; what was told."""


@pytest.fixture
def train(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Train:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2, layout="packed"))

    def trained(with_nvml: bool) -> str:
        monkeypatch.setattr("penstock.runtime.trainer.train_rank", partial(train_sampled, with_nvml))
        status = main.run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "3", "--out", str(tmp_path / "run")])
        told = capfd.readouterr().err
        assert status == 0, told
        return told

    return trained


def test_samples_of_every_gpu(train: Train, tmp_path: Path) -> None:
    told = train(True)
    for rank, device in enumerate(("GPU-a", "GPU-b")):
        found = list(read_lines(tmp_path / "run" / f"rank-{rank:05d}.devices.jsonl", DeviceSample))
        assert found and {(one.device, one.utilisation) for one in found} == {(device, 0.75)}  # type: ignore[attr-defined]
    last = read_steps(tmp_path / "run" / "steps.jsonl")[-1]
    assert (last.gpu_utilisation, last.gpu_sm_clock_hz, last.gpu_power_w) == (0.75, 1.98e9, 412.5)
    assert "GPU 75% busy" in told and "NVML" not in told


def test_without_nvml_training_says_so_once(train: Train, tmp_path: Path) -> None:
    notes = [line for line in train(False).splitlines() if "NVML" in line]
    assert len(notes) == 1 and "pip install 'penstock[gpu]'" in notes[0] and notes[0].startswith("note:")
    assert not list((tmp_path / "run").glob("*.devices.jsonl"))
    assert all("gpu" not in json.dumps(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines())
