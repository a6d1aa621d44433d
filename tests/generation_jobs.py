"""Jobs for worker processes: generations of process groups, one after the other, and what is left of them in the process."""

from __future__ import annotations

import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from training_jobs import rank_of

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.worker import Worker

__all__ = ["Footprint", "close_amid_transfers", "footprint", "policies", "train_generations", "wake_from_a_thread"]

Footprint = tuple[int, int, int]
"""Threads, open files, sockets that listen."""


def footprint() -> Footprint:
    """Of this process, now."""
    descriptors, listening = [int(name) for name in os.listdir("/proc/self/fd")], 0
    for number in descriptors:
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as one:
                    listening += one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        except OSError:  # that of the listing itself
            continue
    return _num_threads(), len(descriptors), listening


def policies(worker: Worker) -> tuple[int, set[int]]:
    """By which policies the system schedules this thread, and gloo's threads that hear of messages."""
    names = {int(task): Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")}
    return os.sched_getscheduler(0), {os.sched_getscheduler(task) for task, name in names.items() if name == "gloo_tcp_loop"}


def _num_threads() -> int:
    """The fewest of some moments: a thread that has been joined is listed a little longer."""
    found = []
    for _ in range(10):
        found.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.002)
    return min(found)


@contextmanager
def no_collection() -> Iterator[None]:
    """What is in circles stays: whoever needs the collector to let go of a thread or a socket is seen."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train_generations(
    worker: Worker, parts: Sequence[tuple[Plan, Sequence[Program]]], settings: TrainingSettings, rounds: int
) -> tuple[list[Footprint], list[float], int]:
    """One step under each plan in turn, in a generation each, round after round; what was left after each round, all losses, and the
    number of the last generation."""
    found, losses = [], []
    rank = rank_of(parts[0][0], worker.groups, settings, observer=worker.status)
    with no_collection():
        for _ in range(rounds):
            for plan, programs in parts:
                rank.adopt(plan)
                if rank.world.rank >= 0:
                    losses.append(rank.train(programs[rank.world.place]).loss.item())
            worker.groups.generation.close()
            found.append(footprint())
            number = worker.groups.generation.number
            worker.groups.renew()
    return found, losses, number


def wake_from_a_thread(worker: Worker) -> str:
    """Everybody waits for a message that nobody sends, until a thread of each wakes it; what the waiting ended with."""
    groups = worker.groups
    groups.barrier()
    waker = threading.Timer(0.3, groups.generation.wake)
    waker.start()
    told = ""
    try:
        dist.recv(torch.zeros(1), (worker.rank + 1) % worker.size)
    except RuntimeError as error:
        told = str(error)
    waker.join()
    groups.renew()
    groups.barrier()
    return told


def close_amid_transfers(worker: Worker, rounds: int) -> tuple[list[Footprint], list[float]]:
    """Closes generations in which transfers and sums wait for others that never come; what was left, and what the next one can do."""
    groups, found, sums = worker.groups, [], []
    own, count = groups.own, worker.size
    everyone, others = range(count), range(1, count)
    with no_collection():
        for _ in range(rounds):
            groups.of(others)
            number = torch.ones(3)
            dist.all_reduce(number, group=groups.of(everyone))
            sums.append(number[0].item())
            if 0 < own < count - 1:  # the last one never joins
                pending = [dist.all_reduce(torch.ones(1000), group=groups.of(others), async_op=True)]
            else:
                pending = [dist.irecv(torch.zeros(4), (own + 1) % count)]
            groups.barrier()  # all have begun
            del pending
            groups.generation.close()
            found.append(footprint())
            groups.renew()
    groups.part()
    return found, sums
