"""Running a test function on several local ranks with gloo; a rank that fails or hangs fails the test."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

TIMEOUT_S = 120


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Calls `function(rank, *args)` on `world_size` processes of one gloo group; their results by rank.

    The function is found again in each process by its file and name, so it must stand at the top of its test file.
    """
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("spawn")
    # Port 0: the store takes a free one itself, so that tests side by side cannot meet.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    where = (function.__code__.co_filename, function.__name__)
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    ranks = [
        context.Process(target=_rank, args=(where, rank, world_size, store.port, pipe[1], args, timeout_s), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    for _, sender in pipes:
        sender.close()
    try:
        results = _collect([receiver for receiver, _ in pipes], ranks, time.monotonic() + timeout_s)
        for process in ranks:
            process.join(10)
        return results
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            process.join()


def _collect(receivers: list[Any], ranks: list[Any], deadline: float) -> list[Any]:
    """Results of all ranks, or the first failure: the others may then wait for that rank for ever."""
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        waiting = {receiver: rank for rank, receiver in enumerate(receivers) if rank not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} of {len(ranks)} did not finish in time")
        for receiver in ready:
            rank = waiting[receiver]  # type: ignore[index]
            try:
                failure, results[rank] = receiver.recv()  # type: ignore[union-attr]
            except EOFError:
                ranks[rank].join()
                raise AssertionError(f"rank {rank} died with exit code {ranks[rank].exitcode}") from None
            if failure:
                raise AssertionError(f"rank {rank} failed:\n{failure}")
    return [results[rank] for rank in range(len(ranks))]


def _rank(where: tuple[str, str], rank: int, world_size: int, port: int, pipe: Any, args: tuple[Any, ...], timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        answer = (None, _load(*where)(rank, *args))
    except BaseException:
        answer = (traceback.format_exc(), None)
    pipe.send(answer)
    if answer[0] is None:
        dist.barrier()
        dist.destroy_process_group()


def _load(file: str, name: str) -> Callable[..., Any]:
    """The function of a test file, whatever name pytest imported that file under."""
    spec = importlib.util.spec_from_file_location("rank_functions", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["rank_functions"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function
