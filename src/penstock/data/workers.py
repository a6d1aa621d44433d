"""Work shared by several processes, its results in order; and folders that appear only when they are complete."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from penstock.errors import InputError, PenstockError
from penstock.files import check_new_folder

__all__ = ["Pool", "Report", "in_order", "new_folder", "start_pool"]

T = TypeVar("T")
R = TypeVar("R")

Report = Callable[[str, int, int], None]
"""Hears of progress: what is being done, how much is done, how much there is."""

Pool = ProcessPoolExecutor | None
"""None: this process does the work itself."""


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name only when it is complete; what was there before must be empty."""
    check_new_folder(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name[:40]}.", dir=out.parent))
    except OSError as error:
        raise InputError(f"'{out}' cannot be written: {error.strerror}.") from None
    try:
        yield folder
        umask = os.umask(0)
        os.umask(umask)
        folder.chmod(0o777 & ~umask)
        os.replace(folder, out)
    except OSError as error:
        raise InputError(f"'{out}' cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_pool(workers: int) -> AbstractContextManager[Pool]:
    """This many processes, or none for one worker."""
    if workers == 1:
        return nullcontext()
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def in_order(pool: Pool, function: Callable[[T], R], arguments: Iterable[T]) -> Iterator[R]:
    """The results of all calls in order, a bounded number of them ahead."""
    if pool is None:
        yield from map(function, arguments)
        return
    waiting: deque[Future[R]] = deque()
    try:
        for argument in arguments:
            waiting.append(pool.submit(function, argument))
            if len(waiting) > 2 * pool._max_workers:  # type: ignore[attr-defined]  # it has no public name
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise PenstockError("a worker process died, most likely for want of memory. Try fewer (--workers).") from None
    finally:
        for future in waiting:
            future.cancel()
