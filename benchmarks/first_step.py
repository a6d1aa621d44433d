"""How long `penstock train --model M --data texts --out RUN` takes from its start to its first step, the first time and when all that it
prepares is kept: tokens, costs and plan.

    python benchmarks/first_step.py --model gpt-small --runs 3
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from startup import first_step_s

from penstock.data.bundled import bundled_files

MOST_S = 20.0
"""What a user may wait for, with everything kept."""


def job_s(options: list[str], out: Path, kept: Path) -> float:
    """Seconds from the start of the command to its first step; `kept` is where it keeps what it has prepared."""
    command = ["-m", "penstock", "train", *options, "--out", str(out), "--steps", "2", "--json"]
    return first_step_s(command, out, {**os.environ, "PENSTOCK_CACHE": str(kept)})


def main() -> int:
    """One run with nothing kept, then some with everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-small")
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--costs", default="auto")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    options = ["--model", given.model, "--tokens-per-batch", str(given.tokens_per_batch), "--costs", given.costs]
    options += ["--set", "data.over_long=truncate", *(word for file in bundled_files() for word in ("--data", str(file)))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times_s = [job_s(options, folder / str(number), folder / "kept") for number in range(given.runs + 1)]
    kept_s = statistics.median(times_s[1:])
    print(f"{given.model}, command to first step: {times_s[0]:.1f} s with nothing kept, {kept_s:.1f} s with all (at most {MOST_S:g} s)")
    return int(kept_s > MOST_S)


if __name__ == "__main__":
    sys.exit(main())
