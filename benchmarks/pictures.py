"""The pictures of the documentation, by the commands that anybody would make them with.

  python benchmarks/pictures.py            # writes docs/images/*; those of pages only where there is a Chromium
  python benchmarks/pictures.py --check    # draws the figures anew beside them; status 1 where a committed one differs
  python benchmarks/pictures.py --only schedule

schedule-*.svg eight micro-batches on four stages, in the order of each schedule
pipeline.svg   one batch of samples of many lengths on the four stages that were
               searched for them: micro-batches of unequal shapes, their order, and memory over time
report-*.png   views of `penstock report`: of a search and its plans, of a choice of nodes, of a planned batch, and of a rehearsal
               in which two devices become slow
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
STORY = """
- {rank: 2, factor: 2.5, shape: pulse, from: 6, steps: 6}
- {rank: 0, factor: 2, shape: ramp, from: 14, steps: 10}
"""
VIEWS = {"search": ("stages", "timeline", "candidates", "bound"), "pareto": ("pareto",), "batch": ("batch",), "run": ("devices",)}
"""The views that are pictured of each page."""


def lengths(count: int = 40) -> list[int]:
    """Sample lengths like those of instructions: most are short, some are long; the same each time."""
    return [min(2000, round(60 * 1.8 ** (7 * (number * 0.618 % 1)) / (1 + number % 3))) for number in range(1, count + 1)]


def asked(*arguments: str | int | Path) -> None:
    """A command; what fails ends the script."""
    if status := run([str(one) for one in arguments]):
        raise SystemExit(status)


def draw_schedules(folder: Path, images: Path, names: Sequence[str] = SCHEDULES) -> None:
    """One figure for each schedule."""
    for name in names:
        chunks = {"chunks": 2} if name == "interleaved" else {}
        plan = uniform_plan("gpt-1.3b", "4xa100-40gb", global_batch=8, micro_batch=1, pp=4, schedule=name, **chunks)
        write_plan(folder / f"{name}.json", plan)
        asked("simulate", folder / f"{name}.json", "--figure", images / f"schedule-{name}.svg")


def draw_pipeline(folder: Path, images: Path) -> None:
    """A batch of many lengths on the plan that was searched for it."""
    csv, plan = folder / "lengths.csv", folder / "for-lengths.json"
    csv.write_text("length\n" + "\n".join(map(str, lengths())) + "\n", encoding="utf-8")
    searched = ("--model", "gpt-2.6b", "--cluster", "4xa10g", "--global-batch", len(lengths()), "--lengths", csv, "--top", 1)
    asked("search", *searched, "--out", plan)
    asked("simulate", plan, "--lengths", csv, "--figure", images / "pipeline.svg")
    asked("batch", "--lengths", csv, "--plan", plan, "--out", folder / "batch.json")


def rehearse(folder: Path) -> None:
    """A run of timed devices, of which one is slow for a while and another becomes slower and slower."""
    write_plan(folder / "rehearsed.json", uniform_plan("gpt-1.3b", "4xa100-40gb", global_batch=8, micro_batch=1, pp=4, layout="packed"))
    (folder / "story.yaml").write_text(STORY, encoding="utf-8")
    asked("prepare-data", "bundled", "--train-tokenizer", 2048, "--out", folder / "data")
    steps = ("--steps", 24, "--device", "timed", "--disturb", folder / "story.yaml")
    asked("train", folder / "rehearsed.json", "--data", folder / "data", *steps, "--out", folder / "run")


def draw_pages(folder: Path, images: Path) -> None:
    """Views of pages as a browser shows them; the batch is that of `draw_pipeline`."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        print("there is no Chromium on this machine: pictures of pages stay as they are", file=sys.stderr)
        return
    searched = ("--model", "gpt-2.6b", "--cluster", "4xa10g", "--global-batch", "32", "--baselines", "--top", "4")
    asked("search", *searched, "--out", folder / "plan.json")
    nodes = ("--model", "gpt-350m", "--cluster", "2xg5.12xlarge+2xp3.8xlarge", "--global-batch", "32", "--steps", "10000")
    asked("pareto", *nodes, "--out", folder / "pareto")
    rehearse(folder)
    sources = {"search": "plan.search.json", "pareto": "pareto", "batch": "batch.json", "run": "run"}
    for name, source in sources.items():
        asked("report", folder / source, "--out", folder / f"{name}.html")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, views in VIEWS.items():
            page = browser.new_page(viewport={"width": 1280, "height": 1600}, color_scheme="light")
            page.goto((folder / f"{name}.html").as_uri())
            page.wait_for_selector("body[data-ready]", state="attached")
            if "timeline" in views:
                page.wait_for_selector("#timeline .sums:not(:empty)")
            page.evaluate("() => { document.querySelector('nav').style.position = 'static'; }")  # it would lie over what is pictured
            for view in views:
                page.locator(f"#{view}").screenshot(path=images / f"report-{view}.png")
        browser.close()


PARTS: dict[str, Callable[[Path, Path], None]] = {"schedule": draw_schedules, "pipeline": draw_pipeline, "report": draw_pages}
"""By how the names of their pictures begin; pages show what the pipeline planned."""


def pictures() -> list[str]:
    """The names of all."""
    views = (f"report-{view}.png" for own in VIEWS.values() for view in own)
    return [*(f"schedule-{name}.svg" for name in SCHEDULES), "pipeline.svg", *views]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare; what browsers draw differs with their version, and is left out")
    parser.add_argument("--only", default="", help="only pictures whose names begin so: schedule, pipeline or report (with pipeline)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "images" if given.check else IMAGES
        images.mkdir(exist_ok=True)
        for name, draw in PARTS.items():
            if not (given.check and name == "report") and (given.only in ("", name) or (given.only, name) == ("report", "pipeline")):
                draw(Path(folder), images)
        drawn = sorted(images.iterdir()) if given.check else []
        same = {path.name for path in drawn if (IMAGES / path.name).is_file() and path.read_bytes() == (IMAGES / path.name).read_bytes()}
        stale = [path.name for path in drawn if path.name not in same]
    for name in stale:
        print(f"docs/images/{name} is not what the commands draw now: run python benchmarks/pictures.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
