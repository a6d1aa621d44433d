"""Measuring with several processes at once: one profile, each process with its share of the threads, in step with each other."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.costs.profile import read_profile
from penstock.models import resolve_model
from penstock.profiling.run import Profiler
from penstock.profiling.together import measure_together


def test_two_processes_measure_one_profile(tmp_path: Path) -> None:
    path, model = tmp_path / "profile.json", resolve_model("gpt-tiny")
    units = [unit for unit in Profiler.open(path, "cpu").units([model], [1]) if unit.layout == "padded"]
    assert len(units) == 2
    measure_together(path, units, 2, time_budget_s=0.0, progress=lambda name: None)
    assert not path.exists()  # no time, nothing measured
    heard: list[str] = []
    measure_together(path, units[:1], 2, progress=heard.append)
    found = read_profile(path).devices["cpu"]
    assert heard == found.done == [units[0].name]
    assert found.about["num_threads"] == max(1, len(os.sched_getaffinity(0)) // 2)
    assert os.listdir(tmp_path) == ["profile.json"]
