"""Collectives and transfers among the ranks of torchrun, measured by the command itself."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import torch

from penstock.costs.measured_links import measured_links
from penstock.costs.profile import read_profile
from penstock.profiling.links import SIZES, join_ranks, measure_links

SOURCE = Path(__file__).parents[2] / "src"


def test_a_single_rank_measures_no_links(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join_ranks("cpu") == 0 and measure_links(torch.device("cpu")) == []


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
