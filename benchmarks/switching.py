"""Whether a live move to another plan is, to the bit, a stop, a checkpoint and a restart under it: many random pairs of plans.

  python benchmarks/switching.py [--pairs 200] [--seed 0] [--ranks 6]

Draws pairs of plans over families, degrees, replicas, schedules, layouts, recomputation, cuts, per-op degrees, ZeRO and sequence
parallelism, on random devices of the job, in fp32 and bf16. Each pair trains two steps under the first plan and two under the second, once
with a live move between them and once with a checkpoint and ranks made anew; losses, weights, moments, step counts and statistics must be
equal to the bit. A third way begins the move before the second step and lets what it can travel beside it. Prints the pairs that differ and
the time a move took, and ends with status 1 if any does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from checkpoint_jobs import train_part
from moving_jobs import Chain, differences, drawn_chain, train_moving, train_overlapping
from runtime_cases import Choice

from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerError, WorkerPool

SETTINGS = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)

WHOLE: Choice = {"tp": 1, "zero": 0, "degrees": "equal", "sequence_parallel": False}
"""Every second pair has such plans, between which ops move whole."""


def problem_of(pair: Chain, pool: WorkerPool, folder: Path) -> tuple[str, float, bool]:
    """What differs between a pair's ways (nothing, if all is well), the seconds that the slowest process took to move, and whether the move
    could be overlapped."""
    (old, before), (new, after) = pair.parts
    first = pool.run(train_part, old, before, SETTINGS, None, folder / "saved", timeout_s=120)
    second = pool.run(train_part, new, after, SETTINGS, folder / "saved", folder / "resumed", timeout_s=120)
    moved = pool.run(train_moving, pair.parts, SETTINGS, folder / "moved", timeout_s=120)
    beside = pool.run(train_overlapping, pair.parts, SETTINGS, folder / "beside", timeout_s=120)
    wanted = [(*one.losses, *other.losses) for one, other in zip(first, second, strict=True)]
    pause_s = max(seconds for _, seconds in moved)
    overlapped = any(count for _, count in beside)
    for way, found in (("moved", [one.losses for one, _ in moved]), ("beside", [one.losses for one, _ in beside])):
        if found != wanted:
            return f"{way}: losses differ", pause_s, overlapped
        if differing := differences(folder / way, folder / "resumed"):
            return f"{way}: {', '.join(differing)}", pause_s, overlapped
    return "", pause_s, overlapped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=6)
    given = parser.parse_args()
    wrong, pauses_s, num_overlapped, start = [], [], 0, time.monotonic()
    pool = WorkerPool(given.ranks)
    for number in range(given.pairs):
        pair = drawn_chain(number, 2, 2, given.seed, given.ranks, WHOLE if number % 2 else None)
        with tempfile.TemporaryDirectory() as folder:
            try:
                problem, pause_s, overlapped = problem_of(pair, pool, Path(folder))
                pauses_s.append(pause_s)
                num_overlapped += overlapped
            except WorkerError as error:
                problem, pool = str(error), WorkerPool(given.ranks)
        if problem:
            wrong.append(pair.name)
            print(f"{pair.name}: {problem}", flush=True)
    pool.close()
    print(f"{given.pairs} pairs on {given.ranks} processes in {time.monotonic() - start:.0f} s, {num_overlapped} of them also overlapped: "
          f"{len(wrong)} differ by a bit; "
          f"a move took {1e3 * statistics.median(pauses_s):.0f} ms (median), at most {1e3 * max(pauses_s):.0f} ms")  # fmt: skip
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
