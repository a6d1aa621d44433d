"""Jobs for worker processes under test; at the top of the tests' path, so that workers can import them."""

from __future__ import annotations

import inspect
import os
import signal
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from training_jobs import open_rank

from penstock.plans.plan import Plan
from penstock.programs.instructions import Forward, Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.process_files import named_process
from penstock.runtime.worker import Worker


def identify(worker: Worker, word: str) -> tuple[int, int, int, str]:
    """Who answers."""
    return worker.rank, worker.size, os.getpid(), word


def fail_on(worker: Worker, rank: int) -> None:
    """Fails on one rank; the others wait for it."""
    import torch.distributed as dist

    if worker.rank == rank:
        raise ValueError("no luck")
    dist.barrier()


def hang_on(worker: Worker, rank: int) -> None:
    """Sleeps on one rank."""
    if worker.rank == rank:
        time.sleep(1000)


def tell_and_die(worker: Worker, count: int) -> None:
    """Rank 0 tells so many words, and rank 1 is killed after the last of them."""
    for number in range(0 if worker.rank else count):
        worker.tell(number)
    worker.groups.barrier()
    if worker.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000.0)


def sleep(worker: Worker, time_s: float) -> None:
    """Does nothing for a while."""
    time.sleep(time_s)


def sleep_named(worker: Worker, folder: str) -> None:
    """Does nothing for long, as a rank that a run's folder names."""
    with named_process(folder, worker.rank, "cpu"):
        time.sleep(1000.0)


def _run(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], rank: int, fate: Callable[[], Any]) -> None:
    """Trains; on one rank the forward pass of micro-batch 1 in iteration 1 meets its fate."""
    own = open_rank(worker, plan, TrainingSettings())
    assert own is not None
    plain = own.executor.handlers[Forward]

    def forward(step: Any) -> None:
        assert own is not None and own.executor.program is not None
        if worker.rank == rank and own.executor.program.iteration == 1 and step.micro_batch == 1:
            fate()
        plain(step)

    own.executor.handlers[Forward] = forward
    for iteration in programs:
        own.train(iteration[worker.rank])


def fail_in_program(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], rank: int) -> None:
    """An exception inside an instruction."""

    def fail() -> None:
        raise MemoryError("as if out of memory")

    _run(worker, plan, programs, rank, fail)


def kill_in_program(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], rank: int) -> None:
    """A death inside an instruction."""
    _run(worker, plan, programs, rank, lambda: os.kill(os.getpid(), signal.SIGKILL))


def run_stalled(
    worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], workloads: Any, rank: int, stall_s: float
) -> list[float]:
    """Timed devices, one of which really loses time before its forward pass of micro-batch 4."""
    from penstock.runtime.devices.timed import TimedRank
    from penstock.runtime.transport.world import World

    world = World(plan, worker.groups)
    if world.rank < 0:
        return []
    own = TimedRank(world)
    plain = own.executor.handlers[Forward]

    def forward(step: Any) -> None:
        if world.rank == rank and step.micro_batch == 4:
            time.sleep(stall_s)
        plain(step)

    own.executor.handlers[Forward] = forward
    return [own.run(iteration[world.rank], workloads[iteration[world.rank].replica]) for iteration in programs]


def kill_in_word(worker: Worker, rank: int) -> None:
    """Kills rank `rank` when it has told half of something that is large."""
    if worker.rank == rank:
        pipe = inspect.getclosurevars(worker.tell).nonlocals["pipe"]
        os.write(pipe.fileno(), struct.pack("!i", 1000) + b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
