"""`penstock disturb`: runs that go on are slowed down, alike on all ranks, and nobody else's."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pty_runs import cut_lines, on_terminal

from penstock.adapting import disturbing, loads
from penstock.adapting.events import read_events
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import write_plan
from penstock.processes.states import started_ticks
from penstock.runtime.devices.loads import LoadReport, LoadRequest, report_path
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.run_folder import own_folder
from penstock.runtime.run_lock import run_lock
from penstock.runtime.telemetry.process_files import RankProcess, named_process, read_process
from penstock.runtime.telemetry.steps import LineLog, StepRecord, read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.timing.asked import ASKED


def plan_for(path: Path, num_devices: int = 3) -> Plan:
    """Stages on devices that keep no rank waiting."""
    (path / "swift.yaml").write_text(
        f"devices: [{{name: swift, memory_gb: 8, memory_bandwidth_gb_per_s: 900, fp32_tflops: 9}}]\n"
        f"nodes: [{{device: swift, gpus: {num_devices}}}]\n",
        encoding="utf-8",
    )
    return uniform_plan("gpt-tiny", str(path / "swift.yaml"), global_batch=num_devices, micro_batch=1, pp=num_devices, layout="packed",
                        precision="fp32")  # fmt: skip


def disturbed_run(tmp_path: Path, data: str, device: str, steps: int, *commands: str) -> list[float]:
    """What each step took in a run that `penstock disturb` slows down after its third step."""
    out = tmp_path / "run"

    def told(step: StepReport) -> None:
        if step.step == 2:
            status, said = on_terminal(["disturb", str(out), *commands], 80)
            assert status == 0 and cut_lines(said, 80) == [] and "from step" in said

    request = TrainRequest(plan_for(tmp_path, 2), data, steps, str(out), device=device, checkpoint_every=0, planning=PlanningSettings(0))
    PlanTrainer(request).train(told)
    return [record.time_s or 0.0 for record in read_steps(out / "steps.jsonl")]


def test_a_paced_run_is_slower_for_a_while(tmp_path: Path, data: str) -> None:
    times = disturbed_run(tmp_path, data, "paced", 16, "--slow", "1=8", "--from", "8", "--steps", "4")
    assert [time_s > 3 * times[0] for time_s in times] == [False] * 8 + [True] * 4 + [False] * 4
    (event,) = read_events(tmp_path / "run")
    assert (event.event, event.step, event.ranks, event.factor) == ("disturbed", 8, (1,), 8.0)
    assert event.text == "rank 1 is made to take 8 times as long from step 8 on for 4 steps"
    assert read_process(tmp_path / "run", 0) is None  # a run that has ended names nobody


def test_a_link_of_a_paced_run_is_slower_until_the_end(tmp_path: Path, data: str) -> None:
    times = disturbed_run(tmp_path, data, "paced", 14, "--link", "1-0=200")
    assert max(times[:4]) < 2 * times[0] and times[-1] > 3 * times[0]


def test_a_rehearsal_waits_for_data_that_is_late(tmp_path: Path, data: str) -> None:
    disturbed_run(tmp_path, data, "timed", 8, "--data", "3")
    (event,) = read_events(tmp_path / "run")
    assert (event.cause, event.ranks) == ("data", ()) and (tmp_path / "run" / ASKED).is_file()


def test_a_run_that_begins_anew_forgets_what_was_asked_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ASKED).write_text("old\n")
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 3, str(tmp_path / "run"))):
        assert not (tmp_path / "run" / ASKED).exists()


@contextmanager
def run_on(tmp_path: Path, device: str) -> Iterator[Path]:
    """The folder of a run of 100 steps, three of them done, whose ranks are all this process."""
    out = tmp_path / "run"
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 100, str(out))):
        log = LineLog(out / "steps.jsonl")
        for step in range(3):
            log.write(StepRecord(step))
        log.close()
        with named_process(out, 0, device), named_process(out, 1, device), named_process(out, 2, device):
            yield out


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with run_on(tmp_path, "paced") as out:
        yield out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "there is nothing to do"),
        (("--kill", "7"), "--kill names rank 7, which has no process of run"),
        (("--kill", "1@lunch"), "--kill is '1@lunch'; a rank such as 1 was expected, or 1@backward. Phases: forward, backward,"),
        (("--freeze", "1@"), "--freeze is '1@'"),
        (("--freeze", "-1"), "--freeze is '-1'"),
        (("--kill", "1@update", "--from", "2"), "--from is 2; run"),
        (("--slow", "7=2"), "the plan has no rank 7: 0 to 2"),
        (("--slow", "1=0"), "rank 1 is to take 0 times as long"),
        (("--slow", "1=-2"), "rank 1 is to take -2 times as long"),
        (("--slow", "1=nan"), "rank 1 is to take nan times as long"),
        (("--slow", "fast"), "--slow is 'fast'"),
        (("--link", "0-2=4"), "link 0-2 is to be slower, but the plan sends nothing over it. Its links: 0-1, 1-2"),
        (("--link", "0-1"), "--link is '0-1'; two ranks and a factor such as 0-1=4 were expected"),
        (("--link", "0-9=2"), "the plan has no rank 9"),
        (("--data", "-1"), "data loading is to take -1 times as long"),
        (("--slow", "1=2", "--from", "2"), "--from is 2, but run"),
        (("--slow", "1=2", "--from", "100"), "step 100 would be the first, but the last step of run"),
    ],
)  # fmt: skip
def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    assert run(["disturb", str(folder), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not (folder / ASKED).exists() and not (folder / "faults").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--kill", "99"), ("--kill", "1@lunch"), ("--freeze", "99"), ("--freeze", "1@"), ("--node", "0"), ("--slow", "foo"),
        ("--slow", "7=2"), ("--slow", "1=0"), ("--slow", "1=nan"), ("--link", "0-1"), ("--link", "0-2=4"), ("--link", "0-9=2"),
        ("--data", "-1"), ("--data", "x"), ("--from", "2"), ("--from", "1000"), ("--steps", "-1"), ("--slow", "1=2", "--from", "1000"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("device", ["paced", "cpu"])
def test_nothing_is_struck_where_anything_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, wrong: tuple[str, ...]
) -> None:
    struck: list[Any] = []
    monkeypatch.setattr(disturbing.os, "kill", lambda *which: struck.append(which))
    with run_on(tmp_path, device) as out:
        for given in (("--kill", "0", *wrong), (*wrong, "--kill", "0"), ("--freeze", "0@update", *wrong)):
            assert run(["disturb", str(out), *given]) == 2
    assert struck == [] and not (out / "faults").exists() and not (out / ASKED).exists() and list(read_events(out)) == []


def test_what_is_asked_begins_soon(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["disturb", str(folder), "--slow", "1=1.5", "--link", "2-1=4"]) == 0
    first, second = map(msgspec.json.decode, (folder / ASKED).read_bytes().splitlines())
    assert first == {"ranks": [1], "factor": 1.5, "shape": "step", "first": 4, "steps": 0} and second["ranks"] == [2, 1]
    assert "rank 1 is made to take 1.5 times as long from step 4 on" in capsys.readouterr().out
    assert [event.cause for event in read_events(folder)] == ["compute", "link"]


def test_a_run_that_is_not_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", plan_for(tmp_path))
    assert run(["disturb", str(tmp_path), "--slow", "1=2"]) == 2
    assert "is not running on this machine" in " ".join(capsys.readouterr().err.split())


def other_start(own: RankProcess) -> RankProcess:
    return msgspec.structs.replace(own, started=own.started + 1)


def other_host(own: RankProcess) -> RankProcess:
    return msgspec.structs.replace(own, host="elsewhere")


@pytest.mark.parametrize("changed", [other_start, other_host])
def test_a_process_that_only_has_the_number_of_a_rank_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Callable[[RankProcess], RankProcess]
) -> None:  # fmt: skip
    write_plan(tmp_path / "plan.json", plan_for(tmp_path))
    own = RankProcess(os.getpid(), started_ticks(os.getpid()) or 0, socket.gethostname(), "cpu")
    (tmp_path / "rank-00001.process.json").write_bytes(msgspec.json.encode(changed(own)))
    with run_lock(tmp_path):
        assert run(["disturb", str(tmp_path), "--slow", "1=2"]) == 2
    assert "has no rank at work on this machine" in " ".join(capsys.readouterr().err.split())


def test_a_run_of_another_user(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert run(["disturb", str(folder), "--slow", "1=2"]) == 2
    assert f"belongs to user {own}; you are user {own + 1}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("options", "message"), [(("--slow", "1=0.5"), "burners can do 1 to 16"), (("--link", "0-1=2"), "with `tc`")])
def test_what_burners_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str) -> None:
    out = tmp_path / "run"
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 100, str(out))), named_process(out, 1, "cpu"):
        assert run(["disturb", str(out), *options]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_burners_end_with_the_steps_that_were_asked_for(tmp_path: Path, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the processor, here for as many looks as the burners take; its steps are written by the look itself."""
    out, pids = tmp_path / "run", []

    class Seen(loads.Burners):
        def set(self, share: float) -> None:
            pids.extend(self.pids)
            super().set(share)

    monkeypatch.setattr(loads, "Burners", Seen)
    for room in (loads, disturbing):
        monkeypatch.setattr(room, "LOOK_S", 0.02)
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 100, str(out))), named_process(out, 1, "cpu"):
        log = LineLog(out / "steps.jsonl")
        steps = iter(range(100))
        monkeypatch.setattr(disturbing, "last_step", lambda folder: next(steps))
        assert run(["disturb", str(out), "--slow", "1=1.5", "--steps", "8"]) == 0
        log.close()
    assert pids and not any(Path(f"/proc/{pid}").exists() for pid in pids) and next(steps) < 30
    begun, ended = read_events(out)
    assert (begun.event, begun.factor, ended.factor) == ("disturbed", 1.5, 1.0) and ended.step - begun.step >= 6
    assert re.fullmatch(r"rank 1 is no longer slowed down(; it took [0-9.]+ times as long as before)?", ended.text)


def test_a_rank_on_a_gpu_is_asked_to_keep_it_busy_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """No process is started beside it, and nothing of the request stays."""
    out, asked = tmp_path / "run", []
    steps = iter(range(100))

    def look(folder: Path) -> int:
        for path in (folder / "loads").glob("1-*.json"):
            asked.append(msgspec.json.decode(path.read_bytes(), type=LoadRequest))
            report_path(path).write_bytes(msgspec.json.encode(LoadReport(0.3, 1.47)))
        return next(steps)

    for room in (loads, disturbing):
        monkeypatch.setattr(room, "LOOK_S", 0.001)
    monkeypatch.setattr(disturbing, "last_step", look)
    monkeypatch.delattr(loads, "Burners")
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 100, str(out))), named_process(out, 1, "cuda:0"):
        assert run(["disturb", str(out), "--slow", "1=1.5", "--steps", "8"]) == 0
    assert (asked[0].factor, asked[0].share) == (1.5, 0.0) and asked[0].last == asked[0].first + 7
    assert asked[0].asker.pid == os.getpid() and not (out / "loads").exists()
    assert "rank 1 is no longer slowed down; it took 1.47 times as long as before" in capsys.readouterr().out
    assert [(event.factor, event.before) for event in read_events(out)] == [(1.5, None), (1.0, 1.47)]


def test_ctrl_c_ends_burners_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, started = tmp_path / "run", []

    class Interrupted(loads.Burners):
        @property
        def failed(self) -> bool:
            started.extend(self.pids)
            raise KeyboardInterrupt

    monkeypatch.setattr(loads, "Burners", Interrupted)
    for room in (loads, disturbing):
        monkeypatch.setattr(room, "LOOK_S", 0.02)
    steps = iter(range(100))
    monkeypatch.setattr(disturbing, "last_step", lambda folder: next(steps))
    with own_folder(TrainRequest(plan_for(tmp_path), str(tmp_path), 100, str(out))), named_process(out, 1, "cpu"):
        assert run(["disturb", str(out), "--slow", "1=1.5"]) == 130
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)
    assert [event.factor for event in read_events(out)] == [1.5, 1.0]
