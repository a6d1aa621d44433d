"""Everything that one hour on a GPU should give, in order: a profile, how well it predicts, and what users see.

    python benchmarks/on_gpu.py --out OUT [--only kernels profile steps runs flows table]

  kernels   compiles the planner's loops, so that later parts do not
  profile   `penstock profile` of the five models of the shipped profile, into OUT/h200-141gb.json.gz
  steps     `accuracy.py`: unseen training steps beside their predictions by that profile
  runs      `accuracy.py`: whole `penstock train` runs beside theirs
  flows     `flows.py`: what users run, by the commands of the README
  table     what all of that says

Each part ends within LIMIT_S seconds and keeps what it has; run again, it goes on where it was. To ship what was measured, copy
OUT/h200-141gb.json.gz into src/penstock/costs/shipped and OUT/accuracy/*.jsonl into benchmarks/results/h200, and put the tables into
docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 480.0
MODELS = ("gpt-1.3b", "llama-1b", "bert-large", "t5-770m", "wide-resnet-500m")
HERE = Path(__file__).resolve().parent


def commands(out: Path, name: str) -> dict[str, list[str]]:
    """What each part runs; the profile is of the device `name`."""
    profile = out / f"{name}.json.gz"
    costs = ["--costs", f"profile:{profile}"]
    budget = ["--time-budget", str(0.93 * LIMIT_S)]
    accuracy = [str(HERE / "accuracy.py"), "--out", str(out / "accuracy"), *costs]
    models = [word for model in MODELS for word in ("--model", model)]
    return {
        "kernels": ["-m", "penstock.kernels"],
        "profile": ["-m", "penstock", "profile", "--device", "cuda", "--out", str(profile), *models, *budget],
        "steps": [*accuracy, "--parts", "steps", *budget],
        "runs": [*accuracy, "--parts", "runs", *budget],
        "flows": [str(HERE / "flows.py"), "--out", str(out / "flows"), *costs],
        "table": [*accuracy, "--only-compare"],
    }


def run(part: str, words: list[str]) -> str:
    """Runs a part, with all processes that it starts; how it ended."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, *words], start_new_session=True)
    try:
        status = process.wait(LIMIT_S)
        ended = "done" if status == 0 else f"status {status}"
    except subprocess.TimeoutExpired:
        ended = "stopped: run it again to go on"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"| {part} | {time.perf_counter() - started:.0f} s | {ended} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("on-gpu"))
    parser.add_argument("--device", default="h200-141gb", help="name of the device in the catalogue")
    parser.add_argument("--only", nargs="*", default=list(commands(Path(), "")), help="parts to run")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    parts = commands(given.out.resolve(), given.device)
    lines = []
    for part in given.only:
        print(f"== {part}", flush=True)
        lines.append(run(part, parts[part]))
        print(lines[-1], flush=True)
    print("\n".join(["| part | time | |", "|---|---|---|", *lines]))


if __name__ == "__main__":
    main()
