"""The processes that plan batches ahead of training, and the pool that starts, watches and replaces them.

Planner i of n plans iterations i, i + n, i + 2n … after the last one that all ranks have acknowledged, and blocks on the store when it
is far enough ahead. One that takes over from another begins at the same rule: it plans again what is still in store, which changes
nothing for ranks that already have it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.data.batches import GlobalBatches
from penstock.data.dataset import DataSet, open_data
from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.planning import PlanningError, ProgramPlanner, describe_samples
from penstock.errors import InputError
from penstock.processes.fork_server import FORKED, await_parent, end_processes, start_process
from penstock.processes.states import is_stopped
from penstock.stores import Job, Store, StoreError, open_store

if TYPE_CHECKING:
    from penstock.batching.plan import BatchPlan

__all__ = [
    "LOG_FOLDER_VARIABLE",
    "LOG_LEVEL_VARIABLE",
    "BatchSource",
    "PlannerPool",
    "entries_of",
    "failure_entries",
    "open_entry",
    "run_planner",
]

LOG_LEVEL_VARIABLE = "PENSTOCK_LOG_LEVEL"
LOG_FOLDER_VARIABLE = "PENSTOCK_LOG_DIR"

_PROGRAM, _FAILURE = b"P", b"F"
_STEP, _BUSY, _ALIVE = range(3)
"""What a planner tells: the iteration it plans, since when (0: it waits for the store), and when it was last alive."""
_NOTHING = (-1.0, 0.0, 0.0)
"""What one tells that has not begun, or is done."""
_BEAT_S = 1.0
_NO_STORE = 75
"""Status of a planner whose store is gone: no fault of the iteration that it was at."""
_MOST_DEATHS = 3
"""An iteration at which so many planners died cannot be planned."""


@dataclass(frozen=True)
class BatchSource:
    """Which batches a run takes, said so that another process can open them too."""

    folder: str
    split: str = "train"
    samples_per_batch: int | None = None
    tokens_per_batch: int | None = None
    limits: Limits = NO_LIMITS
    seed: int = 0
    shuffle: bool = True
    num_steps: int | None = None
    """Steps of the run; None: it never ends."""
    state: Mapping[str, int] | None = None
    """What a checkpoint kept of the batches, so that a run resumes without reading the lengths of earlier steps."""

    def open(self) -> tuple[DataSet, GlobalBatches]:
        """The data and its batches."""
        data = open_data(self.folder, self.split)
        batches = data.batches(self.samples_per_batch, self.tokens_per_batch, limits=self.limits, seed=self.seed, shuffle=self.shuffle)
        if self.state is not None:
            batches.restore(self.state)
        return data, batches


def entries_of(planner: ProgramPlanner, data: DataSet, batches: GlobalBatches, step: int) -> tuple[dict[int, bytes], BatchPlan | str]:
    """The entries of one program for the store, each rank's, with the plan behind them; or for all of them why there is none."""
    from penstock.programs.binary import encode

    try:
        planned, programs = planner.window(data, batches, step)
    except PlanningError as error:
        return failure_entries(planner, str(error)), str(error)
    except Exception as error:  # a fault of ours: planning again would not help, and the ranks must not wait for ever
        logging.getLogger("penstock.planner").exception("iteration %d", step)
        reason = f"{type(error).__name__}: {error}. {describe_samples(batches[step], len(data))}"
        message = f"iteration {step} cannot be planned: {reason}"
        return failure_entries(planner, message), message
    return {program.rank: _PROGRAM + encode(program) for program in programs}, planned


def _by_place(entries: Mapping[int, bytes]) -> dict[int, bytes]:
    """The entries of ranks as a store counts its readers: from 0 on, though a plan may leave devices out."""
    return dict(enumerate(entries[rank] for rank in sorted(entries)))


def failure_entries(planner: ProgramPlanner, message: str) -> dict[int, bytes]:
    """Tells every rank that an iteration cannot be planned."""
    return dict.fromkeys(planner.plan.ranks, _FAILURE + message.encode())


def open_entry(entry: bytes, where: str) -> Any:
    """The program in an entry; the failure that it tells of is raised."""
    from penstock.programs.binary import decode

    if entry[:1] == _FAILURE:
        raise PlanningError(entry[1:].decode(errors="replace"))
    if entry[:1] != _PROGRAM:
        raise StoreError(f"{where} is neither a program nor a failure.")
    return decode(entry[1:], where)


def run_planner(source: BatchSource, planner: ProgramPlanner, address: str, job: Job, index: int, count: int, watch: Any) -> None:
    """Runs planner process `index` of `count`, which plans its share of the iterations until it is ended.

    `watch` tells its supervisor that it lives, what it is at, and since when.
    """
    threading.Thread(target=_beat, args=(watch,), daemon=True).start()
    try:
        _plan_all(source, planner, address, job, index, count, watch)
    except StoreError as error:  # the ranks have lost it too, and tell; a planner may be needed again if it comes back
        _logger(index).info("%s", error)
        os._exit(_NO_STORE)


def _plan_all(source: BatchSource, planner: ProgramPlanner, address: str, job: Job, index: int, count: int, watch: Any) -> None:
    log = _logger(index)
    data, batches = source.open()
    store = open_store(address, job)
    for step in _own_steps(source, planner, store.done() + 1, index, count):
        watch[_STEP], watch[_BUSY] = step, time.monotonic()
        start_s, cpu_s = time.perf_counter(), time.process_time()
        entries, planned = entries_of(planner, data, batches, step)
        times_s = time.perf_counter() - start_s, time.process_time() - cpu_s
        watch[_BUSY] = 0.0
        size = sum(map(len, entries.values()))
        log.debug("iteration %d planned in %.3f s (%.3f s of processor time), %d bytes", step, *times_s, size)
        _dump(planner, entries, planned, batches, step, times_s)
        store.publish(step, _by_place(entries))
    store.drain()
    store.close()


def _beat(watch: Any) -> None:
    """Shows life, and ends with the process that started this one, however that ended."""
    watch[_ALIVE] = time.monotonic()
    while not await_parent(_BEAT_S):
        watch[_ALIVE] = time.monotonic()
    os._exit(1)


def _own_steps(source: BatchSource, planner: ProgramPlanner, step: int, index: int, count: int) -> Iterator[int]:
    """The first iterations of this planner's programs, from `step` on, which is one of somebody's."""
    while source.num_steps is None or step < source.num_steps:
        if step % count == index:
            yield step
        step = planner.drains.after(step)


def _logger(index: int) -> logging.Logger:
    """Goes to a file for each planner where a folder is named, to stderr otherwise."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, "WARNING").upper()
    log = logging.getLogger(f"penstock.planner.{index}")
    folder = os.environ.get(LOG_FOLDER_VARIABLE)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        handler: logging.Handler = logging.FileHandler(Path(folder) / f"planner-{index}.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
    log.setLevel(level if level in logging.getLevelNamesMapping() else "WARNING")
    return log


def _dump(
    planner: ProgramPlanner, entries: Mapping[int, bytes], planned: BatchPlan | str, batches: GlobalBatches, step: int,
    times_s: tuple[float, float],
) -> None:  # fmt: skip
    """Writes the plan of an iteration, or why there is none, and what it took, where a folder for that is named."""
    from penstock.programs.dump import VARIABLE, dump_iteration

    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    from penstock.files import write_json

    batch = batches[step]
    statistics = {"step": step, "samples": len(batch.samples), "tokens": batch.num_tokens, "planning_s": times_s[0],
                  "planning_cpu_s": times_s[1], "programs_bytes": sum(map(len, entries.values()))}  # fmt: skip
    plan = {"error": planned} if isinstance(planned, str) else planned.to_dict()
    write_json(Path(folder) / f"iteration-{step:06d}.json", {**statistics, "lengths": batch.lengths.tolist(), "plan": plan})
    if not isinstance(planned, str):
        programs = [open_entry(entry, f"the program of rank {rank}") for rank, entry in entries.items()]
        dump_iteration(programs, _memory_bytes(planned), _trace(planner, planned), folder)


def _memory_bytes(planned: BatchPlan) -> dict[tuple[int, int], tuple[float, float]] | None:
    """(peak, limit) of each replica and stage; None where the plan has fixed micro-batches, which predict none."""
    found = {
        (r, s): limits
        for r, replica in enumerate(planned.replicas)
        for s, limits in enumerate(zip(replica.peak_bytes, planned.limit_bytes[r] if planned.limit_bytes else (), strict=False))
    }
    return found or None


def _trace(planner: ProgramPlanner, planned: BatchPlan) -> Any:
    """The simulated timeline of the slowest replica; None without costs."""
    if planner.costs is None or planned.method == "fixed":
        return None
    from penstock.batching.workloads import batch_workload
    from penstock.timing.execution import execute
    from penstock.timing.traces import trace_of

    index, replica = max(enumerate(planned.replicas), key=lambda pair: pair[1].predicted_s)
    return trace_of(execute(replica.schedule, batch_workload(planner.costs, replica.micro_batches, index)))


class PlannerPool:
    """The planners of one node, `count` of all; a thread replaces those that die or hang."""

    def __init__(
        self, source: BatchSource, planner: ProgramPlanner, address: str, job: Job, *, first: int = 0, own: int = 1, count: int = 1,
        hang_s: float = 300.0,
    ) -> None:  # fmt: skip
        if not 1 <= own <= count or not 0 <= first <= count - own:
            raise InputError(f"planners {first} to {first + own - 1} were asked for here, of {count} in all.")
        self._source, self._address, self._count, self._hang_s = source, address, count, hang_s
        # Raw: a lock would be a semaphore with a name, which nobody removes when all processes of a run are killed at once.
        self._watches = {index: FORKED.RawArray("d", 3) for index in range(first, first + own)}
        self._stopped = Counter[int]()
        """How often in a row each was found stopped."""
        self.num_replaced = 0
        self.on_replaced: Callable[[int, str], None] = lambda step, text: None
        """Is told of the iteration at which a planner was lost, and how, in the pool's thread."""
        self._begin(planner, job)

    def _begin(self, planner: ProgramPlanner, job: Job) -> None:
        """Starts the planners, and the thread that watches them."""
        self._planner, self._job = planner, job
        self._processes = {index: self._start(index) for index in self._watches}
        self._wake, self._stopping = FORKED.Pipe(duplex=False)
        self._deaths: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._supervise, name="planners", daemon=True)
        self._thread.start()

    def adopt(self, step: int, planner: ProgramPlanner) -> Job:
        """Plans for another plan from iteration `step` on. What was planned ahead for the one before is left alone: ranks that adopt the
        plan read the job's next generation, and the job's owner deletes the keys of all of them at the end. Returns that generation."""
        self.stop()
        self._begin(planner, self._job.adopted(step, len(planner.plan.ranks)))
        return self._job

    @property
    def process_ids(self) -> list[int]:
        """The process ids of the planners that are at work."""
        return [process.pid for process in self._processes.values() if process.is_alive()]

    def stop(self) -> None:
        """Ends the planners, at work or not."""
        self._stopping.close()
        self._thread.join()
        self._wake.close()
        end_processes(*self._processes.values())

    def __enter__(self) -> PlannerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, index: int) -> Any:
        self._watches[index][:] = _NOTHING
        arguments = (self._source, self._planner, self._address, self._job, index, self._count, self._watches[index])
        return start_process(f"planner {index}", run_planner, *arguments)

    def _supervise(self) -> None:
        """Sleeps until a planner ends, until it is time to look whether one hangs, or until it is told to stop."""
        done: set[int] = set()
        while True:
            alive = {self._processes[index].sentinel: index for index in self._processes if index not in done}
            ready = wait([self._wake, *alive], timeout=min(_BEAT_S, self._until_a_hang()))
            if self._wake in ready:
                return
            for sentinel, index in alive.items():
                hung = sentinel not in ready
                if hung and not self._hangs(index):
                    continue
                process, step = self._processes[index], int(self._watches[index][_STEP])
                end_processes(process)
                how = "hung" if hung else f"died with status {process.exitcode}"
                if process.exitcode != 0 and (process.exitcode == _NO_STORE or self._may_replace(index, step, how)):
                    self._processes[index] = self._start(index)
                    self.num_replaced += 1
                    self.on_replaced(step, f"planner {index} {how}, and another plans in its place")
                else:
                    done.add(index)
                    self._watches[index][:] = _NOTHING

    def _until_a_hang(self) -> float:
        """Seconds until a planner might have hung for too long."""
        since = [moment for watch in self._watches.values() for moment in watch[_BUSY:] if moment]
        return max(0.05, min(since, default=time.monotonic()) + self._hang_s - time.monotonic())

    def _hangs(self, index: int) -> bool:
        """Whether it is at one iteration for too long, shows no life at all, or was stopped by a signal."""
        now, pid = time.monotonic(), self._processes[index].pid
        self._stopped[index] = self._stopped[index] + 1 if pid and is_stopped(pid) else 0
        return self._stopped[index] > 1 or any(moment and now - moment > self._hang_s for moment in self._watches[index][_BUSY:])

    def _may_replace(self, index: int, step: int, what: str) -> bool:
        """Whether another try makes sense; if not, the ranks are told."""
        log = logging.getLogger("penstock.planners")
        self._deaths[step] += 1
        log.warning("planner %d %s at iteration %d", index, what, step)
        if self._deaths[step] < _MOST_DEATHS:
            return True
        try:
            data, batches = self._source.open()
            store: Store = open_store(self._address, self._job)
            failed = step if step >= 0 else next(_own_steps(self._source, self._planner, store.done() + 1, index, self._count))
            samples = describe_samples(batches[failed], len(data))
            message = f"iteration {failed} cannot be planned: its planner {what}, {_MOST_DEATHS} times. {samples}"
            store.publish(failed, _by_place(failure_entries(self._planner, message)))
            store.close()
        except Exception:  # the ranks then end by their own time-out; this thread must not die without a word
            log.error("the failure could not be told to the ranks:\n%s", traceback.format_exc())
        return False
