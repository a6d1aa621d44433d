"""How long `penstock train` takes from its start to its first step on this machine's processors: ranks and planner forked from one warm
server, against the same run in which each of them is spawned and imports torch for itself.

    python benchmarks/startup.py --ranks 2 --runs 5
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.processes import fork_server

SPAWNED, FORKED = "spawned", "forked"


def train_spawned(arguments: list[str]) -> None:
    """`penstock train` whose processes are spawned; called before anything else has looked at the fork server."""
    context: Any = get_context("spawn")

    def start(name: str, target: Any, *given: Any) -> Any:
        process = context.Process(target=target, args=given, name=name, daemon=True)
        process.start()
        return process

    fork_server.FORKED, fork_server.start_process, fork_server.warm_up = context, start, lambda: None  # type: ignore[assignment]
    from penstock.cli.main import run

    sys.exit(run(arguments))


def first_step_s(command: list[str], out: Path, environment: Mapping[str, str] | None = None) -> float:
    """Seconds from the start of a command that trains into `out` to the record of its first step."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, env=environment) as process:
        steps = out / "steps.jsonl"
        while not (steps.exists() and steps.stat().st_size) and process.poll() is None:
            time.sleep(0.005)
        found = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    return found


def _started_s(way: str, folder: Path, number: int) -> float:
    out = folder / f"{way}-{number}"
    given = ["train", str(folder / "plan.json"), "--data", str(folder / "data"), "--steps", "2", "--out", str(out), "--json"]
    return first_step_s([*([__file__, SPAWNED] if way == SPAWNED else ["-m", "penstock"]), *given], out)


def main() -> None:
    """Both ways in turn, so that what else the machine does meets both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare_text(TextRequest(tuple(bundled_files()), folder / "data", train_tokenizer=384, workers=1))
        plan = uniform_plan("gpt-tiny", f"{options.ranks}xcpu", global_batch=16, micro_batch=4, pp=options.ranks, layout="packed")
        write_plan(folder / "plan.json", plan)
        times = [[_started_s(way, folder, number) for way in (SPAWNED, FORKED)] for number in range(options.runs)]
    for way, own in zip((SPAWNED, FORKED), zip(*times, strict=True), strict=True):
        print(f"{way:8} start to first step {statistics.median(own):6.2f} s (of {options.runs} runs, best {min(own):.2f} s)")
    print(f"forked / spawned: {statistics.median(forked / spawned for spawned, forked in times):.2f}")


if __name__ == "__main__":
    if sys.argv[1:2] == [SPAWNED]:
        train_spawned(sys.argv[2:])
    else:
        main()
