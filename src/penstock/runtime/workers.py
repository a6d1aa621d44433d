"""Local worker processes: started once, used for many jobs, ended together, and never left behind.

    launcher ── pipe ──► worker 0 ─┐
             ── pipe ──► worker 1 ─┼─ process group over loopback (gloo, or NCCL on GPUs)
             ── pipe ──► worker 2 ─┘

A worker that fails or dies ends the job: the launcher names it and where it was, and ends the others. A launcher that dies takes its
workers along: each watches for its end.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError, PenstockError
from penstock.processes.fork_server import FORKED, SIGNALS, await_parent, start_process
from penstock.runtime.telemetry.status import Status, StatusBoard

if TYPE_CHECKING:
    from penstock.runtime.transport.world import ProcessGroups

__all__ = ["Worker", "WorkerError", "WorkerPool", "joined", "launch"]

_GRACE_S = 1.0
"""How long after the first failure others are listened to: the first to be heard may only have lost its peer."""
_START_S = 120.0
_LONGEST_OPERATION_S = 1800.0
"""Of transfers and collectives among the processes of torchrun."""
_LONGEST_WAIT_S = 3600.0
"""The system's own wait cannot take weeks."""


class WorkerError(PenstockError):
    """A worker failed; the message names rank, stage, instruction and micro-batch."""


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
    """The signal that asks for an end of the job when it next can; 0: none came."""

    @property
    def shared_gpu(self) -> bool:
        """Whether several workers use this one's GPU."""
        return self.groups.staged


Job = Callable[..., Any]
"""Called as `function(worker, *arguments)` in every worker; it must be importable there."""
Listen = Callable[[int, Any], None]


class WorkerPool:
    """Worker processes that run one job after the other.

    `environment(rank)` are variables that a worker sets before it touches its device, such as its share of a GPU.

    >>> with WorkerPool(2) as pool: pool.run(os_getpid)   # doctest: +SKIP
    [4711, 4712]
    """

    def __init__(
        self,
        size: int,
        *,
        device: str = "cpu",
        threads: int = 1,
        timeout_s: float = 600.0,
        environment: Callable[[int], Mapping[str, str]] | None = None,
    ) -> None:
        from penstock.runtime.transport.rendezvous import serve_rendezvous

        if size < 1:
            raise InputError(f"{size} workers were asked for; 1 or more was expected.")
        self.size, self.timeout_s = size, timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self.board = StatusBoard(self._folder / "status", size)
        self._broken = False
        self._store = serve_rendezvous()  # on a free port, so that jobs side by side cannot meet
        pairs = [FORKED.Pipe() for _ in range(size)]
        self._processes = []
        for rank in range(size):
            start = _Start(
                rank,
                size,
                self._store.port,
                device,
                threads,
                timeout_s,
                str(self.board.path),
                dict(environment(rank)) if environment else {},
            )
            self._processes.append(start_process(f"rank {rank}", _serve, start, pairs[rank][1]))
        for _, its in pairs:
            its.close()
        self._pipes = [mine for mine, _ in pairs]
        try:
            self._collect(time.monotonic() + _START_S)
        except BaseException:
            self._kill()
            raise

    def pids(self) -> list[int]:
        """The workers' process ids, in the order of ranks."""
        return [process.pid or 0 for process in self._processes]

    def run(self, function: Job, *arguments: Any, timeout_s: float | None = None, listen: Listen | None = None) -> list[Any]:
        """Calls `function(worker, *arguments)` in every worker; the results in the order of ranks. A failure ends all workers.

        `listen(rank, word)` hears what workers tell meanwhile.
        """
        return self.run_each(function, [arguments] * self.size, timeout_s=timeout_s, listen=listen)

    def run_each(
        self, function: Job, arguments: list[tuple[Any, ...]], *, timeout_s: float | None = None, listen: Listen | None = None
    ) -> list[Any]:
        """Calls `function(worker, *own)` in every worker, `own` being its entry of `arguments`."""
        if self._broken:
            raise WorkerError("the workers were ended by an earlier failure. Start new ones.")
        try:
            for pipe, own in zip(self._pipes, arguments, strict=True):
                pipe.send((function, own))
            return self._collect(time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s), listen)
        except BaseException:
            self._kill()
            raise

    def _collect(self, deadline: float, listen: Listen | None = None) -> list[Any]:
        """The answers of all workers, or the failure that came first."""
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            left_s = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), timeout=min(max(0.0, left_s), _LONGEST_WAIT_S))
            if not ready and left_s <= _LONGEST_WAIT_S:
                raise WorkerError(self._late(sorted(waiting.values())))
            for pipe in ready:
                rank = waiting[pipe]
                ok, answer = self._answer(rank)
                if ok is None:
                    if listen is not None:
                        listen(rank, answer)
                elif not ok:
                    raise WorkerError(self._cause(rank, answer))
                else:
                    answers[rank] = answer
        return [answers[rank] for rank in range(self.size)]

    def _answer(self, rank: int) -> tuple[bool | None, Any]:
        """(True, result), (False, message), (False, None) of a worker that died, or (None, word) of one that only tells something."""
        try:
            ok, answer = self._pipes[rank].recv()
            return ok, answer
        except (EOFError, ConnectionResetError):
            return False, None

    def _cause(self, rank: int, message: str | None) -> str:
        """What to tell: a worker that died is the cause, else one that failed by itself, else the first that was heard."""
        heard: dict[int, str | None] = {rank: message}
        end = time.monotonic() + _GRACE_S
        while message is None or _lost_peer(message):
            waiting: dict[Any, int] = {self._pipes[other]: other for other in range(self.size) if other not in heard}
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic())) if waiting else []
            if not ready:
                break
            for pipe in ready:
                other = waiting[pipe]
                ok, answer = self._answer(other)
                if ok:
                    heard[other] = "done"
                elif ok is False:
                    heard[other] = answer
                    if answer is None or (message is not None and not _lost_peer(answer)):
                        rank, message = other, answer
        if message is not None:
            return message
        process = self._processes[rank]
        process.join(_GRACE_S)
        return f"rank {rank} {_how(process.exitcode)} {self.board.where(rank)}."

    def _late(self, ranks: list[int]) -> str:
        lines = [f"  rank {rank} is {self.board.where(rank)}" for rank in ranks]
        return f"{len(ranks)} of {self.size} ranks did not finish in time:\n" + "\n".join(lines)

    def _kill(self) -> None:
        """Ends all workers at once."""
        self._broken = True
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
        self._release()

    def close(self) -> None:
        """Lets the workers end by themselves, and ends those that do not."""
        if self._broken:
            return
        self._broken = True
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue  # it has ended already, which is all that was asked
        end = time.monotonic() + 10.0
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        self._kill()

    def _release(self) -> None:
        for connection in self._pipes:
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def launch(function: Job, size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Runs one job in `size` new processes; the results in the order of ranks."""
    with WorkerPool(size, **options) as pool:
        return pool.run(function, *arguments)


@contextmanager
def joined(device: str, members: Sequence[int]) -> Iterator[Worker]:
    """This process as a worker among those that torchrun (or Slurm with the same variables) started, which are these devices in turn."""
    import torch

    from penstock.runtime.transport.allocator import use_expandable_segments
    from penstock.runtime.transport.rendezvous import job_store
    from penstock.runtime.transport.world import ProcessGroups

    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise InputError(f"local rank {local} has no CUDA device: this machine has {torch.cuda.device_count()}.")
        device = f"cuda:{local}"
        torch.cuda.set_device(device)
        use_expandable_segments()
    store, place, size = job_store()
    groups = ProcessGroups(device, store=store, own=members[place], members=members, timeout_s=_LONGEST_OPERATION_S)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        board = StatusBoard(Path(folder) / "status", size)
        yield Worker(members[place], size, groups, Status(board.path, place))
        groups.part()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    return f"ended with status {code}"


_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Timed out waiting",
    "Application timeout",
)


def _lost_peer(message: str) -> bool:
    """Whether a failure only says that another rank went away."""
    return any(text in message for text in _LOST)


@dataclass(frozen=True)
class _Start:
    """The arguments of a worker process."""

    rank: int
    size: int
    port: int
    device: str
    threads: int
    timeout_s: float
    status_path: str
    environment: dict[str, str]


def _serve(start: _Start, pipe: Any) -> None:
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
        pipe.send((False, _told(start.rank, error)))
        status = 1
    pipe.close()
    # No tidy end: gloo's and NCCL's threads may abort a process that leaves while a peer is still talking to it.
    os._exit(status)


def _follow() -> None:
    """Ends this process with its launcher."""
    await_parent()
    os._exit(1)


def _open(start: _Start, tell: Callable[[Any], None]) -> Worker:
    os.environ.update(start.environment)
    import torch

    from penstock.runtime.transport.allocator import use_expandable_segments
    from penstock.runtime.transport.rendezvous import find_rendezvous, only_here
    from penstock.runtime.transport.world import ProcessGroups

    torch.set_num_threads(start.threads)
    only_here()
    store = find_rendezvous(start.port)
    device, shared = start.device, False
    if device == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise InputError("device is cuda, but this machine has no CUDA device. Use cpu.")
        device, shared = f"cuda:{start.rank % count}", count < start.size
        torch.cuda.set_device(device)
        use_expandable_segments()
    groups = ProcessGroups(
        device, staged=shared, store=store, own=start.rank, members=range(start.size), timeout_s=start.timeout_s
    )  # fmt: skip
    status = Status(Path(start.status_path), start.rank)
    return Worker(start.rank, start.size, groups, status, tell, status.asked_to_end)


def _told(rank: int, error: BaseException) -> str:
    """The failure as the launcher tells it: what `ExecutionError` says, or where it happened."""
    from penstock.runtime.executor import ExecutionError

    if isinstance(error, PenstockError):
        text = str(error)
        if isinstance(error, ExecutionError) and os.environ.get("PENSTOCK_TRACEBACK", "0") not in ("", "0"):
            text += "\n" + "".join(traceback.format_exception(error))
        return text if text.startswith("rank ") else f"rank {rank}: {text}"
    return f"rank {rank} failed: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}"
