"""When messages are timed, and what is made of them: figures made up, and two real processes whose link is slowed in mid-run."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from warm_launchers import launched

from penstock.adapting.events import EVENTS, read_events
from penstock.adapting.link_probes import PROBED_STEPS, LinkProbes, rounds_of
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.runtime.run_folder import last_step
from penstock.runtime.telemetry.figures import RankFigures


class _Link:
    """A transport to a peer that answers at once; how often it was asked."""

    def __init__(self) -> None:
        self.sent = 0

    def send(self, tensors: Any, peer: int) -> Any:
        self.sent += 1
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensors: Any, peer: int) -> Any:
        return SimpleNamespace(wait=lambda: None)


def probes_of(staged: bool = False) -> tuple[LinkProbes, _Link]:
    """Those of the first of two ranks."""
    groups = SimpleNamespace(gather=lambda values: values[None])
    world = SimpleNamespace(rank=0, staged=staged, groups=groups, device=torch.device("cpu"))
    plan, link = uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2), _Link()
    return LinkProbes(SimpleNamespace(plan=plan, world=world, transport=link), (0, 1)), link  # type: ignore[arg-type]


def figures(step_s: float, compute_s: float = 1.0) -> dict[int, RankFigures]:
    return {0: RankFigures(1.0, 1.0, step_s=step_s), 1: RankFigures(compute_s, 1.0, step_s=step_s)}


def test_messages_are_timed_at_first_and_while_waits_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, link = probes_of()
    moments = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(moments)))
    asked = [step for step in range(60) if probes.after(step, figures(3.0 if step < 40 else 4.0)) is not None]
    calm = [step for step in range(20, 40) if step in asked]
    assert asked[:10] == list(range(10)) and calm == [] and link.sent
    later = [step for step in asked if step >= 40]
    assert later[0] <= 46 and later == list(range(later[0], later[0] + PROBED_STEPS + 1))


def test_a_slow_rank_is_no_reason_to_time_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    probes, _ = probes_of()
    monkeypatch.setattr(LinkProbes, "_time_s", lambda self, pair: 1.0)
    steps = {step: figures(3.0) if step < 40 else figures(6.0, compute_s=2.0) for step in range(60)}
    assert all(probes.after(step, ranks) is None or step < 20 for step, ranks in steps.items())


def test_nothing_is_timed_before_ranks_are_measured_nor_where_they_share_a_gpu() -> None:
    probes, link = probes_of()
    assert probes.after(0, {0: RankFigures(1.0, 1.0, step_s=3.0), 1: RankFigures()}) is None
    assert probes_of(staged=True)[0].after(0, figures(3.0)) is None and link.sent == 0


def test_no_rank_is_twice_in_a_round() -> None:
    pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
    rounds = rounds_of(pairs)
    assert sorted(pair for one in rounds for pair in one) == pairs
    assert all(len({rank for pair in one for rank in pair}) == 2 * len(one) for one in rounds)


NAMES = f"penstock-{os.getpid()}-a", f"penstock-{os.getpid()}-b"
ENDS = "pen-veth-a", "pen-veth-b"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=250)


@contextmanager
def two_networks() -> Iterator[None]:
    """Two network namespaces, joined by a veth pair."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, `ip` and `tc`")
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", ENDS[0], "netns", NAMES[0], "type", "veth", "peer", "name", ENDS[1], "netns", NAMES[1])
        for number, (name, end) in enumerate(zip(NAMES, ENDS, strict=True), 1):
            _ip("-n", name, "address", "add", f"10.231.77.{number}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _leave()
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.decode(errors='replace').strip()}")
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=250, check=False)


def test_a_real_link_that_is_slowed_in_mid_run_is_named(data: str, tmp_path: Path) -> None:
    # What is timed are messages of 64 kB, the least: soon over also when the link is slowed, which keeps each of them for 0.1 s, and a step
    # for far longer than a busy machine does.
    (tmp_path / "two.yaml").write_text("nodes: [{device: cpu, gpus: 1, count: 2, inter: {bandwidth_gb_per_s: 0.03}}]\n")
    plan = uniform_plan("gpt-tiny", str(tmp_path / "two.yaml"), global_batch=4, micro_batch=2, pp=2, precision="fp32")
    write_plan(tmp_path / "plan.json", plan)
    out = tmp_path / "run"
    train = ["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "2000", "--out", str(out), "--device", "cpu",
             "--planners", "0", "--json"]  # fmt: skip
    with two_networks(), ExitStack() as stack:
        runs = []
        for rank, (name, end) in enumerate(zip(NAMES, ENDS, strict=True)):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.231.77.1",
                   "MASTER_PORT": "29517", "GLOO_SOCKET_IFNAME": end}  # fmt: skip
            runs.append(stack.enter_context(launched(train, tmp_path, f"rank-{rank}", network=name, **own)))
        while last_step(out) < 30:  # the time-out ends a wait in vain
            assert all(run.status is None for run in runs), [run.err.read_text() for run in runs]
            time.sleep(0.1)
        for name, end in zip(NAMES, ENDS, strict=True):
            slow = ["tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", "5mbit", "burst", "32kb", "latency", "4s"]
            subprocess.run(["ip", "netns", "exec", name, *slow], check=True, capture_output=True, timeout=250)
        slowed = last_step(out)  # a machine that is busy with other things may have been named for it before
        while not (named := [one for one in read_events(out) if one.cause == "link" and one.step >= slowed and (one.factor or 0) > 5]):
            assert all(run.status is None for run in runs), (out / EVENTS).read_text()
            time.sleep(0.1)
    assert named[0].ranks == (0, 1)
    assert "messages between ranks 0 and 1" in named[0].text
