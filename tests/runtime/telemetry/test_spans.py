"""Spans: nothing is lost but what is counted as lost, killed files can be read, clocks are put together, traces are whole."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from counted_work import counted_calls
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

from penstock.errors import InputError
from penstock.programs.instructions import (
    INSTRUCTIONS,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Free,
    Instruction,
    Load,
    Place,
    Program,
    ReceiveStart,
    ReceiveWait,
    ReduceStart,
    ReduceWait,
    SendStart,
    SendWait,
    Step,
    StepStage,
    SyncTied,
)
from penstock.runtime.executor import Executor
from penstock.runtime.telemetry.spans import COMPUTE, KINDS, NO_STAGE, RECORD, TRANSFER, WAIT, SpanRecorder
from penstock.runtime.telemetry.spans_reader import RankSpans, SpanFile, aligned, iteration_shares, read_run, read_spans
from penstock.runtime.telemetry.spans_trace import PredictedSpan, predicted_spans, trace_events, write_trace
from penstock.schedules.actions import parse_schedule
from penstock.timing.execution import execute
from penstock.timing.simulator import simulate
from penstock.timing.workload import workload_of

F = KINDS["Forward"]


@given(st.lists(st.tuples(st.integers(1, 14), st.integers(0, 2), st.integers(0, 65535), st.integers(-1, 2**31 - 1),
                          st.integers(0, 2**62), st.integers(0, 2**62)), max_size=40))  # fmt: skip
def test_what_goes_in_comes_out(rows: list[tuple[int, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        recorder = SpanRecorder(Path(folder) / "a.spans", rank=3, capacity=64)
        for row in rows:
            recorder.record(*row)
        recorder.close()
        found = read_spans(Path(folder) / "a.spans")
    assert [tuple(row) for row in found.spans.tolist()] == rows
    assert found.rank == 3 and found.num_lost == 0 and found.kinds[F] == "Forward" and len(found.kinds) == len(INSTRUCTIONS)


def test_a_full_ring_drops_and_counts(tmp_path: Path) -> None:
    """Far faster than the writer: every span is in the file or counted, and those there are in order."""
    recorder = SpanRecorder(tmp_path / "a.spans", capacity=100)
    count = 0
    while recorder._tail <= 200 or not recorder.dropped:  # so long that the writer was round twice
        for _ in range(70):
            recorder.record(F, COMPUTE, 1, count, count, count + 1)
            count += 1
    recorder.close()
    found = read_spans(tmp_path / "a.spans")
    assert found.num_lost == recorder.dropped > 0 and len(found.spans) + found.num_lost == count
    assert (np.diff(found.spans["micro_batch"]) > 0).all() and len(found.spans) > 200  # more than once around


def test_the_ring_goes_round(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "a.spans", capacity=16)
    for number in range(200):
        while number - recorder._tail >= 16:
            recorder._flush()
        recorder.record(F, WAIT, 0, number, 0, 0)
    recorder.close()
    assert read_spans(tmp_path / "a.spans").spans["micro_batch"].tolist() == list(range(200))


KILLED = """
import sys, time
from penstock.runtime.telemetry.spans import SpanRecorder
recorder = SpanRecorder(sys.argv[1])
number = 0
print("ready", flush=True)
while True:
    recorder.record(2, 0, 1, number, number, number)
    number += 1
    time.sleep(1e-5)
"""


def test_a_file_that_grows_is_read_on_and_one_that_began_anew_from_the_start(tmp_path: Path) -> None:
    """Half a record is left for the next reading."""
    path, rows = tmp_path / "rank-0.spans", np.array([(1, COMPUTE, 0, n, 10 * n, 10 * n + 5) for n in range(6)], RECORD)
    head = b'{"format": "penstock spans", "version": 1, "rank": 3, "pid": %d, "kinds": {"Forward": 1}}\n'
    whole, growing = rows.tobytes(), SpanFile(path)
    for count in (0, 60, 100, len(whole)):
        path.write_bytes(head % 1 + whole[:count])
        assert growing.read().spans.tolist() == rows[: count // RECORD.itemsize].tolist() == read_spans(path).spans.tolist()
    path.write_bytes(head % 2 + rows[::-1].tobytes())
    assert growing.read().spans.tolist() == rows[::-1].tolist()
    path.write_bytes(head % 2 + whole[: RECORD.itemsize])
    assert growing.read().spans.tolist() == rows[:1].tolist()


def test_a_killed_rank_leaves_a_readable_file(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "a.spans")], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        while not (tmp_path / "a.spans").exists() or (tmp_path / "a.spans").stat().st_size < 20_000:
            time.sleep(0.01)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    numbers = read_spans(tmp_path / "a.spans").spans["micro_batch"].tolist()
    assert len(numbers) > 100 and numbers == list(range(len(numbers)))
    with open(tmp_path / "a.spans", "ab") as file:
        file.write(b"\x02\x00\x01")  # as if killed within a record
    assert len(read_spans(tmp_path / "a.spans").spans) == len(numbers)


def program(*steps: Instruction, iteration: int = 0) -> Program:
    return Program(0, iteration, 0, 1, 2, 1, 1, (Place(0, 0, 1, 0, 1, 1, 1, 1),), (), steps)


ALL: list[tuple[Instruction, tuple[int, int, int]]] = [
    (Load(0, 3, 0), (COMPUTE, 0, 3)),
    (Forward(1, 4, 0, 0), (COMPUTE, 1, 4)),
    (Backward(1, 4), (COMPUTE, 1, 4)),
    (BackwardInput(2, 5), (COMPUTE, 2, 5)),
    (BackwardWeight(2, 6), (COMPUTE, 2, 6)),
    (SendStart("activation", 7, 8, 1, 0, ()), (TRANSFER, 7, 8)),
    (SendWait("activation", 7, 8, 1), (WAIT, 7, 8)),
    (ReceiveStart("gradient", 7, 9, 1, 0, ()), (TRANSFER, 7, 9)),
    (ReceiveWait("gradient", 7, 9, 1), (WAIT, 7, 9)),
    (Free((1,)), (COMPUTE, NO_STAGE, -1)),
    (ReduceStart(1, (), None), (TRANSFER, 1, -1)),
    (ReduceStart(1, (), 2), (TRANSFER, 1, 2)),
    (ReduceWait(1), (WAIT, 1, -1)),
    (SyncTied("embedding"), (TRANSFER, NO_STAGE, -1)),
    (Step(), (COMPUTE, NO_STAGE, -1)),
    (StepStage(2, 3), (COMPUTE, 2, 3)),
]


def test_every_instruction_has_a_span(tmp_path: Path) -> None:
    assert {type(step) for step, _ in ALL} == set(INSTRUCTIONS)
    recorder = SpanRecorder(tmp_path / "a.spans")
    recorder.begin(program(*(step for step, _ in ALL), iteration=41))
    for index in range(len(ALL)):
        recorder.at(index)
        recorder.done(index, 100 + index, 200 + index)
    assert recorder.busy_ns(0).tolist() == [800, 300, 500]
    assert recorder.busy_ns(recorder.position - 1).tolist() == [100, 0, 0]
    recorder.close()
    found = read_spans(tmp_path / "a.spans")
    for row, (step, (category, stage, micro_batch)) in zip(found.spans, ALL, strict=True):
        assert found.kinds[row["kind"]] == type(step).__name__
        assert (row["category"], row["stage"], row["micro_batch"]) == (category, stage, micro_batch)
    assert list(found.iterations) == [41]


def test_what_the_ring_has_no_more_is_not_counted_again(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "a.spans", capacity=4)
    for number in range(7):
        while recorder.position - recorder._tail >= 4:
            time.sleep(0.01)
        recorder.record(F, COMPUTE, 0, number, 0, 10**number)
    assert recorder.busy_ns(0).tolist() == [1_111_000, 0, 0] and recorder.busy_ns(5).tolist() == [1_100_000, 0, 0]
    recorder.close()


def test_it_observes_an_executor(tmp_path: Path) -> None:
    recorder = SpanRecorder(tmp_path / "a.spans")
    executor = Executor(recorder)
    for kind in INSTRUCTIONS:
        executor.register(kind, lambda step: time.sleep(1e-3) if isinstance(step, Forward) else None)
    for iteration in (3, 4):
        executor.run(program(*(step for step, _ in ALL), iteration=iteration))
    recorder.close()
    found = read_spans(tmp_path / "a.spans")
    assert len(found.spans) == 2 * len(ALL) and list(found.iterations) == [3, 4]
    assert [found.kinds[span["kind"]] for span in found.of_iteration(4)] == [type(step).__name__ for step, _ in ALL]
    lengths = found.spans["end_ns"] - found.spans["start_ns"]
    assert (lengths[found.spans["kind"] == F] > 900_000).all()
    assert (found.spans["start_ns"][1:] >= found.spans["end_ns"][:-1]).all()


def test_a_span_costs_a_few_calls(tmp_path: Path) -> None:
    """Its own, that of the ring and that which packs it: half a microsecond."""
    count = 1000
    recorder = SpanRecorder(tmp_path / "a.spans", capacity=2 * count)
    recorder.begin(program(*(Forward(1, number, 0, 0) for number in range(count))))

    def all_done() -> None:
        for index in range(count):
            recorder.done(index, 0, 0)

    calls = counted_calls(all_done)
    recorder.close()
    assert recorder.dropped == 0 and calls < 3.1 * count


def ranks_with_clocks(offset_ns: int, drift: float) -> tuple[RankSpans, RankSpans, np.ndarray]:
    """Rank 1 does what rank 0 does at the same true time, but its clock is off and runs fast."""
    true = np.arange(0, 3_600_000_000_000, 60_000_000_000)
    clock = lambda t: (t * (1 + drift)).astype(np.int64) + offset_ns  # noqa: E731
    jitter = np.random.default_rng(0).integers(0, 20_000, (2, len(true), 5))

    def rank(number: int, times: np.ndarray, noise: np.ndarray) -> RankSpans:
        spans = np.zeros(len(times), RECORD)
        spans["start_ns"], spans["end_ns"], spans["kind"] = times, times + 1000, F
        syncs = {i: (t + noise[i]).tolist() for i, t in enumerate(times)}
        return RankSpans(number, {F: "Forward"}, spans, {0: int(times[0])}, syncs)

    return rank(0, true, jitter[0]), rank(1, clock(true), jitter[1]), true


@pytest.mark.parametrize(("offset_ns", "drift"), [(0, 0.0), (5 * 10**17, 0.0), (-(10**15), 2e-5), (123, -1e-4)])
def test_clocks_are_compared_at_barriers(offset_ns: int, drift: float) -> None:
    first, second, true = ranks_with_clocks(offset_ns, drift)
    found = aligned([first, second])
    assert found[0] is first
    assert np.abs(found[1].spans["start_ns"] - true).max() < 20_000  # what the barriers themselves are off by
    assert abs(found[1].iterations[0] - first.iterations[0]) < 20_000


def test_without_barriers_clocks_stay(tmp_path: Path) -> None:
    first, second, _ = ranks_with_clocks(77, 0.0)
    lone = RankSpans(1, second.kinds, second.spans, second.iterations, {})
    assert aligned([first, lone])[1] is lone


def test_ranks_of_one_machine_share_a_clock() -> None:
    """Nothing is moved by what a barrier is off by."""
    first, second, _ = ranks_with_clocks(5000, 0.0)
    same = [replace(one, clock="a boot") for one in (first, second)]
    assert aligned(same)[1] is same[1]
    assert aligned([same[0], replace(second, clock="another")])[1].spans["start_ns"][0] != second.spans["start_ns"][0]


def test_evaluations_belong_to_no_iteration(tmp_path: Path) -> None:
    """Their programs are numbered from 0 again, and run between two iterations."""
    recorder = SpanRecorder(tmp_path / "a.spans")
    for training, iteration in ((True, 0), (False, 0), (False, 1), (True, 1)):
        recorder.begin(replace_struct(program(iteration=iteration), training=training))
        now = time.perf_counter_ns()
        recorder.record(F, COMPUTE, 0, iteration if training else 70, now, now + 1)
    recorder.close()
    found = read_spans(tmp_path / "a.spans")
    assert [found.of_iteration(number)["micro_batch"].tolist() for number in (0, 1)] == [[0], [1]]
    assert len(found.evaluations) == 2 and found.clock
    assert found.only([1]).spans["micro_batch"].tolist() == [1] and list(found.only([1, 9]).iterations) == [1]


def recorded(folder: Path) -> list[RankSpans]:
    for rank in range(2):
        recorder = SpanRecorder(folder / f"rank-{rank}.spans", rank)
        recorder.mark_sync(0)
        for iteration in range(2):
            recorder.begin(program(iteration=iteration))
            begin = time.perf_counter_ns()
            recorder.record(F, COMPUTE, rank, 0, begin, begin + 6000)
            recorder.record(KINDS["ReceiveWait"], WAIT, rank, 1, begin + 6000, begin + 8000)
            recorder.record(KINDS["SendStart"], TRANSFER, rank, 1, begin + 8000, begin + 10_000)
            time.sleep(1e-3)
        recorder.close()
    return read_run(folder)


def test_iterations_and_their_shares(tmp_path: Path) -> None:
    ranks = recorded(tmp_path)
    assert [one.rank for one in ranks] == [0, 1] and [len(one.of_iteration(1)) for one in ranks] == [3, 3]
    for one in ranks:
        assert iteration_shares(one, 0) == pytest.approx([0.6, 0.2, 0.2])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_shows_both(name: str, tmp_path: Path) -> None:
    ranks = recorded(tmp_path)
    guesses = {1: [PredictedSpan("F0", 0.0, 5e-6), PredictedSpan("send 0", 5e-6, 6e-6, "transfer")]}
    write_trace(tmp_path / name, ranks, {0: guesses, 1: guesses})
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {0: "rank 0", 2: "rank 1", 3: "rank 1 predicted"}
    spans = [event for event in trace if event["ph"] == "X"]
    assert len(spans) == 2 * 2 * 3 + 2 * 2 and all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)
    assert sum(event["ph"] == "i" for event in trace) == 4
    first = next(event for event in spans if event["pid"] == 2)
    assert first["name"] == "F0" and first["dur"] == 6.0 and first["args"] == {"kind": "Forward", "stage": 1, "micro_batch": 0}
    begins = [event["ts"] for event in trace if event["ph"] == "i" and event["pid"] == 0]  # rank 0 was the first to begin
    assert [event["ts"] for event in spans if event["pid"] == 3 and event["name"] == "F0"] == begins
    assert list(trace_events([])) == []


def test_a_trace_is_the_same_whenever_its_machine_was_started(tmp_path: Path) -> None:
    ranks, late = recorded(tmp_path), []
    for one in ranks:
        spans = one.spans.copy()
        for name in ("start_ns", "end_ns"):
            spans[name] += 10**15
        late.append(replace(one, spans=spans, iterations={step: begin + 10**15 for step, begin in one.iterations.items()}))
    assert list(trace_events(late)) == list(trace_events(ranks))


def test_predictions_that_touch_share_a_lane(tmp_path: Path) -> None:
    guesses = {1: [PredictedSpan(f"F{number}", number * 1e-6, (number + 1) * 1e-6) for number in range(3)]}
    trace = list(trace_events(recorded(tmp_path), {0: guesses}))
    assert [event["tid"] for event in trace if event["pid"] == 3 and event["name"] == "thread_name"] == [0]


def test_predictions_that_overlap_get_lanes(tmp_path: Path) -> None:
    """Two transfers at once, and iterations of a millisecond that were expected to take a second."""
    guesses = {1: [PredictedSpan("F0", 0.0, 1.0), PredictedSpan("a", 0.0, 0.5, "transfer"), PredictedSpan("b", 0.25, 0.75, "transfer")]}
    trace = [event for event in trace_events(recorded(tmp_path), {0: guesses, 1: guesses}) if event["pid"] == 3]
    tracks = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    assert list(tracks.values()) == ["compute", "compute", *["transfer"] * 4]
    assert {(event["name"], tracks[event["tid"]]) for event in trace if event["ph"] == "X"} == {
        ("F0", "compute"), ("a", "transfer"), ("b", "transfer")}  # fmt: skip
    assert len({event["tid"] for event in trace if event["ph"] == "X"}) == 6


def test_the_simulated_schedule_as_spans() -> None:
    """Two stages, one micro-batch: F0 for 1 s, sent in 0.5 s, F0 and B0 on the other, gradient back, B0, then gradients summed."""
    schedule = parse_schedule("0F0 0B0\n1F0 1B0")
    durations = np.array([[[1.0], [1.0]], [[2.0], [2.0]]])
    transfers = np.array([[[0.5]], [[0.25]]])
    assert [(span.name, span.start_s, span.end_s, span.stage) for span in predicted_spans(simulate(schedule, durations, transfers), 1)] == [
        ("F0", 1.5, 2.5, 1), ("B0", 2.5, 4.5, 1)]  # fmt: skip
    whole = execute(schedule, workload_of(durations, transfers, after_s=np.array([0.125, 0.0])))
    assert [(span.name, span.start_s, span.end_s, span.track) for span in predicted_spans(whole, 0)] == [
        ("F0", 0.0, 1.0, "compute"), ("B0", 4.75, 6.75, "compute"), ("activation 0", 1.0, 1.5, "transfer"),
        ("reduce", 6.75, 6.875, "transfer")]  # fmt: skip
    assert ("gradient 0", 4.5, 4.75) in [(span.name, span.start_s, span.end_s) for span in predicted_spans(whole, 1)]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "is no span file"),
        (b"\x00" * 100, "is no span file"),
        (b"[]\n", "is no span file"),
        (b'{"format": "other", "version": 1}\n', "'other' version 1"),
        (b'{"format": "penstock spans", "version": 1, "rank": 0}\n', "is no span file"),
        (b"{" * 70_000, "is no span file"),
    ],
)
def test_other_files_are_refused(data: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "x.spans").write_bytes(data)
    with pytest.raises(InputError, match=told):
        read_spans(tmp_path / "x.spans")


def test_absent_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_spans(tmp_path / "none")
    with pytest.raises(InputError, match="holds no span files"):
        read_run(tmp_path)
    with pytest.raises(InputError, match="cannot be written"):
        SpanRecorder("/proc/none/x")


def test_a_full_disk_stops_the_file_not_the_training(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    path = tmp_path / "a.spans"
    recorder = SpanRecorder(path)
    with open("/dev/full", "wb", buffering=0) as full:
        own, recorder._file = recorder._file, full
        recorder.record(F, COMPUTE, 0, 0, 0, 0)
        recorder._flush()
        recorder._file = own
    assert recorder.error is not None and recorder._tail == 1
    recorder.record(F, COMPUTE, 0, 0, 0, 0)
    recorder.close()
    assert len(read_spans(path).spans) == 0
