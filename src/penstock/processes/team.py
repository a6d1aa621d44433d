"""A few processes that share some work, as long as there is much of it.

    this process ── item ────► member 0   calls `work` with the item
                 ◄── answer ──
                 ── item ────► member 1
                 …

Answers do not depend on how many members there are: each comes from one call with one item. What a member fails at or dies of is done in
this process instead, so that an error is told as if there were no members. They hear no signal: Ctrl-C is for this process, which then
ends them, and they end by themselves if it is killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Generic, TypeVar

from penstock.processes.fork_server import await_parent, unheard

__all__ = ["Team"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_SPAWNED = get_context("spawn")
"""Not a fork of this process, which may have threads, nor of the fork server, which is there for what needs torch."""


class Team(Generic[Item, Answer]):
    """Processes that are started when there is work for them and are gone when the context ends."""

    def __init__(self, work: Callable[[Item], Answer], size: int, least: int) -> None:
        """Up to `size` of them, or none if that is one. Fewer items than `least` are done in this process. `work`, items and answers are
        pickled, from this process to those that it starts and back."""
        self._work, self._size, self._least = work, size, least
        self._members: dict[Connection, BaseProcess] = {}
        self._idle: set[Connection] = set()

    def __enter__(self) -> Team[Item, Answer]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for connection in list(self._members):
            self._dismiss(connection)

    def each(self, items: Sequence[Item], told: Callable[[Item], None] = lambda item: None) -> list[Answer]:
        """Maps `work` over items, in their order; `told` hears of each when it is begun. Members begin with the last: where items
        grow, a large one should not be all that is left."""
        found: dict[int, Answer] = {}
        if self._size > 1 and len(items) >= self._least:
            self._hire(min(self._size, len(items)))
            self._share(items, told, found)
        for index, item in enumerate(items):
            if index not in found:
                told(item)
                found[index] = self._work(item)
        return [found[index] for index in range(len(items))]

    def _share(self, items: Sequence[Item], told: Callable[[Item], None], found: dict[int, Answer]) -> None:
        """Has members work until every item has been given to one, and adds what they found."""
        left, given = list(range(len(items))), dict[Connection, int]()
        while self._members and (left or given):
            while self._idle and left:
                connection, index = self._idle.pop(), left.pop()
                given[connection] = index
                told(items[index])
                with suppress(OSError):  # one that has died is found out below
                    connection.send(items[index])
            for speaker in wait(self._members.keys() - self._idle):
                assert isinstance(speaker, Connection)
                answer, at = self._heard(speaker), given.pop(speaker, None)
                if answer and at is not None:
                    found[at] = answer[0]

    def _heard(self, connection: Connection) -> tuple[Answer] | tuple[()]:
        """Handles a member's message: its answer, or nothing if it has failed, or has just begun; one that has died is dismissed."""
        try:
            answer: tuple[Answer] | tuple[()] = connection.recv()
        except (EOFError, OSError):
            self._dismiss(connection)
            return ()
        self._idle.add(connection)
        return answer

    def _hire(self, number: int) -> None:
        resource_tracker.ensure_running()  # here, because it lets the signals through again
        with unheard():
            while len(self._members) < number:
                own, theirs = _SPAWNED.Pipe()
                process = _SPAWNED.Process(target=_serve, args=(theirs, self._work), daemon=True)
                process.start()
                theirs.close()  # so that its death is heard of
                self._members[own] = process

    def _dismiss(self, connection: Connection) -> None:
        process = self._members.pop(connection)
        self._idle.discard(connection)
        process.kill()
        process.join()
        connection.close()


def _serve(connection: Connection, work: Callable[[Item], Answer]) -> None:
    """A member: says that it is there, then answers item by item."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: tuple[Answer] | tuple[()] = ()
    with suppress(EOFError, OSError):  # nobody is there any more
        while True:
            connection.send(answer)
            answer = _tried(work, connection.recv())


def _tried(work: Callable[[Item], Answer], item: Item) -> tuple[Answer] | tuple[()]:
    try:
        return (work(item),)
    except Exception:  # whoever gave the item meets the same, and tells it
        return ()


def _end_with_parent() -> None:
    await_parent()
    os._exit(1)
