"""Policies under loads, a short form of `benchmarks/dynpipe.py`: two stages, with a made-up profile in the form of DynPipe's."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from penstock.reproduce import interference

PHASES = (("idle", 150), ("heavy", 400), ("idle 2", 200))


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return interference


@pytest.fixture(scope="module")
def found(benchmark: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A scene of two stages of about equal length, and what each policy makes of it."""
    folder = tmp_path_factory.mktemp("dynpipe")
    with (folder / benchmark.PROFILE).open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["layer_index", "fwd_ms", "bwd_ms", "out_comm_s"])
        for number in range(38):
            table.writerow([number, 13.0 if number < 10 else 4.6, 26.0 if number < 10 else 9.2, 0.1])
    scene = replace(benchmark.vgg16(folder, folder), phases=PHASES)
    return scene, benchmark.told(scene)


def test_the_scene_takes_what_the_logs_show(benchmark: Any, found: tuple[Any, Any]) -> None:
    scene, _ = found
    assert scene.take_s(scene.plan, np.array([1.0, 1.0])) == pytest.approx(benchmark.IDLE_S, rel=1e-6)
    assert scene.take_s(scene.plan, np.array([scene.light, 1.0])) == pytest.approx(benchmark.LIGHT_S, rel=1e-3)
    assert scene.take_s(scene.plan, np.array([1.0, scene.heavy])) == pytest.approx(benchmark.HEAVY_S, rel=1e-3)


def test_who_sees_a_load_soon_and_moves_cheaply_is_fastest(benchmark: Any, found: tuple[Any, Any]) -> None:
    scene, told = found
    rows = {name: own["heavy"] for name, own in benchmark.speedups(scene, told).items()}
    assert rows["static"][1] == 1.0 and rows["simple"][1] < 1.0  # which restarts in vain
    assert rows["ours"][1] > 1.3 and rows["ours"][1] > rows["dynpipe"][1] > 1.0
    assert rows["best cuts"][1] > rows["dynpipe"][1]
    # Who knows the load has nothing to notice; a pause is shorter where the load is taken for a smaller one.
    assert rows["best cuts"][1] > rows["clairvoyant"][1] > 0.99 * rows["ours"][1] > 0.95 * rows["clairvoyant"][1]
    assert rows["epoch-restart"][1] == 1.0  # no epoch has ended


def test_a_load_is_seen_by_windows_when_one_is_over_and_70_minibatches_have_passed(benchmark: Any, found: tuple[Any, Any]) -> None:
    _, told = found
    times, plans = told["dynpipe"]
    (first,) = (number for number in range(1, 400) if plans[number] != plans[number - 1])
    assert first == 150 + benchmark.WINDOW + benchmark.DRAIN and times[first] - times[first + 1] == pytest.approx(benchmark.RESTART_S)
    ours = told["ours"][1]
    assert next(number for number in range(1, 400) if ours[number] != ours[number - 1]) <= 160


def test_without_data_it_says_so(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr("sys.argv", ["dynpipe.py", "vgg16", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert load_benchmark("dynpipe").main() == 0
    assert "vgg16: skipped, since" in capsys.readouterr().out
