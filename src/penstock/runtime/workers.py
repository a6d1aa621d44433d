"""The launcher's side of worker processes: started once, used for many jobs, ended together, and never left behind.

    launcher ── pipe ──► worker 0 ─┐
             ── pipe ──► worker 1 ─┼─ process group over loopback (gloo, or NCCL on GPUs)
             ── pipe ──► worker 2 ─┘

A worker that fails or dies ends the job: the launcher names it and where it was, and ends the others; whoever started the job may have new
ones in their place (`revive`). A launcher that dies takes its workers along: each watches for its end.
"""

from __future__ import annotations

import multiprocessing.connection
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import InputError, PenstockError
from penstock.processes.fork_server import FORKED, end_processes, start_process
from penstock.runtime.telemetry.status import StatusBoard
from penstock.runtime.worker import WorkerFailure, WorkerStart, serve_jobs
from penstock.stores.listening import LOOPBACK

if TYPE_CHECKING:
    from penstock.runtime.recovering.copies import Copies
    from penstock.runtime.recovering.frozen import FrozenRanks

__all__ = ["BeginAnew", "OtherNodes", "PoolSite", "WorkerError", "WorkerPool", "launch"]

_GRACE_S = 1.0
"""How long after the first failure others are listened to: the first to be heard may only have lost its peer."""
_START_S = 120.0
_LONGEST_WAIT_S = 3600.0
"""The system's own wait cannot take weeks."""


class WorkerError(PenstockError):
    """A worker failed; the message names rank, stage, instruction and micro-batch."""

    def __init__(self, message: str, ranks: Sequence[int] = (), *, is_lost: bool = False, has_left: bool = False) -> None:
        super().__init__(message)
        self.has_left = has_left
        """Whether their node was asked to leave, and has: no fault of theirs."""
        self.lost_peer = _lost_peer(message)
        """Whether all that is known is that another went away."""
        self.ranks, self.is_lost = tuple(ranks), is_lost
        """Who, all of a node where that is lost; and whether they died, or failed in a way that they need not meet again: others in their
        place may go on."""


class BeginAnew(Exception):
    """Raised by whoever listens to have all workers ended, and others take their place."""


class OtherNodes(Protocol):
    """The workers of the same job on other machines, as far as a pool needs to know of them."""

    def ready(self, members: Sequence[int], port: int) -> None:
        """The place where all members of the job meet is there."""

    def handles(self) -> Sequence[Any]:
        """Handles to wait on for news of them."""

    def hear(self, handle: Any) -> WorkerError | None:
        """News: a failure there, or nothing that matters here. May raise whatever has to end the job here."""

    @property
    def are_done(self) -> bool:
        """Whether all of them have come to the end of the job."""


@dataclass(frozen=True)
class PoolSite:
    """The site of a pool's workers, and of those of its job that are elsewhere."""

    own: tuple[int, ...]
    """Who may have a worker here."""
    address: str
    """Of this machine."""
    others: OtherNodes


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
        copies: Copies | None = None,
        frozen: FrozenRanks | None = None,
        site: PoolSite | None = None,
    ) -> None:
        """`copies` are handed to all workers; `frozen` says which of them have stopped, and are to be ended. On several machines each has
        the pool of its `site`, whose workers begin with the first `revive`."""
        if size < 1:
            raise InputError(f"{size} workers were asked for; 1 or more was expected.")
        self.size, self.timeout_s = size, timeout_s
        self.board = StatusBoard(size)
        self._device, self._environment, self._copies, self._frozen, self._site = device, environment, copies, frozen, site
        self._broken, self._processes, self._pipes = True, dict[int, Any](), dict[int, Any]()
        self.has_failed = False
        """Whether a failure has ended the workers, or is about to: what they have told until then is still heard."""
        if site is None:
            self.revive(range(size), threads)

    def revive(self, members: Sequence[int], threads: int, meets_at: tuple[str, int] | None = None) -> None:
        """Starts workers, in place of those that a failure has ended: of all numbers, or of those that are left. All members of the job
        meet where another machine says, or else here."""
        from penstock.runtime.transport.rendezvous import serve_rendezvous

        site, here = self._site, LOOPBACK if self._site is None else self._site.address
        self.all_members = tuple(members)
        self.members = self.all_members if site is None else tuple(rank for rank in members if rank in site.own)
        """Those that are here."""
        self._broken, self.has_failed, self._ended = False, False, dict[int, str]()
        if meets_at is None:
            self._store = serve_rendezvous(here)  # on a free port, so that jobs side by side cannot meet
            meets_at = here, self._store.port
            if site is not None:
                site.others.ready(self.all_members, self._store.port)
        self.board.clear()
        pairs = {rank: FORKED.Pipe() for rank in self.members}
        self._processes = {}
        devices = range(self.size) if site is None else site.own
        for rank in self.members:
            start = WorkerStart(
                rank, self.size, self.all_members, meets_at, here, devices.index(rank), len(devices), self._device, threads,
                self.timeout_s, self.board.memory, dict(self._environment(rank)) if self._environment else {}, self._copies,
            )  # fmt: skip
            self._processes[rank] = start_process(f"rank {rank}", serve_jobs, start, pairs[rank][1])
        for _, its in pairs.values():
            its.close()
        self._pipes = {rank: mine for rank, (mine, _) in pairs.items()}
        try:
            self._collect(time.monotonic() + _START_S)
        except BaseException:
            self._kill()
            raise

    def pids(self) -> list[int]:
        """The workers' process ids, in the order of ranks."""
        return [process.pid or 0 for process in self._processes.values()]

    def run(self, function: Job, *arguments: Any, timeout_s: float | None = None, listen: Listen | None = None) -> list[Any]:
        """Calls `function(worker, *arguments)` in every worker; the results in the order of ranks. A failure ends all workers.

        `listen(rank, word)` hears what workers tell meanwhile.
        """
        return self.run_each(function, [arguments] * len(self.members), timeout_s=timeout_s, listen=listen)

    def run_each(
        self, function: Job, arguments: list[tuple[Any, ...]], *, timeout_s: float | None = None, listen: Listen | None = None
    ) -> list[Any]:
        """Calls `function(worker, *own)` in every worker, `own` being its entry of `arguments`."""
        if self._broken:
            raise WorkerError("the workers were ended by an earlier failure. Start new ones.")
        try:
            for pipe, own in zip(self._pipes.values(), arguments, strict=True):
                with suppress(OSError):  # one that has died is told of when its answer is waited for
                    pipe.send((function, own))
            return self._collect(time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s), listen, whole=True)
        except BaseException as error:
            self._kill(listen if isinstance(error, WorkerError | BeginAnew) else None)
            raise

    def _collect(self, deadline: float, listen: Listen | None = None, *, whole: bool = False) -> list[Any]:
        """The answers of all workers, or the failure that came first; `whole`: those elsewhere are waited for too."""
        answers: dict[int, Any] = {}
        others = None if self._site is None else self._site.others
        while len(answers) < len(self.members) or (whole and others is not None and not others.are_done):
            waiting: dict[Any, int] = {self._pipes[rank]: rank for rank in self.members if rank not in answers}
            left_s = deadline - time.monotonic()
            longest_s = _LONGEST_WAIT_S if self._frozen is None else self._end_frozen(list(waiting.values()))
            ready = multiprocessing.connection.wait([*waiting, *self._elsewhere()], timeout=min(max(0.0, left_s), longest_s))
            if not ready and left_s <= longest_s:
                raise WorkerError(self._late(sorted(waiting.values())))
            for pipe in ready:
                if pipe not in waiting:
                    if (heard := self._heard(pipe)) is not None:
                        raise self._cause(heard, listen)
                    continue
                rank = waiting[pipe]
                ok, answer = self._answer(rank)
                if ok is None:
                    if listen is not None:
                        listen(rank, answer)
                elif not ok:
                    raise self._cause(self._failed(rank, answer), listen, {rank})
                else:
                    answers[rank] = answer
        return [answers[rank] for rank in self.members]

    def _elsewhere(self) -> Sequence[Any]:
        """Handles that bring news of other machines."""
        return () if self._site is None else self._site.others.handles()

    def _heard(self, handle: Any) -> WorkerError | None:
        assert self._site is not None
        return self._site.others.hear(handle)

    def _end_frozen(self, ranks: Sequence[int]) -> float:
        """Ends a worker that has stopped: it is then dead like any other. Returns how long to wait before the next look."""
        assert self._frozen is not None
        found = self._frozen.look({rank: self._processes[rank].pid or 0 for rank in ranks}, self.board)
        for rank, why in found.items():
            self._ended[rank] = f"{why} {self.board.where(rank)}, and was ended"
            self._processes[rank].kill()
        return self._frozen.look_s

    def _answer(self, rank: int) -> tuple[bool | None, Any]:
        """(True, result), (False, failure), (False, None) of a worker that died, or (None, word) of one that only tells something."""
        try:
            ok, answer = self._pipes[rank].recv()
            return ok, answer
        except (EOFError, OSError):  # it may have died within a word
            return False, None

    def _cause(self, failure: WorkerError, listen: Listen | None, heard: Collection[int] = ()) -> WorkerError:
        """Picks the cause among several failures: a worker that died, else one that failed by itself, else the first that was heard."""
        self.has_failed = True
        asked, end = set(heard), time.monotonic() + _GRACE_S
        while _lost_peer(str(failure)):
            waiting: dict[Any, int] = {self._pipes[other]: other for other in self.members if other not in asked}
            elsewhere = self._elsewhere()
            sources = [*waiting, *elsewhere]
            ready = multiprocessing.connection.wait(sources, timeout=max(0.0, end - time.monotonic())) if sources else []
            if not ready:
                break
            for pipe in ready:
                if pipe not in waiting:
                    found = self._heard(pipe)
                else:
                    ok, answer = self._answer(waiting[pipe])
                    found = self._failed(waiting[pipe], answer) if ok is False else None
                    asked |= set() if ok is None else {waiting[pipe]}
                    if ok is None and listen is not None:
                        listen(waiting[pipe], answer)
                if found is not None and not _lost_peer(str(found)):
                    failure = found
        return failure

    def _failed(self, rank: int, failure: WorkerFailure | None) -> WorkerError:
        """Describes the end of a worker: its own words, or how it died."""
        if failure is not None:
            return WorkerError(failure.text, [rank], is_lost=failure.is_lost)
        process = self._processes[rank]
        process.join(_GRACE_S)
        how = self._ended.get(rank) or f"{_how(process.exitcode)} {self.board.where(rank)}"
        return WorkerError(f"rank {rank} {how}.", [rank], is_lost=True)

    def _late(self, ranks: list[int]) -> str:
        lines = [f"  rank {rank} is {self.board.where(rank)}" for rank in ranks]
        return f"{len(ranks)} of {len(self.members)} ranks did not finish in time:\n" + "\n".join(lines)

    def _kill(self, listen: Listen | None = None) -> None:
        """Ends all workers at once; `listen` hears what they have told until then: others may go on from where that leads to."""
        self._broken = self.has_failed = True
        end_processes(*self._processes.values())
        try:
            for rank in self._pipes if listen is not None else ():
                while self._pipes[rank].poll() and (found := self._answer(rank))[0] is not False:
                    if found[0] is None:
                        listen(rank, found[1])
        finally:
            for connection in self._pipes.values():
                connection.close()

    def close(self) -> None:
        """Lets the workers end by themselves, and ends those that do not."""
        if self._broken:
            return
        self._broken = True
        for pipe in self._pipes.values():
            try:
                pipe.send(None)
            except (BrokenPipeError, OSError):
                continue  # it has ended already, which is all that was asked
        end = time.monotonic() + 10.0
        for process in self._processes.values():
            process.join(max(0.0, end - time.monotonic()))
        self._kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def launch(function: Job, size: int, *arguments: Any, **options: Any) -> list[Any]:
    """Runs one job in `size` new processes; the results in the order of ranks."""
    with WorkerPool(size, **options) as pool:
        return pool.run(function, *arguments)


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
