"""How fast the runtime is: tokens/s of a two-stage pipeline on CPU beside another library's, and what the executor's loop costs.

  python benchmarks/runtime.py [--peer SCRIPT] [--split 4,4|search] [--peer-split 4,4] [--lengths] [--steps 6] [--rounds 2]
  python benchmarks/runtime.py --timed 16
  python benchmarks/runtime.py --windows

Both sides run a GPT of 8 layers, hidden 256, 8 micro-batches of 2 rows of 256 tokens, 1F1B, plain SGD, one thread per process, one after
the other, `--rounds` times; the best step of each is compared, since other load can only slow a step down, and processor time, which
depends on other load least. `--peer` is a script that trains the same model with torch.distributed.pipelining and prints JSON. With
`--lengths` our side trains on packed samples of log-normal lengths (median 40, σ 1, at most 256); useful tokens are compared with those of
the other side's rows, each padded to 256. `--timed N` instead compares iterations of N timed devices with the simulator's, `--windows`
asynchronous 1F1B on four of them that is drained after every global batch with windows of ten batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from penstock.models.catalog import model_from_mapping
from penstock.models.micro_batch import MicroBatch
from penstock.plans.build import block_ranges
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.programs.instructions import INSTRUCTIONS, Free, Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.schedules.rules import SCHEDULES, schedule_of

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for `training_jobs`

LAYERS, ROWS, LENGTH, MICRO_BATCHES = 8, 2, 256, 8
SIZES = {"family": "gpt", "layers": LAYERS, "hidden": 256, "heads": 8, "seq_length": LENGTH, "vocab": 8192, "tied": False, "dtype": "fp32",
         "activation": "gelu"}  # fmt: skip


def drawn_lengths(count: int = 8 * ROWS * MICRO_BATCHES) -> list[int]:
    """Lengths of samples, the same every time."""
    generator = random.Random(0)
    return [max(1, min(LENGTH, round(math.exp(generator.gauss(math.log(40), 1.0))))) for _ in range(count)]


def micro_batches_of(lengths: list[int]) -> tuple[MicroBatch, ...]:
    """Rows of the full length, or, given lengths, packed samples with about equal tokens in each micro-batch."""
    if not lengths:
        return tuple(
            MicroBatch(m, tuple(range(m * ROWS, (m + 1) * ROWS)), "padded", (LENGTH,) * ROWS, row_length=LENGTH)
            for m in range(MICRO_BATCHES)
        )
    groups: list[list[int]] = [[] for _ in range(MICRO_BATCHES)]
    for sample in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        min(groups, key=lambda own: sum(lengths[one] for one in own)).append(sample)
    return tuple(MicroBatch(m, tuple(own), "packed", tuple(lengths[one] for one in own)) for m, own in enumerate(groups))


def plan_of(split: list[int]) -> Plan:
    """Two stages with these numbers of layers; embedding and head go with the first and the last."""
    model = model_from_mapping(SIZES, "benchmark", "gpt")
    starts = [first for name, (first, _) in block_ranges(model) if name == "layers"]
    cut = starts[split[0]]
    stages = (Stage(0, cut, ((0,),)), Stage(cut, model.num_ops, ((1,),)))
    return Plan(SIZES, "2xcpu", ROWS * MICRO_BATCHES, stages, MicroBatching("padded", "fixed", ROWS), seq_length=LENGTH, precision="fp32",
                optimizer="sgd")  # fmt: skip


def searched_split() -> list[int]:
    """Layers of the two stages that the search chooses, from ops measured here with one thread."""
    import tempfile
    from pathlib import Path

    import torch

    from penstock.profiling.run import Profiler
    from penstock.search import Request
    from penstock.search.partition.pipelines import equal_pipeline
    from penstock.search.space.families import families

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path, sizes = Path(folder) / "profile.json", Path(folder) / "model.yaml"
        sizes.write_text(json.dumps(SIZES))
        profiler = Profiler.open(path, "cpu")
        profiler.run(profiler.units([model_from_mapping(SIZES, "benchmark", "gpt")], [1]), progress=lambda name: None)
        request = Request.of(str(sizes), "2xcpu", ROWS * MICRO_BATCHES, f"profile:{path}", None, [ROWS], math.inf)
    family = next(one for one in families(request) if one.replicas == 1)
    option = next(one for one in family.options if one.num_devices == 1)
    found = equal_pipeline(family, option, math.inf)
    assert found is not None
    cut = found.plan.stages[0].last
    first = sum(start < cut for name, (start, _) in block_ranges(request.model) if name == "layers")
    return [first, LAYERS - first]


def programs_of(plan: Plan, steps: int, lengths: list[int]) -> list[tuple[Program, ...]]:
    """The same micro-batches in every step."""
    work = (ReplicaWork(micro_batches_of(lengths), schedule_of("1f1b", 2, MICRO_BATCHES)),)
    model = model_from_mapping(SIZES, "benchmark", "gpt")
    return [lower(plan, model, work, step) for step in range(steps)]


def run_rank(worker: Any, plan: Plan, programs: list[tuple[Program, ...]], warm_up: int) -> dict[str, Any]:
    """Times the steps of one rank."""
    import torch.distributed as dist
    from training_jobs import RandomSource, open_rank

    from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings

    settings = TrainingSettings(LearningRate(0.01), OptimizerSettings("sgd", weight_decay=0.0, momentum=0.0), clip_norm=None)
    model = model_from_mapping(SIZES, "benchmark", "gpt")
    rank = open_rank(worker, plan, settings, _Kept(RandomSource(model)), model)
    assert rank is not None
    wall, cpu, losses = [], [], []
    for number, step in enumerate(programs):
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        result = rank.train(step[worker.rank])
        used = time.process_time() - start_cpu
        dist.barrier()
        losses.append(result.loss.item())
        if number >= warm_up:
            wall.append(time.perf_counter() - start)
            cpu.append(used)
    return {"wall": wall, "cpu": cpu, "losses": losses, "instructions": len(programs[0][worker.rank].instructions)}


class _Kept:
    """The samples of the first step, for all steps: drawing them is no part of training."""

    def __init__(self, source: Any) -> None:
        self._source, self._kept = source, {}

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Any:
        if sample not in self._kept:
            self._kept[sample] = self._source.sample(0, sample, length, dec_length)
        return self._kept[sample]


def ours(split: list[int], steps: int, lengths: list[int], warm_up: int = 2) -> dict[str, Any]:
    """Figures of our side."""
    from penstock.runtime.workers import launch

    plan = plan_of(split)
    ranks = launch(run_rank, 2, plan, programs_of(plan, steps + warm_up, lengths), warm_up)
    tokens = sum(lengths) or ROWS * MICRO_BATCHES * LENGTH
    cpu = [min(rank["cpu"]) for rank in ranks]
    wall = ranks[-1]["wall"]
    return {"best_tokens_per_s": tokens / min(wall), "tokens_per_s": tokens * len(wall) / sum(wall), "cpu_s_per_step": cpu,
            "cpu_bound_tokens_per_s": tokens / max(cpu), "first_loss": ranks[0]["losses"][0]}  # fmt: skip


def theirs(script: str, split: list[int], steps: int) -> dict[str, Any]:
    """Figures of the other side."""
    command = [sys.executable, script, "--split", ",".join(map(str, split)), "--steps", str(steps), "--schedules", "1f1b"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["1f1b"]
    return found


def loop_s(count: int = 200_000) -> float:
    """Seconds of the loop for one instruction, with an observer that records spans, handlers that do nothing left out."""
    import tempfile
    from pathlib import Path

    from penstock.runtime.executor import Executor
    from penstock.runtime.telemetry.observing import Observers, StageSpans
    from penstock.runtime.telemetry.spans import SpanRecorder
    from penstock.runtime.telemetry.status import Status, StatusBoard

    steps = Program(0, 0, 0, 1, 1, 1, 1, (), (), (Free((0,)),) * count)
    with tempfile.TemporaryDirectory() as folder:
        spans = SpanRecorder(Path(folder) / "spans", capacity=1 << 19)
        executor = Executor(Observers(Status(StatusBoard(1).memory, 0), spans, StageSpans()))
        for kind in INSTRUCTIONS:
            executor.register(kind, lambda step: None)
        executor.run(steps)
        start = time.process_time()
        executor.run(steps)
        used = time.process_time() - start
        spans.close()
    start = time.process_time()
    handler = executor.handlers[Free]
    for step in steps.instructions:
        handler(step)
    return (used - (time.process_time() - start)) / count


def timed(ranks: int, micro_batches: int = 32, unit_s: float = 0.02) -> None:
    """Iterations of pipelines of timed devices, measured and simulated."""
    import numpy as np
    from training_jobs import run_timed

    from penstock.plans.build import uniform_plan
    from penstock.plans.references import model_of
    from penstock.runtime.devices.clock import ClockSettings
    from penstock.runtime.workers import WorkerPool
    from penstock.timing.execution import execute
    from penstock.timing.workload import workload_of

    print(f"{ranks} ranks, {micro_batches} unequal micro-batches; transfers ordered by equal times, or by the times of each micro-batch")
    print(f"{'schedule':12} {'ordered by':>10} {'simulated':>10} {'best off by':>12} {'worst off by':>13}")
    with WorkerPool(ranks) as pool:
        for schedule in ("1f1b", "gpipe", "zero-bubble"):
            plan = uniform_plan("gpt-350m", f"{ranks}xcpu", global_batch=micro_batches, micro_batch=1, pp=ranks, schedule=schedule)
            sizes = np.random.default_rng(0).uniform(0.5, 1.5, (1, ranks, micro_batches))
            work = workload_of(np.array([1.0, 2.0, 1.0, 1.0])[:, None, None] * sizes * unit_s, 0.2 * unit_s, contention="pair")
            order, length = schedule_of(schedule, ranks, micro_batches), plan.seq_length
            micros = tuple(MicroBatch(m, (m,), "padded", (length,), row_length=length) for m in range(micro_batches))
            simulated = execute(order, work).makespan_s
            for name, times in (("equal", None), ("own", work.durations_s.tolist())):
                own = (ReplicaWork(micros, order, durations_s=times),)
                programs = [lower(plan, model_of(plan), own, iteration) for iteration in range(3)]
                off = [one / simulated - 1 for one, _ in pool.run(run_timed, plan, programs, [work], ClockSettings())[0]]
                print(f"{schedule:12} {name:>10} {simulated:9.3f}s {min(off):+12.2%} {max(off):+13.2%}")


def windows(ranks: int = 4, of_batch: int = 8, unit_s: float = 0.02) -> None:
    """A global batch of asynchronous pipelines of timed devices, as a multiple of what each of them computes for it."""
    import numpy as np
    from training_jobs import run_timed

    from penstock.plans.build import uniform_plan
    from penstock.plans.references import model_of
    from penstock.runtime.devices.clock import ClockSettings
    from penstock.runtime.workers import WorkerPool
    from penstock.timing.execution import execute
    from penstock.timing.workload import workload_of

    plan = uniform_plan("llama-8b", f"{ranks}xa100-80gb", global_batch=of_batch, micro_batch=1, pp=ranks, schedule="pipedream")
    print(f"{ranks} stages, {of_batch} micro-batches a batch: time of a batch over what a device computes for it")
    print(f"{'drained after':>14} {'simulated':>10} {'measured, best':>15}")
    with WorkerPool(ranks) as pool:
        for batches in (1, SCHEDULES[plan.schedule].window(ranks, of_batch)):
            count, length = batches * of_batch, plan.seq_length
            order = schedule_of(plan.schedule, ranks, count)
            work = workload_of(np.array([1.0, 2.0])[:, None, None] * np.full((2, ranks, count), unit_s), 0.02 * unit_s, contention="pair")
            micros = tuple(MicroBatch(m, (m,), "padded", (length,), row_length=length) for m in range(count))
            ends = tuple(range(of_batch, count + 1, of_batch)) if batches > 1 else ()
            own = (ReplicaWork(micros, order, ends=ends),)
            programs = [lower(plan, model_of(plan), own, number * batches) for number in range(3)]
            computes_s = 3 * unit_s * count
            measured = min(one for one, _ in pool.run(run_timed, plan, programs, [work], ClockSettings())[0])
            print(f"{batches:14} {execute(order, work).makespan_s / computes_s:10.3f} {measured / computes_s:15.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="script of the other side")
    parser.add_argument("--split", default="4,4", help="layers of each stage; `search`: as the search chooses")
    parser.add_argument("--peer-split", help="those of the other side, if not the same")
    parser.add_argument("--lengths", action="store_true", help="our side: packed samples of log-normal lengths")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timed", type=int, metavar="RANKS", help="timed devices against the simulator, nothing else")
    parser.add_argument("--windows", action="store_true", help="asynchronous batches on timed devices, drained or not, nothing else")
    given = parser.parse_args()
    if given.windows:
        windows()
        return
    if given.timed:
        timed(given.timed)
        return
    split = searched_split() if given.split == "search" else [int(part) for part in given.split.split(",")]
    peer_split = [int(part) for part in given.peer_split.split(",")] if given.peer_split else split
    lengths = drawn_lengths() if given.lengths else []
    useful = sum(lengths) / (len(lengths) * LENGTH) if lengths else 1.0  # of the other side's positions
    print(f"executor loop, telemetry on: {loop_s() * 1e6:.2f} µs an instruction (limit 10)")
    sides: dict[str, list[dict[str, Any]]] = {"penstock": [], "peer": []}
    for _ in range(given.rounds):
        sides["penstock"].append(ours(split, given.steps, lengths))
        if given.peer:
            found = theirs(given.peer, peer_split, given.steps)
            sides["peer"].append({key: value * useful if key.endswith("tokens_per_s") else value for key, value in found.items()})
    print(f"two ranks, split {split} and {peer_split}, {'useful ' if lengths else ''}tokens/s, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':10} {'best tokens/s':>14} {'mean tokens/s':>14} {'bound by CPU time':>18} {'CPU s of each rank':>20}")
    best = {}
    for name, rounds in sides.items():
        if not rounds:
            continue
        best[name] = {key: max(one[key] for one in rounds) for key in ("best_tokens_per_s", "tokens_per_s", "cpu_bound_tokens_per_s")}
        cpu = [min(one["cpu_s_per_step"][rank] for one in rounds) for rank in range(2)]
        print(f"{name:10} {best[name]['best_tokens_per_s']:14.0f} {best[name]['tokens_per_s']:14.0f} "
              f"{best[name]['cpu_bound_tokens_per_s']:18.0f} {'  '.join(f'{value:.3f}' for value in cpu):>20}")  # fmt: skip
    if given.peer:
        for key in ("best_tokens_per_s", "cpu_bound_tokens_per_s"):
            print(f"penstock / peer, {key}: {best['penstock'][key] / best['peer'][key]:.3f}")


if __name__ == "__main__":
    main()
