"""Supervisors of other nodes for tests: processes of the warm server, which start their ranks from it too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shared_server import stay_with_server

from penstock.adapting.deaths import RunWitness
from penstock.errors import InputError
from penstock.processes.fork_server import SIGNALS, start_process
from penstock.runtime.request import NodePlace, TrainRequest
from penstock.runtime.run import Watching
from penstock.runtime.trainer import PlanTrainer


def placed(request: TrainRequest, node: int, port: int) -> TrainRequest:
    """The request of a node at 127.0.0.(1 + its number)."""
    return replace(request, node=NodePlace(node, "127.0.0.1", port, f"127.0.0.{node + 1}"))


@contextmanager
def one_core() -> Iterator[None]:
    """The supervisors of nodes that share a machine each count its cores; ranks have the same number of threads as elsewhere, and sums the
    same order, if they see one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run_node(request: TrainRequest, watching: Watching | None) -> None:
    stay_with_server()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it could start no ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # it is a launcher, which hears them
    with one_core():
        trainer = PlanTrainer(request, watching, RunWitness(request.out))
        while True:
            try:
                trainer.train()
                return
            except InputError as error:  # it may come before the one is missed whose place it takes
                if "there is such a node already" not in str(error):
                    raise


@contextmanager
def other_node(request: TrainRequest, watching: Watching | None = None) -> Iterator[Any]:
    """The process that supervises a node."""
    process = start_process("node", run_node, request, watching)
    try:
        yield process
    finally:
        process.kill()
        process.join()
