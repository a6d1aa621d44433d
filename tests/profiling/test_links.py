"""Collectives and transfers among the ranks of torchrun, measured by the command itself."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from free_ports import free_port

from penstock.cli.main import run
from penstock.costs.measured_links import measured_links
from penstock.costs.profile import read_profile
from penstock.processes.fork_server import start_process
from penstock.profiling import links
from penstock.profiling.links import SIZES, join_ranks, measure_links


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


def test_the_first_two_of_each_are_not_timed_and_nodes_are_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine messages that take 9, 8 … 1 seconds the median of the last seven counts; four ranks of nodes of three are on two nodes."""
    clock, left = [0.0], [0]

    def move(*given: object, **named: object) -> None:
        left[0] = left[0] or 9
        clock[0] += left[0]
        left[0] -= 1

    collectives = dict.fromkeys(("all_reduce", "all_gather", "broadcast"), move)
    facts = {"is_initialized": lambda: True, "get_world_size": lambda: 4, "get_rank": lambda: 0, "get_backend": lambda group: "gloo"}
    stand_in = SimpleNamespace(new_group=lambda ranks: None, barrier=lambda: None, ProcessGroup=None, **collectives, **facts)
    monkeypatch.setattr(links, "dist", stand_in)
    monkeypatch.setattr(links, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(links, "SIZES", (1024,))
    monkeypatch.setattr(links, "_there_and_back", move)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    found = measure_links(torch.device("cpu"))
    assert {point.time_s for point in found if point.kind != "transfer"} == {4.0}
    assert {(point.num_ranks, point.num_nodes) for point in found} == {(2, 1), (4, 2)}


FEW = SIZES[:6]
"""Up to a megabyte: the larger ones take seconds."""


def profile_links(environment: dict[str, str], path: str) -> None:
    """What torchrun does on each rank."""
    os.environ |= environment
    links.SIZES = FEW
    sys.exit(run(["profile", "--out", path, "--json"]))


def test_two_ranks_measure_their_link(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank in [start_process(f"rank {rank}", profile_links, {**place, "RANK": str(rank)}, str(path)) for rank in range(2)]:
        rank.join()
        assert rank.exitcode == 0
    here = read_profile(path).devices["cpu"]
    for kind in ("all_reduce", "all_gather", "broadcast", "transfer"):
        points = [point for point in here.links if point.kind == kind]
        assert [point.size_bytes for point in points] == list(FEW), kind
        assert all(point.num_ranks == 2 and point.num_nodes == 1 and not point.modelled and point.time_s > 0 for point in points)
    (link,) = measured_links(here, "cpu").values()
    assert link.bandwidth_bytes_per_s > 0 and math.isfinite(link.latency_s)
