"""What processes do in tests of runs that lose something while they train; in a module of its own, since ranks import it."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any
from unittest import mock

from penstock.data.loader import ProgramLoader
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import EvalRecord, TrainResult
from penstock.runtime.run import Run, train_rank
from penstock.stores import StoreError

LOST_AT = 3
"""The first step whose programs do not come, or after which a rank dies."""
BEST_AT = 2
"""After so many steps the held-out loss is lowest."""


def lose_store(*given: Any) -> TrainResult:
    """One rank's run: its store goes away, and what it then writes takes longer than the end of a process does."""
    fetch, write = ProgramLoader._fetched, CheckpointWriter._write_part

    def fetched(loader: ProgramLoader) -> Any:
        if loader.step >= LOST_AT:
            raise StoreError("the store is away.")
        return fetch(loader)

    def written(writer: CheckpointWriter, *part: Any) -> None:
        time.sleep(1.0)
        write(writer, *part)

    with mock.patch.object(ProgramLoader, "_fetched", fetched), mock.patch.object(CheckpointWriter, "_write_part", written):
        return train_rank(*given)


def lose_rank_while_saving(worker: Any, *given: Any) -> TrainResult:
    """One rank's run: what is saved does not come to disk, and rank 1 dies some steps later; those who take their places save what they
    like."""
    save = RunSaves.after

    def after(saves: RunSaves, done: int, *what: Any, **how: Any) -> None:
        save(saves, done, *what, **how)
        if worker.rank == 1 and done == LOST_AT + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Run, "_evaluate", lambda _, done: EvalRecord(done, 1.0 + abs(done - BEST_AT), 0.0)):
        if given[-1] is not None:
            return train_rank(worker, *given)
        hang = mock.patch.object(CheckpointWriter, "_write_part", lambda *_: threading.Event().wait())
        with hang, mock.patch.object(RunSaves, "after", after):
            return train_rank(worker, *given)
