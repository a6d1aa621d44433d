"""A planner that fails once or always at one iteration, or counts what it plans, and a process that dies beside its planner."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shared_server import stay_with_server

from penstock.data.batches import GlobalBatch
from penstock.data.dataset import DataSet
from penstock.data.planners import _NO_STORE, BatchSource, PlannerPool
from penstock.data.planning import ProgramPlanner
from penstock.stores import Job

TIMES_LOST = 4
"""More often than planners may die at one iteration."""


@dataclass(frozen=True)
class FaultyPlanner(ProgramPlanner):
    """Crashes or hangs at `step`: once, if `once` names a file that remembers it, or each time. Or it ends there as one does whose store is
    gone, `TIMES_LOST` times."""

    step: int = -1
    way: str = "crash"
    once: str = ""
    counts: str = ""
    """A file that gets a byte for each batch that is planned."""

    def batch_plan(self, data: DataSet, batch: GlobalBatch) -> Any:
        """As the planner it stands for, but for one iteration."""
        if self.counts:
            with open(self.counts, "ab") as stream:
                stream.write(bytes([batch.step]))
        if batch.step == self.step and self.way == "no store":
            if not Path(self.once).exists() or Path(self.once).stat().st_size < TIMES_LOST:
                with open(self.once, "ab") as stream:
                    stream.write(b".")
                os._exit(_NO_STORE)
        elif batch.step == self.step and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            if self.way == "crash":
                os._exit(9)
            time.sleep(1000)
        return super().batch_plan(data, batch)


def start_and_die(source: BatchSource, planner: ProgramPlanner, address: str, job: Job, sender: Connection) -> None:
    """Starts a planner, waits until it works, tells its process id, and is killed."""
    stay_with_server()
    pool = PlannerPool(source, planner, address, job)
    while pool._watches[0][0] < 0:
        time.sleep(0.1)
    sender.send(pool.process_ids[0])
    os.kill(os.getpid(), signal.SIGKILL)
