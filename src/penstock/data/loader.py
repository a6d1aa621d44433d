"""The loader that joins planning to training: for each iteration this rank's samples, and the program that says what to do with them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from penstock.data.planners import BatchSource, PlannerPool, open_entry
from penstock.data.planning import ProgramPlanner
from penstock.data.samples import LoadedProgram, Samples
from penstock.errors import InputError
from penstock.stores import Job, open_store
from penstock.stores.addresses import job_from_environment

if TYPE_CHECKING:
    from penstock.programs.instructions import Program

__all__ = ["DynamicLoader"]


class DynamicLoader:
    """Iterating yields one iteration after the other, for one rank: a `LoadedProgram`.

    Planners are processes that work ahead: of `planners` in all on each of `num_nodes` nodes, the loader of the node's first rank
    (`starts_planners`) starts those of node `node`. They hand programs over through the store at `address`, under `job`; without
    these, the environment says which. With `planners` 0 each rank plans for itself, in step with training: slow, but with nothing
    beside it that could fail.

    >>> loader = DynamicLoader(BatchSource("data", tokens_per_batch=65536), planner, rank, address=address, job=job)
    >>> for micro_batches, program in loader: ...
    """

    def __init__(
        self, source: BatchSource, planner: ProgramPlanner, rank: int, *, address: str = "", job: Job | None = None, planners: int = 1,
        node: int = 0, num_nodes: int = 1, starts_planners: bool | None = None, first_step: int = 0, prefetch_factor: int = 2,
        timeout: float = 1800.0, hang_s: float = 300.0,
    ) -> None:  # fmt: skip
        self.source, self.planner, self.rank = source, planner, rank
        self.step = first_step
        """The iteration that comes next."""
        self.wait_s = 0.0
        """Time that training spent waiting for its next iteration, all in all."""
        if rank not in planner.plan.ranks:
            raise InputError(f"the plan has no rank {rank}; it has {len(planner.plan.ranks)}.")
        if planners < 0 or prefetch_factor < 1:
            raise InputError(f"{planners} planners and {prefetch_factor} iterations ahead make no sense; 0 and 1 are the least.")
        if planners and (job is None or not address):
            address, job = job_from_environment(len(planner.plan.ranks), first=first_step)
        if job is not None and job.first != first_step:
            raise InputError(f"the job begins at iteration {job.first}, this loader at {first_step}.")
        self._address, self._job, self._planners, self._ahead, self._timeout_s = address, job, planners, prefetch_factor, timeout
        self.data, self.batches = source.open()
        self._samples = Samples(self.data, planner.form, source.limits)
        self.pool: PlannerPool | None = None
        starts = rank == min(planner.plan.ranks) if starts_planners is None else starts_planners
        if planners and starts and job is not None:
            own = {"first": node * planners, "own": planners, "count": planners * num_nodes}
            self.pool = PlannerPool(source, planner, address, job, **own, hang_s=hang_s)

    def __iter__(self) -> Iterator[LoadedProgram]:
        """From the next iteration to the last; a thread fetches and reads ahead."""
        if not self._planners:
            yield from self._inline()
            return
        ready: queue.Queue[LoadedProgram | BaseException | None] = queue.Queue(self._ahead)
        stop = threading.Event()
        threading.Thread(target=self._fetch, args=(self.step, ready, stop), name="loader", daemon=True).start()
        try:
            while True:
                start = time.perf_counter()
                found = ready.get()
                self.wait_s += time.perf_counter() - start
                if found is None:
                    return
                if isinstance(found, BaseException):
                    raise found
                yield self._handed_over(found)
        finally:
            stop.set()
            while not ready.empty():  # lets a thread that is about to hand over go on, and end
                ready.get_nowait()

    def close(self) -> None:
        """Ends the planners that this loader started."""
        if self.pool is not None:
            self.pool.stop()
            self.pool = None

    def __enter__(self) -> DynamicLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the next iteration, and where its batch begins."""
        return self.batches.state(self.step)

    def _steps(self, step: int) -> Iterator[int]:
        while self.source.num_steps is None or step < self.source.num_steps:
            yield step
            step += 1

    def next_planned_here(self) -> LoadedProgram:
        """The next iteration, planned by this rank: the same as planners give, for when the store is gone while others have theirs."""
        start = time.perf_counter()
        programs = self.planner.programs(self.data, self.batches[self.step])
        found = self._loaded(next(program for program in programs if program.rank == self.rank))
        self.wait_s += time.perf_counter() - start
        return self._handed_over(found)

    def _inline(self) -> Iterator[LoadedProgram]:
        for _ in self._steps(self.step):
            yield self.next_planned_here()

    def _handed_over(self, found: LoadedProgram) -> LoadedProgram:
        self.step += 1
        return found

    def _fetch(self, first: int, ready: queue.Queue[LoadedProgram | BaseException | None], stop: threading.Event) -> None:
        try:
            assert self._job is not None
            with closing(open_store(self._address, self._job, wait_s=self._timeout_s)) as store:
                for step in self._steps(first):
                    program = open_entry(store.fetch(step, self.rank), f"the program of rank {self.rank} in iteration {step}")
                    found = self._loaded(program)
                    store.acknowledge(step, self.rank)
                    if stop.is_set():
                        return
                    ready.put(found)
            ready.put(None)
        except BaseException as error:
            ready.put(error)

    def _loaded(self, program: Program) -> LoadedProgram:
        return self._samples.load(program, self.planner.plan)
