"""Small micro-batches that a GPU runs faster than its host issues them: plain torch, ours one by one, ours from recordings.

    python benchmarks/recorded.py [--layers 24] [--device cuda]

Each entry is a training step of some micro-batches of one shape, padded, with fp32 sums of gradients (plain torch's are bf16); printed are
milliseconds of one micro-batch, forward and backward, the fastest of the steps after the recordings are made. Passes that are issued one by
one run torch's kernels where these are small, recorded ones our own; printed is how far their losses are apart. On a processor nothing is
recorded; `--device cpu --layers 2` is for trying this out.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from throughput import KeptSource, PlainGpt, plain_step, tensors

from penstock.models.micro_batch import MicroBatch
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import model_of
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport.world import ProcessGroups
from penstock.schedules.actions import BACKWARD, FORWARD, Action

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from training_jobs import RandomSource, rank_of

STEPS, SETTLED = 10, 4
"""Of each entry, and those after which all is recorded."""
GPT = {"family": "gpt", "hidden": 2048, "heads": 16, "seq_length": 2048, "vocab": 50_304}
T5 = {"base": "t5-770m"}
ROW = 96


def plan_of(sizes: dict[str, object], rows: int, count: int, length: int, dec_length: int, precision: str) -> Plan:
    """One stage on one device."""
    plan = Plan(
        sizes, "1xh200", rows * count, (), MicroBatching("padded", "fixed", rows), seq_length=length, dec_length=dec_length,
        precision=precision, gradients="fp32",
    )  # fmt: skip
    return replace(plan, stages=(Stage(0, model_of(plan).num_ops, ((0,),)),))


def micro_batches(rows: int, count: int, length: int, dec_length: int) -> tuple[MicroBatch, ...]:
    """Samples a little shorter than their rows."""
    return tuple(
        MicroBatch(
            at, tuple(range(at * rows, (at + 1) * rows)), "padded", tuple(length - (at * 7 + row * 5) % 36 for row in range(rows)),
            tuple(dec_length - (at + row) % 20 for row in range(rows)) if dec_length else (), length, dec_length,
        ) for at in range(count)
    )  # fmt: skip


def ours(plan: Plan, micros: tuple[MicroBatch, ...], device: str, *, recorded: bool) -> tuple[float, list[float]]:
    """(milliseconds of a micro-batch, losses)."""
    model = model_of(plan)
    schedule = (tuple(Action(0, kind, micro.index) for micro in micros for kind in (FORWARD, BACKWARD)),)
    rank = rank_of(plan, ProcessGroups(device), TrainingSettings(clip_norm=1.0), KeptSource(RandomSource(model)))
    if not recorded:
        rank.stages[0].recordings = None
    losses: list[float] = []

    def step(number: int) -> None:
        losses.append(rank.train(lower(plan, model, (ReplicaWork(micros, schedule),), number)[0]).loss.item())

    return fastest_ms(step, len(micros), device), losses


def plain(rows: int, count: int, layers: int, device: str) -> float:
    """Milliseconds of a micro-batch of a plain torch GPT."""
    with torch.device(device):
        model = PlainGpt(layers, GPT["hidden"], GPT["heads"], GPT["vocab"], GPT["seq_length"])
    model = model.to(torch.bfloat16) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [tensors([ROW] * rows, "padded", GPT["vocab"], torch.device(device)) for _ in range(count)]
    return fastest_ms(lambda _: plain_step(model, optimizer, batches, ROW * rows * count), count, device)


def fastest_ms(step: Callable[[int], None], count: int, device: str) -> float:
    """Of the steps after the first ones."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for number in range(STEPS):
        wait()
        start = time.perf_counter()
        step(number)
        wait()
        times.append((time.perf_counter() - start) / count * 1e3)
    return min(times[SETTLED:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args()
    precision = "bf16" if given.device == "cuda" else "fp32"
    entries = [(f"GPT 1.3B, {rows} × {ROW} tokens", GPT, rows, 24, ROW, 0) for rows in (8, 1)]
    entries += [(f"T5 770M, {rows} pairs of 512 and 128 tokens", T5, rows, 8, 512, 128) for rows in (4, 16)]
    columns = "micro-batch", "plain torch", "ours, one by one", "ours, recorded", "over plain", "losses apart by"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for title, sizes, rows, count, length, dec_length in entries:
        plan = plan_of(sizes | {"layers": given.layers}, rows, count, length, dec_length, precision)
        micros = micro_batches(rows, count, length, dec_length)
        found = []
        for recorded in (False, True):
            found.append(ours(plan, micros, given.device, recorded=recorded))
            gc.collect()  # a rank and its stages know each other; the next one needs their memory
        (one_by_one_ms, losses), (recorded_ms, recorded_losses) = found
        plain_ms = plain(rows, count, given.layers, given.device) if sizes is GPT else 0.0
        apart = max(abs(one / other - 1) for one, other in zip(losses, recorded_losses, strict=True))
        beside = (f"{plain_ms:.1f}", f"{recorded_ms / plain_ms:.2f} ×") if plain_ms else ("", "")
        print(f"| {title} | {beside[0]} | {one_by_one_ms:.1f} | {recorded_ms:.1f} | {beside[1]} | {apart:.0e} |", flush=True)


if __name__ == "__main__":
    main()
