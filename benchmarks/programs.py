"""Programs: how fast they are made, checked, encoded and decoded, and how large they are.

    python benchmarks/programs.py [--samples N] [--seed S]

One JSON line per case. Lengths are drawn log-normal (median 120, σ 1.1, at most 2048); micro-batches hold 8 samples of similar length.
Times are CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.models.catalog import resolve_model
from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model
from penstock.plans.build import uniform_stages
from penstock.plans.plan import MicroBatching, Plan
from penstock.programs.binary import decode, encode
from penstock.programs.check import check_programs
from penstock.programs.lower import lower
from penstock.programs.text import format_program, parse_program
from penstock.programs.work import ReplicaWork, dp_degrees
from penstock.schedules.rules import schedule_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Case:
    """A model and how it is split."""

    name: str
    model: str
    pp: int
    tp: int = 1
    dp: int = 1
    replicas: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    layout: str = "packed"


CASES = (
    Case("gpt, 4 stages, 2 replicas", "gpt-6.7b", 4, replicas=2),
    Case("gpt, 4 stages, tp 8", "gpt-6.7b", 4, tp=8),
    Case("gpt, 4 stages, tp 2, dp 2", "gpt-6.7b", 4, tp=2, dp=2),
    Case("gpt, 4 × 2 chunks, interleaved", "gpt-6.7b", 4, chunks=2, schedule="interleaved"),
    Case("gpt, 16 stages, zero-bubble", "gpt-6.7b", 16, schedule="zero-bubble"),
    Case("t5, 4 stages, tp 2, padded", "t5-11b", 4, tp=2, layout="padded"),
)


def draw_lengths(count: int, seed: int) -> list[int]:
    """Lengths of samples, longest first."""
    draw = random.Random(seed)
    return sorted((min(2048, max(1, round(math.exp(draw.gauss(math.log(120), 1.1))))) for _ in range(count)), reverse=True)


def work_for(case: Case, plan: Plan, model: Model, lengths: list[int]) -> tuple[ReplicaWork, ...]:
    """Micro-batches of 8 neighbours, dealt to the replicas in turn."""
    groups = [list(range(start, min(start + 8, len(lengths)))) for start in range(0, len(lengths), 8)]
    work = []
    for replica in range(case.replicas):
        micro_batches = []
        for index, samples in enumerate(groups[replica :: case.replicas]):
            own = tuple(lengths[sample] for sample in samples)
            dec = tuple(max(1, length // 4) for length in own) if model.dec_length else ()
            rows = (max(own), max(dec, default=0)) if case.layout == "padded" else (0, 0)
            bounds = {dp: tuple(len(samples) * part // dp for part in range(dp + 1)) for dp in dp_degrees(plan)}
            micro_batches.append(MicroBatch(index, tuple(samples), case.layout, own, dec, *rows, bounds=bounds))  # type: ignore[arg-type]
        schedule = schedule_of(case.schedule, case.pp * case.chunks, len(micro_batches), case.chunks)
        work.append(ReplicaWork(tuple(micro_batches), schedule))
    return tuple(work)


def timed(function: Callable[[], Result]) -> tuple[Result, float]:
    """The result and the CPU seconds it took, the best of three."""
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        result = function()
        best = min(best, time.process_time() - start)
    return result, best


def run(case: Case, num_samples: int, seed: int) -> dict[str, Any]:
    """Lowers, checks, encodes and writes one case."""
    model = resolve_model(case.model)
    stages = uniform_stages(model, pp=case.pp, tp=case.tp, dp=case.dp, replicas=case.replicas, chunks=case.chunks)
    plan = Plan(case.model, "cpu", num_samples, stages, MicroBatching(policy="dynamic"), case.replicas, case.schedule)
    work = work_for(case, plan, model, draw_lengths(num_samples, seed))
    programs, lower_s = timed(lambda: lower(plan, model, work))
    problems, check_s = timed(lambda: check_programs(programs, plan, model))
    if problems:
        raise SystemExit(f"{case.name}: {problems[0]}")
    encoded, encode_s = timed(lambda: [encode(program) for program in programs])
    decoded, decode_s = timed(lambda: [decode(data) for data in encoded])
    texts, format_s = timed(lambda: [format_program(program) for program in programs])
    parsed, parse_s = timed(lambda: [parse_program(text) for text in texts])
    assert tuple(decoded) == tuple(parsed) == programs
    count = sum(len(program.instructions) for program in programs)
    per_s = {"lower": lower_s, "check": check_s, "encode": encode_s, "decode": decode_s, "format": format_s, "parse": parse_s}
    return {
        "case": case.name,
        "ranks": len(programs),
        "micro_batches": sum(len(own.micro_batches) for own in work),
        "instructions": count,
        **{f"{name}_per_s": round(count / time_s) for name, time_s in per_s.items()},
        "bytes_per_instruction": round(sum(map(len, encoded)) / count, 1),
        "text_bytes_per_instruction": round(sum(len(text.encode()) for text in texts) / count, 1),
    }


def main() -> None:
    """Prints one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for case in CASES:
        print(json.dumps(run(case, arguments.samples, arguments.seed)), flush=True)


if __name__ == "__main__":
    main()
