"""Loads inside a rank: steered by its passes, held when the plan changes, ended with whoever asked. Device and clock are made up."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from penstock.processes.states import started_ticks
from penstock.runtime.devices.loads import GpuLoad, LoadReport, LoadRequest, RankLoads, forget_loads, load_path, report_path
from penstock.runtime.telemetry.process_files import RankProcess

OWN = RankProcess(os.getpid(), started_ticks(os.getpid()) or 0, socket.gethostname(), "")


@dataclass
class FakeLoad:
    share: float
    failed: bool = False
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeGpu:
    """A rank that computes for a second in each step, and longer beside a load; what a step took is told one step late."""

    folder: Path
    strength: float = 3.0
    """How many times longer beside one that is busy all the time, less one."""
    begun: list[FakeLoad] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.loads = RankLoads(self.folder, 1, self._make)
        self._late = 0.0

    def _make(self, share: float) -> FakeLoad:
        self.begun.append(FakeLoad(share))
        return self.begun[-1]

    def run(self, steps: int, usual_s: float = 1.0) -> float:
        """What the last of so many steps took."""
        for _ in range(steps):
            self.loads.look(self.step)
            busy = sum(load.share for load in self.begun if not load.closed)
            taken_s = usual_s * (1 + 0.02 * (self.step % 3 - 1)) * (1 + self.strength * busy)
            told_s, self._late = self._late, taken_s
            self.loads.measured(told_s)
            self.step += 1
        return taken_s

    def ask(self, factor: float, last: int = 10**6, share: float = 0.0, asker: RankProcess = OWN) -> Path:
        path = load_path(self.folder, 1, "ab")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(msgspec.json.encode(LoadRequest(factor, self.step, last, asker, share)))
        return path


@pytest.mark.parametrize(("factor", "strength"), [(1.5, 0.8), (1.5, 9.0), (2.5, 3.0)])
def test_passes_are_slowed_to_the_factor_whatever_a_load_is_worth(factor: float, strength: float, tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path, strength)
    gpu.run(10)
    path = gpu.ask(factor)
    assert gpu.run(40) == pytest.approx(factor, rel=0.05)
    told = msgspec.json.decode(report_path(path).read_bytes(), type=LoadReport)
    assert told.factor == pytest.approx(factor, rel=0.04) and told.share == gpu.begun[0].share and not told.failed


def test_a_load_stays_as_it_is_when_the_plan_changes(tmp_path: Path) -> None:
    """A stage of half as many ops takes half as long, and is slowed as much as before."""
    gpu = FakeGpu(tmp_path)
    gpu.run(10)
    gpu.ask(1.5)
    gpu.run(40)
    share = gpu.begun[0].share
    gpu.loads.plan_changed()
    assert gpu.run(20, usual_s=0.5) == pytest.approx(0.75, rel=0.05) and gpu.begun[0].share == share


def test_a_share_that_is_given_is_kept(tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path)
    gpu.run(10)
    gpu.ask(1.5, share=0.4)
    gpu.run(10)
    assert [load.share for load in gpu.begun] == [0.4]


def test_where_nothing_was_measured_before_the_rank_is_left_the_rest_of_the_time(tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path)
    gpu.ask(1.5)
    gpu.run(10)
    assert gpu.begun[0].share == pytest.approx(1 / 3)


def test_a_thread_multiplies_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, with streams and events that are none."""
    products, several = [], threading.Event()

    def product(*_: object, out: torch.Tensor) -> None:
        products.append(threading.current_thread())
        if len(products) > 40:
            several.set()

    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    monkeypatch.setattr(torch, "mm", product)
    load = GpuLoad(torch.device("cpu"), 0.05)
    assert several.wait(60) and not load.failed
    load.close()
    assert len(set(products)) == 1 and not any(thread.is_alive() for thread in products)


@pytest.mark.parametrize("why", ["steps", "file", "asker", "run"])
def test_a_load_ends(why: str, tmp_path: Path) -> None:
    gpu = FakeGpu(tmp_path)
    gpu.run(10)
    path = gpu.ask(1.5, last=19 if why == "steps" else 10**6)
    gpu.run(9)
    assert not gpu.begun[0].closed
    if why == "file":
        path.unlink()
    elif why == "asker":
        gpu.ask(1.5, asker=msgspec.structs.replace(OWN, started=OWN.started + 1))
    elif why == "run":
        gpu.loads.close()
        forget_loads(tmp_path)
    gpu.run(4)
    assert gpu.begun[0].closed and len(gpu.begun) == 1 and gpu.run(3) == pytest.approx(1.0, rel=0.03)
