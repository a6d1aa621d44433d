"""Collectives and transfers among the ranks of torchrun, measured by the command itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.costs.measured_links import measured_links
from penstock.costs.profile import read_profile
from penstock.profiling import links
from penstock.profiling.links import SIZES, join_ranks, measure_links

SOURCE = Path(__file__).parents[2] / "src"


def test_a_single_rank_measures_no_links(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks("cpu") == 0 and measure_links(torch.device("cpu")) == []


def test_a_message_takes_what_one_message_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that each message moves by a second and each collective by five: there and back are two of them."""
    clock = [0.0]

    def takes(time_s: float) -> Callable[..., None]:
        def move(*given: object, **named: object) -> None:
            clock[0] += time_s

        return move

    names = {name: takes(5.0) for name in ("all_reduce", "all_gather", "broadcast")} | {name: takes(1.0) for name in ("send", "recv")}
    facts = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_rank": lambda: 0, "get_backend": lambda group: "gloo"}
    stand_in = SimpleNamespace(new_group=lambda ranks: None, barrier=lambda: None, ProcessGroup=None, **names, **facts)
    monkeypatch.setattr(links, "dist", stand_in)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(links, "SIZES", (1024, 4096))
    found = {(point.kind, point.size_bytes): point.time_s for point in measure_links(torch.device("cpu"))}
    kinds = {"all_reduce": 5.0, "all_gather": 5.0, "broadcast": 5.0, "transfer": 1.0}
    assert found == {(kind, size): time_s for kind, time_s in kinds.items() for size in (1024, 4096)}


def test_two_ranks_measure_their_link(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "penstock.cli.main", "profile", "--out", str(path), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    here = read_profile(path).devices["cpu"]
    for kind in ("all_reduce", "all_gather", "broadcast", "transfer"):
        points = [point for point in here.links if point.kind == kind]
        assert [point.size_bytes for point in points] == list(SIZES), kind
        assert all(point.num_ranks == 2 and point.num_nodes == 1 and not point.modelled and point.time_s > 0 for point in points)
        assert points[-1].time_s > points[0].time_s
    (link,) = measured_links(here, "cpu").values()
    assert 1e7 < link.bandwidth_bytes_per_s < 1e12 and math.isfinite(link.latency_s) and link.latency_s < 0.1
