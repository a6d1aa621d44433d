"""How quickly the report opens, pans and zooms, and how large it is: headless Chromium, best of `--times`.

    python benchmarks/report.py [--times 3] [--only "run, 64"]

    plan, 16 × 128                          a simulated plan: 16 devices, 128 micro-batches
    run, 64 × 2,000                         measured spans of 64 ranks
    run, 1,024 × 2,000                      the same of 1,024 ranks, written to disk as well
    100,000 steps, 2,000 choices            curves, and points of a chart
    watch                                   what `penstock watch` takes of a core while a run of 64 ranks writes nothing, and a page listens

Opening is the time from asking for the file until all views are drawn; frames are drawn one after the other while the view moves from one
end to the other at several zooms, and read back so that the time is that of drawing. Needs Chromium and playwright.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np

from penstock.reports.blocks import Block, ChartLine, Charts, Scatter, SpanKind, Subject, View
from penstock.reports.document import document
from penstock.reports.live import LivePage, serve
from penstock.reports.plan_views import execution_spans
from penstock.reports.span_lanes import SpanLanes
from penstock.schedules.rules import schedule_of
from penstock.timing.execution import execute
from penstock.timing.workload import workload_of

FRAMES = 40
PANNED = """async (zoom) => {
    const { view, draw } = document.querySelector("#timeline figure").timeline, canvas = document.querySelector("canvas.timeline");
    const whole = view.high - view.low, span = whole / zoom, times = [];
    for (let frame = 0; frame < FRAMES; frame++) {
        view.from = view.low + (whole - span) * frame / FRAMES;
        view.to = view.from + span;
        const begun = performance.now();
        draw();
        canvas.getContext("2d").getImageData(0, 0, 1, 1);
        times.push(performance.now() - begun);
        await new Promise(requestAnimationFrame);
    }
    return times;
}""".replace("FRAMES", str(FRAMES))
REDRAWN = """async () => {
    const times = [], figures = [...document.querySelectorAll("figure")].filter((one) => one.redraw);
    for (let frame = 0; frame < FRAMES; frame++) {
        const begun = performance.now();
        figures.forEach((one) => one.redraw());
        times.push(performance.now() - begun);
        await new Promise(requestAnimationFrame);
    }
    return times;
}""".replace("FRAMES", str(FRAMES))


def a_plan() -> list[tuple[str, Block]]:
    """One simulated iteration with memory."""
    rng = np.random.default_rng(0)
    work = workload_of(0.01 * (1 + rng.random((2, 16, 128))), 0.001, contention="pair", stored_bytes=2**28, limit_bytes=2**36)
    names = [f"device {number}" for number in range(16)]
    return [("timeline", execution_spans(execute(schedule_of("1f1b", 16, 128), work), names, "a plan"))]


def a_run(ranks: int, instructions: int = 2000) -> list[tuple[str, Block]]:
    """Receive, forward, send and backward of many micro-batches, each rank with times of its own."""
    rng, lanes = np.random.default_rng(0), SpanLanes()
    kinds = np.array([lanes.kind(name, SpanKind(name, letter, colour)) for name, letter, colour in (
        ("ReceiveWait", "wait", "wait"), ("Forward", "F", "forward"), ("SendStart", "send", "transfer"), ("Backward", "B", "backward"))])
    for rank in range(ranks):
        usual = np.tile([400e3, 9e6, 150e3, 18e6], instructions // 4)
        length = np.maximum(20e3, usual * (1 + 0.02 * rng.standard_normal(instructions))).astype(np.int64)
        gap = (np.abs(rng.normal(60e3, 30e3, instructions)) + 20e3).astype(np.int64)
        end = np.cumsum(length + gap)
        micro_batch = np.repeat(np.arange(instructions // 4), 4)
        lanes.add_arrays(f"rank {rank}", f"device {rank // 8}", "measured", end - length, end, np.tile(kinds, instructions // 4),
                         np.full(instructions, rank // 8), micro_batch)
    return [("timeline", lanes.block("a run"))]


def many_steps() -> list[tuple[str, Block]]:
    """Curves of a long run, and choices of nodes."""
    rng, steps = np.random.default_rng(0), np.arange(100_000)
    loss = 10 * np.exp(-steps / 2e4) + 0.1 * rng.standard_normal(len(steps))
    lines = [ChartLine(name, "number", values) for name, values in (
        ("loss", loss), ("tokens/s", 1e5 * (1 + 0.01 * rng.standard_normal(len(steps)))), ("MFU", 0.4 + 0.01 * rng.random(len(steps))))]
    points = tuple((float(hours), float(usd), float(devices)) for hours, usd, devices in rng.random((2000, 3)) + 0.1)
    names = tuple(f"choice {number}" for number in range(len(points)))
    choices = Scatter("choices", ("hours", "USD", "devices"), ("number", "usd", "number"), names, points)
    return [("run", Charts("steps", "step", steps, tuple((line,) for line in lines))), ("pareto", choices)]


CASES: dict[str, tuple[Callable[[], list[tuple[str, Block]]], tuple[float, float, float]]] = {
    "plan, 16 × 128": (a_plan, (0.5, 50, 0.4)),
    "run, 64 × 2,000": (lambda: a_run(64), (0.7, 50, 1.0)),
    "run, 1,024 × 2,000": (lambda: a_run(1024), (2.0, 30, 8.0)),
    "100,000 steps, 2,000 choices": (many_steps, (1.0, 30, 4.0)),
}
"""With what is to be reached: seconds to open, frames a second, megabytes."""


def opened(browser: Any, path: Path) -> tuple[float, float]:
    """Seconds until everything is drawn, and the median time of a frame in milliseconds."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    begun = time.perf_counter()
    page.goto(path.as_uri())
    page.wait_for_selector("body[data-ready]", state="attached", timeout=120_000)
    took_s = time.perf_counter() - begun
    if page.query_selector("canvas.timeline") is not None:
        frames = [statistics.median(page.evaluate(PANNED, zoom)) for zoom in (1, 4, 20, 200)]
    else:
        frames = [statistics.median(page.evaluate(REDRAWN))]
    page.close()
    return took_s, statistics.median(frames)


def watched(seconds: float = 20.0, ranks: int = 64) -> float:
    """The share of a core that a server takes while somebody listens and nothing changes."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plan.json", "steps.jsonl", *(f"rank-{rank:05d}.spans" for rank in range(ranks))):
            (Path(folder) / name).write_text("{}\n", encoding="utf-8")
        page, stop, told = LivePage(Path(folder)), Event(), list[str]()
        thread = Thread(target=serve, args=(page, 0, told.append, stop), daemon=True)
        thread.start()
        while not told:
            time.sleep(0.05)
        listener = urllib.request.urlopen(f"{told[0]}events", timeout=60)
        before, begun = os.times(), time.perf_counter()
        time.sleep(seconds)
        after, took_s = os.times(), time.perf_counter() - begun
        stop.set()
        listener.close()
        thread.join(30)
    return (after.user + after.system - before.user - before.system) / took_s


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=3, help="how often each page is opened; the best counts")
    parser.add_argument("--only", default="", help="only cases whose name holds this")
    given = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        raise SystemExit("there is no Chromium on this machine")
    print(f"{'page':<30} {'opens in':>9} {'wanted':>7} {'frames/s':>9} {'wanted':>7} {'MB':>6} {'wanted':>7} {'written in':>11}")
    if given.only in "watch":
        print(f"watch: {watched():.2%} of a core while nothing changes; wanted: at most 1 %", flush=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (make, (open_s, fps, size_mb)) in CASES.items():
            if given.only not in name:
                continue
            blocks, begun = make(), time.perf_counter()
            subject = Subject("run", name, tuple(View(view, view.title(), [block]) for view, block in blocks))
            path = Path(folder) / "report.html"
            path.write_text(document(name, [subject], []), encoding="utf-8")
            written_s = time.perf_counter() - begun
            best_s, best_ms = math.inf, math.inf
            for _ in range(given.times):
                took_s, frame_ms = opened(browser, path)
                best_s, best_ms = min(best_s, took_s), min(best_ms, frame_ms)
            mb = path.stat().st_size / 1e6
            reached = f"{best_s:>7.2f} s {open_s:>5.1f} s {1000 / best_ms:>9.0f} {fps:>7.0f} {mb:>6.2f} {size_mb:>7.1f} {written_s:>9.1f} s"
            print(f"{name:<30} {reached}", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
