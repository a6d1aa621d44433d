"""The loader that joins planning to training: for each iteration this rank's samples, and the program that says what to do with them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.data.planners import BatchSource, PlannerPool, open_entry
from penstock.data.planning import ProgramPlanner
from penstock.data.samples import LoadedProgram, Samples
from penstock.data.windows import Drains
from penstock.errors import InputError
from penstock.plans.references import cluster_of
from penstock.stores import Job, Store, StoreError, open_store
from penstock.stores.addresses import job_from_environment

if TYPE_CHECKING:
    from penstock.programs.instructions import Program

__all__ = ["ProgramLoader"]

_END_S = 5.0
"""Longer than a fetch takes that was called off."""
_SOON_S = 0.01
"""For a thread that has nothing left to do."""


class ProgramLoader:
    """Iterating yields one iteration after the other, or of asynchronous plans several at once, for one rank: a `LoadedProgram`.

    Planners are processes that work ahead: of `planners` in all on each of `num_nodes` nodes, the loader of the node's first rank
    (`starts_planners`) starts those of node `node`. They hand programs over through the store at `address`, under `job`; without
    these, the environment says which. With `planners` 0 each rank plans for itself, in step with training: slow, but with nothing
    beside it that could fail.

    >>> loader = ProgramLoader(BatchSource("data", tokens_per_batch=65536), planner, rank, address=address, job=job)
    >>> for micro_batches, program in loader: ...
    """

    def __init__(
        self, source: BatchSource, planner: ProgramPlanner, rank: int, *, address: str = "", job: Job | None = None, planners: int = 1,
        node: int = 0, num_nodes: int = 1, starts_planners: bool | None = None, first_step: int = 0, prefetch_factor: int = 2,
        timeout: float = 1800.0, hang_s: float = 300.0,
    ) -> None:  # fmt: skip
        if planners < 0 or prefetch_factor < 1:
            raise InputError(f"{planners} planners and {prefetch_factor} iterations ahead make no sense; 0 and 1 are the least.")
        if planners and (job is None or not address):
            address, job = job_from_environment(len(planner.plan.ranks), first=first_step)
        if job is not None and job.first != first_step:
            raise InputError(f"the job begins at iteration {job.first}, this loader at {first_step}.")
        self.source, self.rank = source, _member(rank, planner)
        self.planner = planner
        """Of the plan in force."""
        self.step = first_step
        """The iteration that comes next."""
        self.wait_s = 0.0
        """Time that training spent waiting for its next iteration, all in all."""
        self.data_wait_s = 0.0
        """Of it, waiting for samples; the rest is for programs."""
        self._address, self._job, self._planners, self._ahead, self._timeout_s = address, job, planners, prefetch_factor, timeout
        self._feed: _Feed | None = None
        self._catching_up = False
        """Whether planners have still to follow a plan that was adopted: until then this rank plans for itself."""
        self.data, self.batches = source.open()
        self._samples = Samples(self.data, planner.form, source.limits)
        self.pool: PlannerPool | None = None
        starts = rank == min(planner.plan.ranks) if starts_planners is None else starts_planners
        if planners and starts and job is not None:
            own = {"first": node * planners, "own": planners, "count": planners * num_nodes}
            self.pool = PlannerPool(source, planner, address, job, **own, hang_s=hang_s)

    def adopt(self, step: int, planner: ProgramPlanner) -> None:
        """Yields programs of another plan from iteration `step` on: the next one, or an earlier one that is run again. Those fetched ahead
        for the plan before are discarded.

        The loaders of all ranks adopt it, and so do the planners (`PlannerPool.adopt`, called here for those that this loader started).
        Until they have caught up, this rank plans for itself: the same programs.
        """
        if self.has_work and step > self.step:
            raise InputError(f"a plan is to be adopted at iteration {step}, but {self.step} is next.")
        self.step = step
        self._end_feed()
        self.planner, self._catching_up = planner, True
        if self._job is not None:
            self._job = self._job.adopted(step, len(planner.plan.ranks))
        if self.pool is not None:
            self.pool.adopt(step, planner)

    @property
    def has_work(self) -> bool:
        """Whether the plan in force has any for this rank; without, there is nothing to iterate over until another plan is adopted."""
        return self.rank in self.planner.plan.ranks

    def __iter__(self) -> Iterator[LoadedProgram]:
        """From the next iteration to the last; a thread fetches and reads ahead."""
        try:
            while self.has_work and (self.source.num_steps is None or self.step < self.source.num_steps):
                yield self._fetched() if self._planners else self.next_planned_here()
        finally:
            self._end_feed()

    def close(self) -> None:
        """Ends the planners that this loader started, and its thread."""
        self._end_feed()
        if self.pool is not None:
            self.pool.stop()
            self.pool = None

    def __enter__(self) -> ProgramLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """State for a checkpoint: the next iteration, and where its batch begins."""
        return self.batches.state(self.step)

    def coming(self) -> LoadedProgram | None:
        """The program that comes next, where it is here already."""
        found = None if self._feed is None or self._catching_up else self._feed.first
        return found if found is not None and found.program.iteration == self.step else None

    def next_planned_here(self) -> LoadedProgram:
        """The next iteration, planned by this rank: the same as planners give, for when the store is gone while others have theirs."""
        start = time.perf_counter()
        _, programs = self.planner.window(self.data, self.batches, self.step)
        planned = time.perf_counter()
        found = self._samples.load(next(program for program in programs if program.rank == self.rank), self.planner.plan)
        self.wait_s += time.perf_counter() - start
        self.data_wait_s += time.perf_counter() - planned
        self.step += found.program.num_batches
        return found

    def _fetched(self) -> LoadedProgram:
        """The next iteration, as planners hand it over."""
        if self._feed is None:
            assert self._job is not None
            store = partial(_open_store, self._address, self._job, self._timeout_s)
            load = partial(self._samples.load, plan=self.planner.plan)
            place = self.planner.plan.ranks.index(self.rank)
            drains = self.planner.drains
            ahead = self._ahead if drains == Drains() else 1  # of several batches one program is far enough, and takes memory enough
            self._feed = _Feed(store, load, self.rank, place, self._first_steps(self.step, drains), ahead)
        start = time.perf_counter()
        found, loading_s = None, 0.0
        while found is None or found.program.iteration < self.step:  # an earlier one was planned here, before its planner had it
            if self._catching_up and not self._feed.is_ready:
                return self.next_planned_here()
            found, loading_s = self._feed.next()
        self._catching_up = False
        waited_s = time.perf_counter() - start
        self.wait_s += waited_s
        self.data_wait_s += min(waited_s, loading_s)  # samples are read last, right before they are handed over
        self.step += found.program.num_batches
        return found

    def _first_steps(self, step: int, drains: Drains) -> Iterator[int]:
        """The first steps of all programs from this one on."""
        while self.source.num_steps is None or step < self.source.num_steps:
            yield step
            step = drains.after(step)

    def _end_feed(self) -> None:
        if self._feed is not None:
            self._feed.end()
            self._feed = None


def _open_store(address: str, job: Job, wait_s: float, hurried: bool) -> Store:
    """`hurried`: it must be there now."""
    return open_store(address, replace(job, away_s=0.0) if hurried else job, wait_s=wait_s)


class _Feed:
    """A thread that fetches the programs of some iterations from the store and reads their samples, a few iterations ahead."""

    def __init__(
        self, open_own: Callable[[bool], Store], load: Callable[[Program], LoadedProgram], rank: int, place: int, steps: Iterable[int],
        ahead: int,
    ) -> None:  # fmt: skip
        self._open, self._load, self._rank, self._place, self._steps = open_own, load, rank, place, steps
        """`place`: of the rank among those that have work, by which the store knows it."""
        self._ready: queue.Queue[tuple[LoadedProgram, float] | BaseException] = queue.Queue(ahead)
        self._ended, self._at = threading.Event(), 0
        self._thread = threading.Thread(target=self._run, name="loader", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether `next` would not wait."""
        return not self._ready.empty()

    @property
    def first(self) -> LoadedProgram | None:
        """The program that `next` would give without waiting."""
        with self._ready.mutex:
            found = self._ready.queue[0] if self._ready.queue else None
        return found[0] if isinstance(found, tuple) else None

    def next(self) -> tuple[LoadedProgram, float]:
        """The next iteration, and how long its samples took to read; or the failure that it met."""
        found = self._ready.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def end(self) -> None:
        """Discards what was fetched, and ends the thread, which may wait for a program that never comes. One whose store does not answer is
        left to end by itself."""
        self._ended.set()
        while not self._ready.empty():  # lets a thread that is about to hand over go on, and end
            self._ready.get_nowait()
        self._thread.join(_SOON_S)
        if self._thread.is_alive():
            with suppress(StoreError), closing(self._open(True)) as store:
                store.call_off(self._at, self._place)
            self._thread.join(_END_S)

    def _run(self) -> None:
        try:
            with closing(self._open(False)) as store:
                for step in self._steps:
                    self._at = step  # before the flag is looked at: who has set the flag then calls off what is waited for
                    entry = b"" if self._ended.is_set() else store.fetch(step, self._place)
                    if not entry:
                        return
                    program = open_entry(entry, f"the program of rank {self._rank} in iteration {step}")
                    start = time.perf_counter()
                    found, loading_s = self._load(program), time.perf_counter() - start
                    store.acknowledge(step + program.num_batches - 1, self._place)
                    self._ready.put((found, loading_s))
        except BaseException as error:
            if not self._ended.is_set():
                self._ready.put(error)


def _member(rank: int, planner: ProgramPlanner) -> int:
    """The rank, if the planner's plan has it, or leaves that device of its cluster out."""
    if rank not in planner.plan.ranks and not 0 <= rank < (devices := cluster_of(planner.plan).num_devices):
        raise InputError(f"the plan has no rank {rank}, nor has its cluster of {devices} such a device.")
    return rank
