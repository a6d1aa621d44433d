"""What processes do in tests of runs that lose something while they train; in a module of its own, since ranks import it."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from penstock.data.loader import ProgramLoader
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.request import TrainResult
from penstock.runtime.run import train_rank
from penstock.stores import StoreError

LOST_AT = 3
"""The first step whose programs do not come."""


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
