"""`penstock train` samples its GPUs through NVML: real processes, a stand-in for the library and for whose GPU a process has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import standins

from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.telemetry.nvml import DeviceSample
from penstock.runtime.telemetry.steps import read_lines, read_steps

# Runs at the start of every process, workers included.
GPUS = """
import sys
import penstock.runtime.telemetry.nvml as nvml
nvml.gpu_uuid = lambda device: "GPU-a" if __import__("torch").distributed.get_rank() == 0 else "GPU-b"
"""
ABSENT = 'sys.modules["pynvml"] = None\n'


def trained(data: str, tmp_path: Path, site: str) -> subprocess.CompletedProcess[str]:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2, layout="packed"))
    (tmp_path / "sitecustomize.py").write_text(site, encoding="utf-8")
    paths = [str(tmp_path), *standins.__path__, *sys.path]
    command = [sys.executable, "-m", "penstock.cli.main", "train", str(tmp_path / "plan.json"), "--data", data, "--steps", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, timeout=100, env=environment)


def test_samples_of_every_gpu(data: str, tmp_path: Path) -> None:
    done = trained(data, tmp_path, GPUS)
    assert done.returncode == 0, done.stderr
    for rank, device in enumerate(("GPU-a", "GPU-b")):
        found = list(read_lines(tmp_path / "run" / f"rank-{rank:05d}.devices.jsonl", DeviceSample))
        assert found and {(one.device, one.utilisation) for one in found} == {(device, 0.75)}  # type: ignore[attr-defined]
    last = read_steps(tmp_path / "run" / "steps.jsonl")[-1]
    assert (last.gpu_utilisation, last.gpu_sm_clock_hz, last.gpu_power_w) == (0.75, 1.98e9, 412.5)
    assert "GPU 75% busy" in done.stderr and "NVML" not in done.stderr


def test_without_nvml_training_says_so_once(data: str, tmp_path: Path) -> None:
    done = trained(data, tmp_path, GPUS + ABSENT)
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "NVML" in line]
    assert len(notes) == 1 and "pip install 'penstock[gpu]'" in notes[0] and notes[0].startswith("note:")
    assert not list((tmp_path / "run").glob("*.devices.jsonl"))
    assert all("gpu" not in json.dumps(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines())
