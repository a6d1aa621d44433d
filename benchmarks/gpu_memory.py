"""Reserved against allocated memory over many iterations of ever-changing shapes on one GPU: what the allocator's settings leave to holes.

  python benchmarks/gpu_memory.py [--iterations 500] [--tokens 16384] [--layers 6]

A GPT of 6 layers trains on batches of about 16k tokens of log-normal lengths, each cut by the planner in a way of its own, in a worker
process as `penstock train` starts it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from throughput import KeptSource, drawn_batches, plan_of

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program

LONGEST = 2048


def run_rank(worker: Any, plan: Plan, programs: list[Program]) -> tuple[list[tuple[int, int]], float]:
    """(allocated, reserved) at the fullest moment of each iteration, and the seconds of all."""
    import torch
    from training_jobs import RandomSource, open_rank

    from penstock.plans.references import model_of
    from penstock.runtime.settings import TrainingSettings

    rank = open_rank(worker, plan, TrainingSettings(clip_norm=1.0), KeptSource(RandomSource(model_of(plan))))
    assert rank is not None
    peaks, start = [], time.perf_counter()
    for program in programs:
        rank.train(program)
        peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
    return peaks, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2**14)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--costs", default="profile:h200-141gb")
    parser.add_argument("--cluster", default="1xh200")
    given = parser.parse_args()
    from penstock.batching.plan import SampleLengths
    from penstock.batching.planned import with_recompute_choices
    from penstock.batching.planner import costs_for, plan_batch
    from penstock.plans.references import model_of
    from penstock.programs.lower import lower
    from penstock.programs.work import work_of
    from penstock.runtime.workers import launch

    sizes = {"family": "gpt", "layers": given.layers, "hidden": 2048, "heads": 16, "seq_length": LONGEST, "vocab": 50_304, "dtype": "bf16"}
    plan = plan_of(sizes, given.cluster, LONGEST, given.tokens)
    plan = with_recompute_choices(plan, model_of(plan))
    costs = costs_for(plan, LONGEST, costs=given.costs)
    batches = drawn_batches(given.iterations, given.tokens, LONGEST)
    found = [plan_batch([SampleLengths(i, length) for i, length in enumerate(batch)], costs) for batch in batches]
    programs = [lower(plan, model_of(plan), work_of(one, plan), step)[0] for step, one in enumerate(found)]
    peaks, seconds = launch(run_rank, 1, plan, programs, device="cuda", timeout_s=900.0)[0]
    print(f"{'iteration':>9} {'allocated':>10} {'reserved':>10} {'ratio':>6}   (GiB at the fullest moment so far)")
    marks = [1, 10, 50, 100, 200, 300, 400, len(peaks)]
    for mark in sorted({mark for mark in marks if mark <= len(peaks)}):
        allocated, reserved = peaks[mark - 1]
        print(f"{mark:9d} {allocated / 2**30:10.2f} {reserved / 2**30:10.2f} {reserved / allocated:6.3f}")
    print(f"{seconds / len(peaks) * 1e3:.0f} ms an iteration; limit of the ratio 1.15")


if __name__ == "__main__":
    main()
