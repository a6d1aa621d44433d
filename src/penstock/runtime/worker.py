"""A worker process from inside: it joins the processes of its job, runs the functions that the launcher sends, and says how it ends."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, PenstockError
from penstock.processes.fork_server import SIGNALS, await_parent
from penstock.runtime.telemetry.process_files import forget_this_process
from penstock.runtime.telemetry.status import Status, StatusBoard

if TYPE_CHECKING:
    from penstock.processes.shared_memory import SharedMemory
    from penstock.runtime.recovering.copies import Copies
    from penstock.runtime.transport.world import ProcessGroups

__all__ = ["Worker", "WorkerFailure", "WorkerStart", "joined", "serve_jobs"]

_LONGEST_OPERATION_S = 1800.0
"""Of transfers and collectives among the processes of torchrun."""


@dataclass(frozen=True)
class Worker:
    """A worker process as the function of a job sees it: its number, device, process groups, and its line to the launcher."""

    rank: int
    size: int
    groups: ProcessGroups
    """Its process groups, which know its device too."""
    status: Status
    tell: Callable[[Any], None] = lambda word: None
    """Says something to the launcher while the job runs."""
    asked_to_end: Callable[[], int] = lambda: 0
    """The signal that asks for an end of the job when it next can; 0: none came; below 0: one that asks this node alone to leave it."""
    copies: Copies | None = None
    """Where to leave what it has learned, for others to go on from."""

    @property
    def shared_gpu(self) -> bool:
        """Whether several workers use this one's GPU."""
        return self.groups.staged


@contextmanager
def joined(device: str, members: Sequence[int]) -> Iterator[Worker]:
    """This process as a worker among those that torchrun (or Slurm with the same variables) started, which are these devices in turn."""
    import torch

    from penstock.runtime.transport.allocator import keep_freed_memory, use_expandable_segments
    from penstock.runtime.transport.rendezvous import job_store
    from penstock.runtime.transport.world import ProcessGroups

    keep_freed_memory()
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise InputError(f"local rank {local} has no CUDA device: this machine has {torch.cuda.device_count()}.")
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
        use_expandable_segments()
    store, place, size = job_store()
    groups = ProcessGroups(device, store=store, own=members[place], members=members, timeout_s=_LONGEST_OPERATION_S)
    yield Worker(members[place], size, groups, Status(StatusBoard(size).memory, place))
    groups.part()


@dataclass(frozen=True)
class WorkerStart:
    """The arguments of a worker process."""

    rank: int
    size: int
    members: tuple[int, ...]
    meets_at: tuple[str, int]
    address: str
    """Of its machine."""
    place: int
    num_here: int
    """Which it is of how many on its machine."""
    device: str
    threads: int
    timeout_s: float
    board: SharedMemory
    environment: dict[str, str]
    copies: Copies | None


@dataclass(frozen=True)
class WorkerFailure:
    """A worker's message about its own failure."""

    text: str
    is_lost: bool
    """Whether another in its place may go on; not where its input was at fault, which another would meet too."""


def serve_jobs(start: WorkerStart, pipe: Any) -> None:
    """A worker's whole life."""
    threading.Thread(target=_follow, daemon=True).start()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # the launcher hears it, and ends its workers
    status = 0
    try:
        worker = _open(start, lambda word: pipe.send((None, word)))
        pipe.send((True, None))
        while (job := pipe.recv()) is not None:
            function, arguments = job
            pipe.send((True, function(worker, *arguments)))
    except EOFError:
        status = 0
    except BaseException as error:
        failure = WorkerFailure(_failure(start.rank, error), not isinstance(error, PenstockError) or _failed_in_program(error))
        with suppress(OSError):  # the launcher has died, which may be why this one failed
            pipe.send((False, failure))
        status = 1
    pipe.close()
    # No tidy end: gloo's and NCCL's threads may abort a process that leaves while a peer is still talking to it.
    os._exit(status)


def _follow() -> None:
    """Ends this process with its launcher."""
    await_parent()
    forget_this_process()
    os._exit(1)


def _open(start: WorkerStart, tell: Callable[[Any], None]) -> Worker:
    os.environ.update(start.environment)
    import torch

    from penstock.runtime.transport.allocator import keep_freed_memory, use_expandable_segments
    from penstock.runtime.transport.rendezvous import find_rendezvous, talk_from
    from penstock.runtime.transport.world import ProcessGroups

    torch.set_num_threads(start.threads)
    keep_freed_memory()
    talk_from(start.address)
    host, port = start.meets_at
    store = find_rendezvous(port, host)
    device, shared = start.device, False
    if device == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise InputError("device is cuda, but this machine has no CUDA device. Use cpu.")
        device, shared = f"cuda:{start.place % count}", count < start.num_here
        torch.cuda.set_device(device)
        use_expandable_segments()
    groups = ProcessGroups(
        device, staged=shared, store=store, own=start.rank, members=start.members, timeout_s=start.timeout_s
    )  # fmt: skip
    status = Status(start.board, start.rank)
    return Worker(start.rank, start.size, groups, status, tell, status.asked_to_end, start.copies)


def _failed_in_program(error: PenstockError) -> bool:
    from penstock.runtime.executor import ExecutionError

    return isinstance(error, ExecutionError)


def _failure(rank: int, error: BaseException) -> str:
    """The failure as the launcher tells it: what `ExecutionError` says, or where it happened."""
    from penstock.runtime.executor import ExecutionError

    if isinstance(error, PenstockError):
        text = str(error)
        if isinstance(error, ExecutionError) and os.environ.get("PENSTOCK_TRACEBACK", "0") not in ("", "0"):
            text += "\n" + "".join(traceback.format_exception(error))
        return text if text.startswith("rank ") else f"rank {rank}: {text}"
    return f"rank {rank} failed: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
