"""A four-stage pipeline on one GPU that MPS divides in four: dynamic and fixed micro-batches, even and uneven splits, predicted times.

  nvidia-cuda-mps-control -d
  CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 python benchmarks/shared_gpu.py --profile share.json

Costs are those of a quarter: one process measures the ops of the model while three others train on their quarters, idle as often as stages
of a pipeline are (a quarter whose neighbours idle is faster), and the file is kept for the next run. Lengths are log-normal (median 120,
σ 1.1, at most 2048). `fixed` packs samples first-fit into rows of 2048, `--rows` rows a micro-batch, under 1F1B; `dynamic` is what the
batch planner makes of the same samples. The even split has as many layers in every stage, the uneven one the fastest ones by the
profile.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import time
from pathlib import Path
from typing import Any

from throughput import drawn_batches

from penstock.batching.baselines import packed_rows, run_baseline
from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.planner import costs_for, plan_batch
from penstock.costs.sources import open_costs
from penstock.models.catalog import model_from_mapping
from penstock.plans.build import block_ranges
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import work_of
from penstock.timing.estimate import Estimator

STAGES, LONGEST = 4, 2048
BUSY = 16 / (16 + STAGES - 1)
"""How much of the time a stage works in a pipeline of 16 micro-batches."""


def sizes_of(layers: int, hidden: int, vocab: int, dtype: str) -> dict[str, Any]:
    return {"family": "gpt", "layers": layers, "hidden": hidden, "heads": 16, "seq_length": LONGEST, "vocab": vocab, "dtype": dtype}


# Costs of a quarter ------------------------------------------------------------------------------------------------------------


def keep_busy(sizes: dict[str, Any], ready: Any, stop: Any) -> None:
    """Trains a part of the model over and over, as a neighbour would."""
    import torch

    from penstock.models.modules import build_chain
    from penstock.profiling.grid import Lengths
    from penstock.profiling.measure import random_model_batch

    model = model_from_mapping({**sizes, "layers": max(1, sizes["layers"] // STAGES)}, "neighbour", "gpt")
    device = torch.device("cuda")
    chain = build_chain(model, device=device)
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batch = random_model_batch(model, Lengths(16, 512, layout="packed"), device)
    while not stop.is_set():
        start = time.perf_counter()
        chain(batch)["loss"].backward()
        torch.cuda.synchronize()
        ready.set()
        time.sleep((time.perf_counter() - start) * (1 / BUSY - 1))


def measure_share(path: Path, sizes: dict[str, Any]) -> None:
    """Profiles the model in this process while the neighbours work."""
    from penstock.profiling.grid import GridLimits
    from penstock.profiling.run import Profiler

    context = multiprocessing.get_context("spawn")
    stop, started = context.Event(), [context.Event() for _ in range(STAGES - 1)]
    neighbours = [context.Process(target=keep_busy, args=(sizes, ready, stop), daemon=True) for ready in started]
    for process in neighbours:
        process.start()
    for ready in started:
        ready.wait(120)
    try:
        profiler = Profiler.open(path, "cuda")
        profiler.limits = dataclasses.replace(GridLimits.for_device("cuda"), min_tokens=1024, max_tokens=16384, depth=1)
        model = model_from_mapping(sizes, "benchmark", "gpt")
        units = [unit for unit in profiler.units([model], [1]) if unit.sweep != "lengths" or unit.layout == "packed"]
        profiler.run(units, progress=lambda name: print(f"measuring {name}", flush=True))
        profiler.profile.write(path)
    finally:
        stop.set()
        for process in neighbours:
            process.join(30)


# Plans -------------------------------------------------------------------------------------------------------------------------


def plan_of(sizes: dict[str, Any], cluster: str, layers: tuple[int, ...]) -> Plan:
    """Four stages with these numbers of layers; embedding and head go with the first and the last."""
    model = model_from_mapping(sizes, "benchmark", "gpt")
    starts = [first for name, (first, _) in block_ranges(model) if name == "layers"]
    cuts = [0, *(starts[sum(layers[:stage])] for stage in range(1, STAGES)), model.num_ops]
    stages = tuple(Stage(first, last, ((rank,),)) for rank, (first, last) in enumerate(itertools.pairwise(cuts)))
    return Plan(sizes, cluster, 64, stages, MicroBatching("packed", "dynamic"), seq_length=LONGEST, precision=sizes["dtype"])


def uneven_layers(sizes: dict[str, Any], cluster: str, costs: str) -> tuple[int, ...]:
    """The numbers of layers with the shortest iteration, by estimate, of micro-batches as large as those to come."""
    even = sizes["layers"] // STAGES
    near = range(max(1, even - 2), even + 3)
    candidates = [found for found in itertools.product(near, repeat=STAGES) if sum(found) == sizes["layers"]]
    frame = plan_of(sizes, cluster, candidates[0])
    estimator = Estimator(model_of(frame), cluster_of(frame), open_costs(costs, cluster_of(frame)))

    def time_s(layers: tuple[int, ...]) -> float:
        plan = dataclasses.replace(plan_of(sizes, cluster, layers), seq_length=512, micro_batching=MicroBatching("packed", "fixed", 16))
        return estimator.estimate(dataclasses.replace(plan, global_batch=16 * 16)).time_s

    return min(candidates, key=time_s)


def planned(way: str, plan: Plan, batches: list[list[int]], costs: str, rows: int, limit_bytes: float) -> list[BatchPlan]:
    """All batches, cut in one way."""
    prices = costs_for(plan, LONGEST, costs=costs, memory_limit_bytes=limit_bytes)
    drawn = [[SampleLengths(number, length) for number, length in enumerate(batch)] for batch in batches]
    if way == "dynamic":
        return [plan_batch(samples, prices, steps=2000) for samples in drawn]
    return [run_baseline(packed_rows(samples, prices, rows, LONGEST), prices, "fixed packing") for samples in drawn]


# Running -----------------------------------------------------------------------------------------------------------------------


def run_rank(worker: Any, plan: Plan, programs: list[tuple[Program, ...]], warm_up: int) -> list[float]:
    """Seconds of each timed step of one rank."""
    import torch
    import torch.distributed as dist
    from throughput import KeptSource
    from training_jobs import RandomSource, open_rank

    from penstock.runtime.settings import TrainingSettings
    from penstock.runtime.transport.allocator import reserve

    rank = open_rank(worker, plan, TrainingSettings(clip_norm=1.0), KeptSource(RandomSource(model_of(plan))))
    assert rank is not None
    if worker.groups.device.type != "cpu":
        reserve(worker.groups.device, 0.85, STAGES)
    seconds = []
    for number, step in enumerate(programs):
        dist.barrier()
        start = time.perf_counter()
        loss = rank.train(step[worker.rank]).loss.item()
        if worker.groups.device.type != "cpu":
            torch.cuda.synchronize()
        dist.barrier()
        assert loss == loss, "the loss is not a number"
        if number >= warm_up:
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="profile of a quarter; measured if it is not there")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cluster", default="4xh200")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--tokens", type=int, default=2**17, help="of a step")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    from penstock.runtime.workers import launch

    sizes = sizes_of(given.layers, given.hidden, given.vocab, "bf16" if given.device == "cuda" else "fp32")
    costs = "roofline"
    if given.profile is not None:
        if not given.profile.exists():
            measure_share(given.profile, sizes)
        costs = f"profile:{given.profile}"
    limit_bytes = 30e9 if given.device == "cuda" else 4e9
    warm_up = 2
    batches = drawn_batches(warm_up + given.steps, given.tokens, LONGEST)
    useful = sum(map(sum, batches[warm_up:]))
    even = (given.layers // STAGES,) * STAGES
    uneven = uneven_layers(sizes, given.cluster, costs)
    print(f"{'split':10} {'micro-batches':13} {'a step':>10} {'predicted':>10} {'measured':>10} {'off by':>8} {'tokens/s':>10}   each step")
    for layers, way in itertools.product(dict.fromkeys((even, uneven)), ("fixed", "dynamic")):
        plan = plan_of(sizes, given.cluster, layers)
        found = planned(way, plan, batches, costs, given.rows, limit_bytes)
        programs = [lower(plan, model_of(plan), work_of(one, plan), step) for step, one in enumerate(found)]
        seconds = launch(run_rank, STAGES, plan, programs, warm_up, device=given.device)[0]
        predicted = sum(one.predicted_s for one in found[warm_up:])
        pairs = " ".join(f"{one.predicted_s:.2f}/{took:.2f}" for one, took in zip(found[warm_up:], seconds, strict=True))
        print(
            f"{'-'.join(map(str, layers)):10} {way:13} {found[-1].num_micro_batches:10d} {predicted / given.steps:9.3f}s "
            f"{sum(seconds) / given.steps:9.3f}s {predicted / sum(seconds) - 1:+8.1%} {useful / sum(seconds):10.0f}   {pairs}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
