"""Planning beside training: how long ranks wait for their programs, and what the planner costs.

    python benchmarks/overlap.py [--tokens 65536] [--steps 24] [--search] [--store tcp] [--rounds 3]

Eight processes (four stages, two replicas) run GPT-6.7B on timed A100s: programs, transfers, executor, store and loader are real, an op is
a wait for as long as the costs say. One planner process plans ahead over lengths drawn as in instruction data, at once or with `--search`.
Prints one JSON line for each round: seconds of an iteration and how they compare with the planner's prediction, the longest that any rank
waited for its programs once warm as a share of that time, the planner's processor time for each second of training, bytes for each
instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from data import write_index

from penstock.batching.planned import with_recompute_choices
from penstock.batching.planner import costs_for
from penstock.batching.search import usual_steps
from penstock.data import Limits, open_data
from penstock.data.forms import form_of
from penstock.data.planners import BatchSource, PlannerPool
from penstock.data.planning import ProgramPlanner
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.references import model_of
from penstock.programs.instructions import Program
from penstock.stores import Job
from penstock.stores.server import start_redis
from penstock.stores.tcp_server import TcpServer
from penstock.timing.workload import Workload

STAGES, REPLICAS, WARM_UP = 4, 2, 4
LONGEST = 1600, 448
_KEY = bytes(32)


def make_planner(folder: Path, search_steps: int) -> ProgramPlanner:
    """Four stages of equal layers in each of two replicas, packed, with three recomputation patterns to choose from."""
    plan = uniform_plan("gpt-6.7b", "8xa100-80gb", global_batch=256, micro_batch=1, pp=STAGES, replicas=REPLICAS, layout="packed")
    model = model_of(plan)
    plan = with_recompute_choices(replace(plan, micro_batching=MicroBatching("packed", "dynamic")), model)
    return ProgramPlanner(plan, model, costs_for(plan, sum(LONGEST)), form_of(model, open_data(folder)), search_steps)


def work_of(program: Program, planner: ProgramPlanner) -> Workload:
    """What a program's ops and transfers take, by the costs it was planned with."""
    from msgspec.structs import replace

    from penstock.batching.workloads import batch_workload
    from penstock.programs.instructions import Forward

    patterns = {step.micro_batch: (step.pattern,) * STAGES for step in program.instructions if isinstance(step, Forward)}
    micro_batches = [replace(one, recompute=patterns[one.index]) for one in program.micro_batches]
    assert planner.costs is not None
    return batch_workload(planner.costs, micro_batches, program.replica)


def train_rank(worker: Any, source: BatchSource, planner: ProgramPlanner, address: str, job: Job) -> dict[str, Any]:
    """A job for workers: all iterations of one timed rank, and what it waited for programs once warm."""
    from penstock.data.loader import ProgramLoader
    from penstock.programs.binary import encode
    from penstock.runtime.devices.timed import TimedRank
    from penstock.runtime.transport.world import World

    world = World(planner.plan, worker.groups)
    rank = TimedRank(world, observer=worker.status)
    loader = ProgramLoader(source, planner, world.rank, address=address, job=job, starts_planners=False)
    times_s, sizes, start_s = [], [], 0.0
    for _, program in loader:
        if program.iteration == WARM_UP:
            start_s, loader.wait_s = time.perf_counter(), 0.0
        sizes.append(len(encode(program)) / len(program.instructions))
        times_s.append(rank.run(program, work_of(program, planner)))
        if world.rank == 0:
            worker.tell(program.iteration)
    return {
        "times_s": times_s[WARM_UP:], "waiting_share": loader.wait_s / (time.perf_counter() - start_s),
        "bytes_per_instruction": statistics.fmean(sizes),
    }  # fmt: skip


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: str, source: BatchSource, planner: ProgramPlanner) -> dict[str, Any]:
    """One run of all ranks beside one planner."""
    from penstock.runtime.workers import WorkerPool

    ranks, steps = planner.plan.ranks, source.num_steps or 0
    job = Job("job", _KEY, len(ranks))
    marks: list[tuple[float, float]] = []
    with WorkerPool(len(ranks)) as workers, PlannerPool(source, planner, address, job) as planners:

        def heard(rank: int, step: int) -> None:
            if step in (WARM_UP, steps - job.capacity - 4):  # later the planner has nothing left to plan
                marks.append((time.perf_counter(), cpu_s(planners.process_ids[0])))

        found = workers.run(train_rank, source, planner, address, job, listen=heard)
    (start_s, start_cpu_s), (end_s, end_cpu_s) = marks
    data, batches = source.open()
    predicted_s = [planner.batch_plan(data, batches[step]).predicted_s for step in range(WARM_UP, steps)]
    times_s = found[0]["times_s"]
    return {
        "iteration_s": round(statistics.fmean(times_s), 3),
        "of_predicted": round(sum(times_s) / sum(predicted_s), 4),
        "waiting_share": round(max(one["waiting_share"] for one in found), 5),
        "planner_cpu_per_s": round((end_cpu_s - start_cpu_s) / (end_s - start_s), 4),
        "bytes_per_instruction": round(statistics.fmean(one["bytes_per_instruction"] for one in found), 1),
        "load_average": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--search", action="store_true", help="search for as many steps as `penstock batch` does")
    parser.add_argument("--store", choices=("tcp", "redis"), default="tcp")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 12:
        parser.error(f"--steps {arguments.steps} leaves too little to measure; {WARM_UP + 12} or more were expected.")
    folder = Path(tempfile.mkdtemp())
    server: Any = TcpServer(_KEY) if arguments.store == "tcp" else start_redis()
    try:
        write_index(folder / "index", 200_000)
        source = BatchSource(str(folder / "index"), tokens_per_batch=arguments.tokens, limits=Limits(LONGEST), num_steps=arguments.steps)
        address = f"tcp://127.0.0.1:{server.port}" if arguments.store == "tcp" else server.address
        planner = make_planner(folder / "index", 0)
        if arguments.search:
            assert planner.costs is not None
            planner = replace(planner, search_steps=usual_steps(planner.costs, len(source.open()[1][0].samples)))
        told = {"store": arguments.store, "tokens": arguments.tokens, "search_steps": planner.search_steps}
        for _ in range(arguments.rounds):
            print(json.dumps({**told, **measure(address, source, planner)}), flush=True)
    finally:
        server.close() if arguments.store == "tcp" else server.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
