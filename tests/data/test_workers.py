"""Work that several processes share: results in order, a bounded number of them ahead, and a process that dies is told of."""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

from penstock.data.workers import in_order
from penstock.errors import PenstockError


class Pool:
    """Two processes that do their work when it is asked for; at one item they die."""

    _max_workers = 2

    def __init__(self, deadly: int = -1) -> None:
        self.deadly, self.futures = deadly, list[Future[int]]()

    def submit(self, function: Any, argument: int) -> Future[int]:
        """Work for one of them."""
        future: Future[int] = Future()
        if argument == self.deadly:
            future.set_exception(BrokenProcessPool())
        elif self.deadly < 0:
            future.set_result(function(argument))
        self.futures.append(future)
        return future


def test_results_come_in_order_and_few_are_made_ahead() -> None:
    pool: Any = Pool()
    for number, found in enumerate(in_order(pool, lambda item: -item, range(50))):
        assert found == -number and len(pool.futures) <= number + 5
    assert len(pool.futures) == 50


def test_a_process_that_died_is_told_of_and_nothing_more_is_done() -> None:
    pool: Any = Pool(deadly=0)
    with pytest.raises(PenstockError, match="a worker process died"):
        list(in_order(pool, lambda item: -item, range(50)))
    assert len(pool.futures) == 5 and all(one.cancelled() for one in pool.futures[1:])
