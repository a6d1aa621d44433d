"""The pictures of the documentation, by the commands that anybody would make them with.

  python benchmarks/pictures.py      # writes docs/images/*

pipeline.svg   one batch of samples of many lengths on the four stages that were
               searched for them: micro-batches of unequal shapes, their order, and memory over time
schedule-*.svg eight micro-batches on four stages, in the order of each schedule
report-*.png   views of `penstock report`, of the same plan and of the search that found it (only where there is a Chromium)
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def lengths(count: int = 40) -> list[int]:
    """Sample lengths like those of instructions: most are short, some are long; the same each time."""
    return [min(2000, round(60 * 1.8 ** (7 * (number * 0.618 % 1)) / (1 + number % 3))) for number in range(1, count + 1)]


def draw_schedules(folder: Path) -> int:
    """One figure for each schedule; the status of the first command that failed."""
    for name in ("gpipe", "1f1b", "interleaved", "zero-bubble"):
        chunks = {"chunks": 2} if name == "interleaved" else {}
        plan = uniform_plan("gpt-1.3b", "4xa100-40gb", global_batch=8, micro_batch=1, pp=4, schedule=name, **chunks)
        write_plan(folder / f"{name}.json", plan)
        if status := run(["simulate", str(folder / f"{name}.json"), "--figure", str(IMAGES / f"schedule-{name}.svg")]):
            return status
    return 0


def draw_report(folder: Path) -> int:
    """Views of a search and its plans, as a browser shows them."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    asked = ["--model", "gpt-2.6b", "--cluster", "4xa10g", "--global-batch", "32", "--baselines", "--top", "4"]
    status = run(["search", *asked, "--out", str(folder / "plan.json")])
    status = status or run(["report", str(folder / "plan.search.json"), "--out", str(folder / "report.html")])
    if status or chromium is None:
        return status
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, color_scheme="light")
        page.goto((folder / "report.html").as_uri())
        page.wait_for_selector("body[data-ready]", state="attached")
        page.wait_for_selector("#timeline .sums:not(:empty)")
        page.evaluate("() => { document.querySelector('nav').style.position = 'static'; }")  # it would lie over what is pictured
        for view in ("stages", "timeline", "candidates"):
            page.locator(f"#{view}").screenshot(path=IMAGES / f"report-{view}.png")
        browser.close()
    return 0


def main() -> None:
    """Writes them all."""
    with tempfile.TemporaryDirectory() as folder:
        csv = Path(folder) / "lengths.csv"
        csv.write_text("length\n" + "\n".join(map(str, lengths())) + "\n", encoding="utf-8")
        plan = Path(folder) / "plan.json"
        asked = ["--model", "gpt-2.6b", "--cluster", "4xa10g", "--global-batch", str(len(lengths())), "--lengths", str(csv), "--top", "1"]
        status = run(["search", *asked, "--out", str(plan)])
        status = status or run(["simulate", str(plan), "--lengths", str(csv), "--figure", str(IMAGES / "pipeline.svg")])
        status = status or draw_schedules(Path(folder)) or draw_report(Path(folder))
    raise SystemExit(status)


if __name__ == "__main__":
    main()
