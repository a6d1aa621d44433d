"""Records of steps and devices: written without waiting, read back, and quietly absent where a library is."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from full_disk import small_files
from standins import pynvml

from penstock.errors import InputError
from penstock.models.micro_batch import MicroBatch
from penstock.runtime.telemetry.nvml import DeviceLog, DeviceSample, Nvml, NvmlMissing, open_nvml
from penstock.runtime.telemetry.steps import LineLog, StepRecord, open_lines, padding_share, read_lines, read_steps
from penstock.runtime.telemetry.tensorboard import tensorboard_sink


def test_steps_there_and_back(tmp_path: Path) -> None:
    records = [StepRecord(step, loss=5.0 / step, tokens=100 * step, bubble_share=0.25) for step in range(1, 30)]
    log = LineLog(tmp_path / "deep" / "steps.jsonl")
    for record in records:
        log.write(record)
    log.close()
    assert read_steps(tmp_path / "deep" / "steps.jsonl") == records
    first = json.loads((tmp_path / "deep" / "steps.jsonl").read_text().splitlines()[0])
    assert first == {"step": 1, "loss": 5.0, "tokens": 100, "bubble_share": 0.25}


def test_what_was_padding() -> None:
    padded, packed = MicroBatch(0, (1, 2), "padded", (6, 10), (), 10), MicroBatch(1, (3,), "packed", (4,))
    assert padding_share([padded, packed]) == pytest.approx(4 / 24) and padding_share([MicroBatch(0, (1, 2), "padded")]) is None


def test_a_run_that_went_on(tmp_path: Path) -> None:
    """Killed within a line, restarted from step 2."""
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step":1,"loss":3.0}\n{"step":2,"loss":2.0}\n{"step":3,"loss":1.5}\n')
    log = LineLog(path)
    log.write(StepRecord(3, loss=1.25))
    log.close()
    assert [(record.step, record.loss) for record in read_steps(path)] == [(1, 3.0), (2, 2.0), (3, 1.25)]
    with path.open("a") as file:
        file.write('{"step":4,"lo')
    assert len(read_steps(path)) == 3
    path.write_text('{"step":1,"later_field":3}\n')
    assert read_steps(path) == [StepRecord(1)]
    path.write_text('{"step":1}\nnothing\n')
    with pytest.raises(InputError, match="line 2"):
        read_steps(path)
    with pytest.raises(InputError, match="does not exist"):
        read_steps(tmp_path / "none")


@pytest.mark.parametrize("tail_bytes", [5, 1000])
@pytest.mark.parametrize("whole", ["", '{"step":1}\n{"step":2}\n'])
def test_half_a_line_is_no_part_of_the_next(whole: str, tail_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any reader of JSON lines, however often it happens, and however little of the file is read at a time."""
    monkeypatch.setattr("penstock.runtime.telemetry.steps._TAIL_BYTES", tail_bytes)
    path, steps = tmp_path / "steps.jsonl", [1, 2] if whole else []
    path.write_text(whole)
    for step in (3, 4):
        with path.open("a") as file:
            file.write('{"step":3,"lo')
        for _ in range(2):  # the first is killed before it writes anything
            log = LineLog(path)
        log.write(StepRecord(step))
        log.close()
        steps.append(step)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [one.step for one in read_steps(path)] == steps


def test_a_line_that_another_process_is_writing_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "steps.jsonl", (tmp_path / "steps.jsonl").open("ab", buffering=0)
    other.write(b'{"step":1}\n{"step":')
    monkeypatch.setattr("penstock.runtime.telemetry.steps.time.sleep", lambda _: other.write(b"2}\n"))
    with other, open_lines(path) as file:
        file.write(b'{"step":3}\n')
    assert [one.step for one in read_steps(path)] == [1, 2, 3]


def test_a_run_that_begins_anew_has_no_steps_of_the_one_before(tmp_path: Path) -> None:
    for step, anew in ((1, False), (2, False), (3, True)):
        log = LineLog(tmp_path / "steps.jsonl", anew=anew)
        log.write(StepRecord(step))
        log.close()
        assert [one.step for one in read_steps(tmp_path / "steps.jsonl")] == {1: [1], 2: [1, 2], 3: [3]}[step]


def test_what_is_not_a_number_is_left_out(tmp_path: Path) -> None:
    log = LineLog(tmp_path / "s.jsonl")
    log.write(StepRecord(1, loss=math.nan, gradient_norm=math.inf, time_s=1.0))
    log.close()
    assert (tmp_path / "s.jsonl").read_text() == '{"step":1,"time_s":1.0}\n'


def test_writing_never_waits(tmp_path: Path) -> None:
    """A sink that hangs holds up the thread, not the one who writes, who would else never come to open the gate; one that fails is
    remembered."""
    gate = threading.Event()
    passed: list[object] = []
    log = LineLog(tmp_path / "s.jsonl", lambda record: (gate.wait(), passed.append(record))[1])  # type: ignore[func-returns-value]
    for step in range(1000):
        log.write(StepRecord(step))
    assert not passed
    gate.set()
    log.close()
    assert len(read_steps(tmp_path / "s.jsonl")) == 1000 and log.error is None

    def fail(record: object) -> None:
        raise RuntimeError("no more")

    log = LineLog(tmp_path / "t.jsonl", fail)
    log.write(StepRecord(1))
    log.write(StepRecord(2))
    log.close()
    assert str(log.error) == "no more" and len(read_steps(tmp_path / "t.jsonl")) == 1
    with pytest.raises(InputError, match="cannot be written"):
        LineLog("/proc/none/x")


WITHOUT = """
import sys
sys.modules["tensorboard"] = None
sys.modules["pynvml"] = None
from penstock.runtime.telemetry.nvml import NvmlMissing, open_nvml
from penstock.runtime.telemetry.tensorboard import tensorboard_sink
assert tensorboard_sink(sys.argv[1]) is None
try:
    open_nvml("GPU-a")
except NvmlMissing as missing:
    assert "penstock[gpu]" in str(missing)
else:
    raise AssertionError
"""


def test_absent_libraries_are_no_error(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path / "tb")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "tb").exists()


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = tensorboard_sink(tmp_path)
    assert sink is not None
    sink(StepRecord(1, loss=2.0))
    sink(StepRecord(2, loss=float("nan"), tokens=7))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {name: [(one.step, one.value) for one in events.Scalars(name)] for name in events.Tags()["scalars"]} == {
        "train/loss": [(1, 2.0)], "train/tokens": [(2, 7.0)], "train/skipped": [(1, 0.0), (2, 0.0)],
    }  # fmt: skip


def test_a_full_disk_is_told_to_whoever_writes_for_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on stderr, by a thread that dies of it."""
    pytest.importorskip("tensorboard")
    died = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", died.append)
    sink = tensorboard_sink(tmp_path)
    assert sink is not None
    sink(StepRecord(1, loss=2.0))
    (file,) = tmp_path.iterdir()
    with small_files(file.stat().st_size), pytest.raises(OSError, match="File too large"):
        sink(StepRecord(2, loss=2.0))
    assert not died


def library(**changes: Any) -> Any:
    """What the bindings offer, some of it replaced."""
    return SimpleNamespace(**{**vars(pynvml), **changes})


def test_samples_have_their_units() -> None:
    first, second = Nvml(library(), "GPU-a").sample(), Nvml(library(), "GPU-b").sample()
    assert (first.device, first.utilisation, first.memory_used_bytes) == ("GPU-a", 0.75, 10**9)
    assert (first.sm_clock_hz, first.memory_clock_hz, first.power_w, first.temperature_c) == (1.98e9, 3.201e9, 412.5, 61.0)
    assert (second.device, second.utilisation, second.sm_clock_hz, second.power_w) == ("GPU-b", 0.75, None, None)


def refuse(*_: Any) -> None:
    raise pynvml.NVMLError("not loaded")


def test_why_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlInit=refuse))
    with pytest.raises(NvmlMissing, match=r"no driver \(not loaded\)"):
        open_nvml("GPU-a")
    left: list[bool] = []
    monkeypatch.setitem(sys.modules, "pynvml", library(nvmlShutdown=lambda: left.append(True)))
    with pytest.raises(NvmlMissing, match="does not know device GPU-c"):
        open_nvml("GPU-c")
    assert left == [True]


def test_samples_reach_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library())
    log = DeviceLog("GPU-b", tmp_path / "devices.jsonl", interval_s=0.01)
    while len(list(read_lines(tmp_path / "devices.jsonl", DeviceSample))) < 4:  # until the test's time-out, if they do not come
        time.sleep(0.01)
    log.close()
    found = list(read_lines(tmp_path / "devices.jsonl", DeviceSample))
    assert found[-1] == log.latest and log.latest.device == "GPU-b"  # type: ignore[union-attr]


def test_a_driver_that_hangs_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it waited for, nobody would open the gate."""
    gate, left = threading.Event(), []
    hangs = {"nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=gate.wait()), "nvmlShutdown": lambda: left.append(True)}
    monkeypatch.setitem(sys.modules, "pynvml", library(**hangs))
    monkeypatch.setattr("penstock.runtime.telemetry.nvml._LEAVE_S", 0.1)
    log = DeviceLog("GPU-a", tmp_path / "devices.jsonl")
    assert log.latest is None
    log.close()
    assert not left
    gate.set()


def test_what_was_written_is_in_the_file_once_it_is_flushed(tmp_path: Path) -> None:
    """Whoever goes on from a copy does not tell of the steps before it again."""
    log = LineLog(tmp_path / "s.jsonl")
    for step in range(500):
        log.write(StepRecord(step, 1.0))
    log.flush()
    assert len((tmp_path / "s.jsonl").read_bytes().splitlines()) == 500
    log.close()
