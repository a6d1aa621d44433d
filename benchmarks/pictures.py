"""The pictures of the documentation, by the commands that anybody would make them with.

  python benchmarks/pictures.py      # writes docs/images/*.svg

pipeline.svg   one batch of samples of many lengths on the four stages that were
               searched for them: micro-batches of unequal shapes, their order, and memory over time
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from penstock.cli.main import run

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def lengths(count: int = 40) -> list[int]:
    """Sample lengths like those of instructions: most are short, some are long; the same each time."""
    return [min(2000, round(60 * 1.8 ** (7 * (number * 0.618 % 1)) / (1 + number % 3))) for number in range(1, count + 1)]


def main() -> None:
    """Writes them all."""
    with tempfile.TemporaryDirectory() as folder:
        csv = Path(folder) / "lengths.csv"
        csv.write_text("length\n" + "\n".join(map(str, lengths())) + "\n", encoding="utf-8")
        plan = Path(folder) / "plan.json"
        asked = ["--model", "gpt-2.6b", "--cluster", "4xa10g", "--global-batch", str(len(lengths())), "--lengths", str(csv), "--top", "1"]
        status = run(["search", *asked, "--out", str(plan)])
        status = status or run(["simulate", str(plan), "--lengths", str(csv), "--figure", str(IMAGES / "pipeline.svg")])
    raise SystemExit(status)


if __name__ == "__main__":
    main()
