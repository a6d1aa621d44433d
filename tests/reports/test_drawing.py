"""Drawings of timelines: text against a literal, figures that open, traces that a viewer can read."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.reports.drawing import draw_text
from penstock.reports.figure import write_figure
from penstock.reports.shares import shares
from penstock.schedules.orders import one_forward_one_backward
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import Execution, execute
from penstock.timing.simulator import simulate
from penstock.timing.traces import trace_of, write_trace
from penstock.timing.workload import workload_of

PASSES = np.array([[[1.0] * 4] * 3, [[2.0] * 4] * 3])


def example(contention: str = "pair") -> Execution:
    work = workload_of(
        np.ones((4, 3, 5)), 0.75, contention=contention, stored_bytes=2**30, message_bytes=2**28, limit_bytes=2**32, after_s=[0, 1, 2]
    )
    return execute(schedule_of("zero-bubble", 3, 5), work)


def test_text_is_the_picture_in_the_documentation() -> None:
    timeline = simulate(one_forward_one_backward(3, 4), PASSES, np.zeros((2, 2, 4)))
    assert draw_text(timeline, 57) == (
        "0 │F0─F1─F2─            B0════F3─B1════   B2════   B3════\n"
        "1 │   F0─F1─      B0════F2─B1════F3─B2════   B3════\n"
        "2 │      F0─B0════F1─B1════F2─B2════F3─B3════\n"
        "F─ forward, B═ backward; 54 columns = 18 s"
    )
    assert draw_text(timeline, 57, ascii_only=True).isascii()


def test_text_names_stages_where_devices_have_several() -> None:
    timeline = simulate(schedule_of("interleaved", 4, 2, 2), np.ones((2, 4, 2)), np.zeros((2, 3, 2)))
    assert draw_text(timeline, 63).splitlines()[0].startswith("0 │0F0───0F1───2F0───2F1───")


@given(st.integers(0, 2**32 - 1), st.integers(4, 90))
@settings(max_examples=60, deadline=None)
def test_text_keeps_its_width_and_one_row_per_device(seed: int, width: int) -> None:
    numbers = np.random.default_rng(seed)
    stages, count = int(numbers.integers(1, 12)), int(numbers.integers(1, 15))
    timeline = simulate(one_forward_one_backward(stages, count), numbers.random((2, stages, count)), np.zeros((2, stages - 1, count)))
    if width < len(str(stages - 1)) + 3:
        with pytest.raises(InputError, match="too few"):
            draw_text(timeline, width)
        return
    rows = draw_text(timeline, width).splitlines()[:-1]
    assert len(rows) == stages and max(map(len, rows)) <= width


def test_text_of_nothing() -> None:
    timeline = simulate(one_forward_one_backward(2, 1), np.zeros((2, 2, 1)), np.zeros((2, 1, 1)))
    assert draw_text(timeline).splitlines()[:2] == ["0 │", "1 │"]


@pytest.mark.parametrize(("name", "magic"), [("a.svg", b"<?xml"), ("b.PNG", b"\x89PNG"), ("c.pdf", b"%PDF")])
def test_figures_open(tmp_path: Path, name: str, magic: bytes) -> None:
    write_figure(tmp_path / name, example(), title="costs $5 & $6 <b>")
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_figures_repeat_and_hold_every_action(tmp_path: Path) -> None:
    timeline = simulate(one_forward_one_backward(3, 4), PASSES, np.zeros((2, 2, 4)))
    for name in ("a.svg", "b.svg"):
        write_figure(tmp_path / name, timeline)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes() and b"memory" not in drawn
    with pytest.raises(InputError, match=r"must end in one of \.svg"):
        write_figure(tmp_path / "a.jpeg", timeline)


def test_a_large_figure_is_small_and_as_dark_as_devices_are_busy(tmp_path: Path) -> None:
    from matplotlib.image import imread

    work = workload_of(np.full((2, 8, 256), 0.2), 0.8, stored_bytes=2**28, limit_bytes=2**40)
    timeline = execute(one_forward_one_backward(8, 256), work)
    write_figure(tmp_path / "f.svg", timeline)
    write_figure(tmp_path / "f.png", timeline)
    drawn = (tmp_path / "f.svg").read_bytes()
    assert len(drawn) < 1_000_000 and b"limit 1024.0" in drawn  # a far limit is told, and squashes nothing
    pixels = imread(tmp_path / "f.png")[:, :, :3]
    busy = float(timeline.device_busy_s()[0]) / timeline.makespan_s
    row = _row_of_pixels(pixels)
    red = (1 - row[:, 0]) / (1 - 0x00 / 255)  # forward and backward have no red at all
    assert float(red.mean()) == pytest.approx(busy, abs=0.02)


def _row_of_pixels(pixels: Any) -> Any:
    """Inside the frame, a row of pixels through the first device, some below the frame's top edge."""
    grey = (np.ptp(pixels, axis=2) < 0.01) & (pixels[:, :, 0] < 0.7)
    top = int(np.argmax(grey.mean(axis=1) > 0.5))
    edges = np.flatnonzero(grey[top + 12])
    return pixels[top + 12, edges[0] + 2 : edges[-1] - 1]


def test_shares_of_pixels_add_up() -> None:
    starts = np.sort(np.random.default_rng(0).random(500) * 90)
    ends = np.minimum(np.append(starts[1:], 100.0), starts + 0.1)
    found = shares(starts, ends, np.linspace(0, 100, 38))
    assert found.sum() * 100 / 37 == pytest.approx((ends - starts).sum()) and found.min() >= 0 and found.max() <= 1
    assert shares([], [], [0.0, 1.0]).tolist() == [0.0]


def slices(trace: dict[str, Any]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """(process, thread) → sorted (start, end, name), in nanoseconds, of which there are whole ones only."""
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            start, length = round(event["ts"] * 1e3), round(event["dur"] * 1e3)
            assert (start / 1e3, length / 1e3) == (event["ts"], event["dur"])
            found.setdefault((event["pid"], event["tid"]), []).append((start, start + length, event["name"]))
    return {track: sorted(spans) for track, spans in found.items()}


@pytest.mark.parametrize("contention", ["none", "pair", "device"])
def test_traces_hold_everything_and_no_slices_of_a_track_overlap(contention: str) -> None:
    found = example(contention)
    tracks = slices(trace_of(found))
    for spans in tracks.values():
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    names = [name for spans in tracks.values() for *_, name in spans]
    assert sum(name[1] in "FIW" for name in names) == 3 * 3 * 5 and sum("→" in name for name in names) == 2 * 2 * 5
    assert tracks[1, 0][0] == (1.75e9, 2.75e9, "1F0") and max(end for spans in tracks.values() for _, end, _ in spans) == round(
        found.makespan_s * 1e9
    )
    assert [name for *_, name in tracks[2, 1]] == ["stage 2"] and (0, 1) not in tracks
    counters = [event for event in trace_of(found)["traceEvents"] if event["ph"] == "C"]
    assert max(event["args"]["bytes"] for event in counters) == found.peak_bytes.max()


def test_slices_that_touch_do_not_overlap_whatever_their_lengths() -> None:
    work = workload_of(np.random.default_rng(7).random((2, 4, 24)) * 1e-3, 1e-4 / 3, contention="device")
    for spans in slices(trace_of(execute(one_forward_one_backward(4, 24), work))).values():
        assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_traces_are_json_whatever_devices_are_called(tmp_path: Path) -> None:
    names = ['"quoted"\n\\', "h200 <1>\u2028", "\x00"]
    write_trace(tmp_path / "t.json", example(), names)
    write_trace(tmp_path / "t.json.gz", example(), names)
    data = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    assert data == json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    assert [event["args"]["name"] for event in data["traceEvents"] if event["name"] == "process_name"] == names


def test_a_plain_timeline_has_a_trace_too() -> None:
    timeline = simulate(one_forward_one_backward(3, 4), PASSES, np.zeros((2, 2, 4)))
    assert len(slices(trace_of(timeline))) == 3


def test_the_beginning_alone_is_the_first_columns_of_the_whole() -> None:
    timeline = simulate(one_forward_one_backward(3, 4), PASSES, np.zeros((2, 2, 4)))
    whole, beginning = (draw_text(timeline, width, until_s=until_s).splitlines() for width, until_s in ((57, 100.0), (30, 9.0)))
    assert beginning == [*(row[:30].rstrip() for row in whole[:3]), "F─ forward, B═ backward; 27 columns = the first 9 of 18 s"]
    assert whole == draw_text(timeline, 57).splitlines()
