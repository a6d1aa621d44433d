"""A stand-in for CUDA as far as transfers within one GPU need it: memory that processes share, and copies that are done when begun."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from training_jobs import TrainedPrograms, train_programs

from penstock.plans.plan import Plan
from penstock.programs.instructions import Program
from penstock.runtime import rank
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.transport import same_gpu
from penstock.runtime.worker import Worker


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Event:
    def __init__(self, **_: Any) -> None:
        self.recorded = False

    def record(self, *_: Any) -> None:
        self.recorded = True

    def ipc_handle(self) -> bytes:
        assert self.recorded, "an event has a handle only after it was recorded"
        return b"." * 64

    @staticmethod
    def from_ipc_handle(device: Any, handle: bytes) -> Event:
        return Event()


def train(worker: Worker, plan: Plan, programs: Sequence[Sequence[Program]], settings: TrainingSettings) -> TrainedPrograms:
    """Trains on CPU with the transport of processes that share a GPU."""
    torch.cuda.Stream, torch.cuda.Event = Stream, Event  # type: ignore[misc, assignment]
    torch.cuda.current_stream, torch.cuda.stream = Stream, nullcontext  # type: ignore[assignment]
    torch.UntypedStorage._share_cuda_ = torch.UntypedStorage._share_filename_cpu_
    torch.UntypedStorage._new_shared_cuda = torch.UntypedStorage._new_shared_filename_cpu
    same_gpu.plain_segments = nullcontext
    rank.make_transport = same_gpu.SameGpuTransport
    same_gpu._LEAST_BYTES = 512  # so that mailboxes of tiny models are as tight as those of large ones
    return train_programs(worker, plan, programs, settings)
