"""Planning beside training: how long ranks wait for their programs, and what the planner costs.

    python benchmarks/overlap.py --tables DIR/gpt_6.7b [--tokens 65536] [--steps 25] [--search-steps 0] [--iteration-s 2.0]

Eight ranks (four stages, two replicas) of GPT-6.7B under DynaPipe's cost tables take one iteration after the other from a store, each
sleeping for `--iteration-s` as if it trained, in step with the others; one planner process plans ahead over lengths drawn as in
instruction data. Prints one JSON line: share of time spent waiting once warm, the planner's processor time per second of training,
bytes per instruction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from data import write_index

from penstock.batching.dynapipe import dynapipe_costs
from penstock.data import open_data
from penstock.data.forms import form_of
from penstock.data.loader import DynamicLoader
from penstock.data.planners import BatchSource
from penstock.data.planning import ProgramPlanner
from penstock.interop.dynapipe import DynaPipeTables
from penstock.interop.dynapipe_model import PlannerConfig
from penstock.models.catalog import resolve_model
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.programs.binary import encode
from penstock.stores import Job
from penstock.stores.server import start_redis
from penstock.stores.tcp import serve_tcp

STAGES, REPLICAS, WARM_UP = 4, 2, 3


def make_planner(tables: Path, folder: Path, search_steps: int) -> ProgramPlanner:
    """Four stages of equal layers in each of two replicas; recomputation is all or nothing, as the tables have it."""
    model = resolve_model("gpt-6.7b")
    cuts = [model.num_ops * stage // STAGES for stage in range(STAGES + 1)]
    stages = []
    for index, (first, last) in enumerate(pairwise(cuts)):
        devices = tuple((replica * STAGES + index,) for replica in range(REPLICAS))
        stages.append(Stage(first, last, devices, Degrees(), recompute=((), ((first, last),), ((first, last),))))
    plan = Plan("gpt-6.7b", "8xa100-40gb", 1, tuple(stages), MicroBatching(policy="dynamic"), REPLICAS, "1f1b")
    costs = dynapipe_costs(DynaPipeTables.open(tables), PlannerConfig("gpt", 32, 1, STAGES, REPLICAS, 36_000))
    return ProgramPlanner(plan, model, costs, form_of(model, open_data(folder)), search_steps)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(address: str, source: BatchSource, planner: ProgramPlanner, iteration_s: float) -> dict[str, Any]:
    ranks = planner.plan.ranks
    job, together = Job.new(len(ranks), capacity=4), threading.Barrier(len(ranks))
    loaders = {rank: DynamicLoader(source, planner, rank, address=address, job=job) for rank in ranks}
    pool = loaders[0].pool
    assert pool is not None
    marks: dict[str, float] = {}
    sizes = []

    def run(rank: int) -> float:
        waited_s = 0.0
        for step, (_, program) in enumerate(loaders[rank]):
            together.wait(120)
            if step == WARM_UP:
                waited_s = loaders[rank].wait_s
                if rank == 0:
                    marks.update(start=time.perf_counter(), cpu=cpu_s(pool.process_ids[0]))
            sizes.append(len(encode(program)) / len(program.instructions))
            time.sleep(iteration_s)
            if rank == 0 and step == (source.num_steps or 0) - job.capacity - 3:  # later the planner has nothing left to plan
                marks.update(end=time.perf_counter(), cpu_end=cpu_s(pool.process_ids[0]))
        marks["done"] = time.perf_counter()
        return loaders[rank].wait_s - waited_s

    try:
        with ThreadPoolExecutor(len(ranks)) as threads:
            waits_s = list(threads.map(run, ranks))
    finally:
        loaders[0].close()
    return {
        "waiting_share": round(max(waits_s) / (marks["done"] - marks["start"]), 5),
        "planner_cpu_per_s": round((marks["cpu_end"] - marks["cpu"]) / (marks["end"] - marks["start"]), 4),
        "bytes_per_instruction": round(sum(sizes) / len(sizes), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="DynaPipe's cost tables, DIR/gpt_6.7b")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--search-steps", type=int, default=0)
    parser.add_argument("--iteration-s", type=float, default=2.0)
    parser.add_argument("--store", choices=("tcp", "redis"), default="tcp")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    server: Any = serve_tcp() if arguments.store == "tcp" else start_redis()
    try:
        write_index(folder / "index", 200_000)
        source = BatchSource(str(folder / "index"), tokens_per_batch=arguments.tokens, limits=(1600, 448), num_steps=arguments.steps)
        address = f"tcp://127.0.0.1:{server.port}" if arguments.store == "tcp" else server.address
        planner = make_planner(arguments.tables, folder / "index", arguments.search_steps)
        found = measure(address, source, planner, arguments.iteration_s)
        print(json.dumps({"store": arguments.store, "tokens": arguments.tokens, "search_steps": arguments.search_steps, **found}))
    finally:
        if arguments.store == "redis":
            server.stop()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
