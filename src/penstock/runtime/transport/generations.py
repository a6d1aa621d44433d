"""A generation: the process groups and transports that the processes of a job make together under one number, and drop together.

    generation 0   store keys "generation/0/…"   groups, transports ──► closed: no thread, no socket, no lent memory stays
    generation 1   store keys "generation/1/…"   groups, transports    of another plan, perhaps without a process that was lost

The store outlives them all. Nobody meets a process of another generation: their keys differ.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec
import torch.distributed as dist

from penstock.runtime.transport.transport import Transport

__all__ = ["DESTROYING", "Generation"]

DESTROYING = "destroying groups"
"""The thread in which groups end."""
_DESTROYED_S = 2.0
"""Destroying takes some milliseconds; after so long it waits for what does not come."""


class Generation:
    """The process groups that this process has made under one number; `members` are the processes of the job that take part, this one
    (`own`) among them.

    Groups are made when they are first asked for, by all members together, and kept: making one takes milliseconds and sockets. Without a
    store the process is alone, and has none.
    """

    _beside = (-1,)
    """Its place among those that were made; no process has this number."""

    def __init__(
        self, number: int, members: Sequence[int], own: int, *, store: Any = None, backend: str = "gloo", timeout_s: float = 600.0
    ) -> None:
        self.number, self.members, self.own = number, tuple(sorted(members)), own
        self.backend, self.timeout = backend, timedelta(seconds=timeout_s)
        self._store, self._keys = store, None if store is None else dist.PrefixStore(self.prefix, store)
        self._made: dict[tuple[int, ...], Any] = {}
        self._transports: list[Transport] = []
        self._own_ports: set[int] = set()
        self._ports: set[int] = set()
        """On which gloo listens here, and at the others: one end of each of its connections has one of them."""
        self.is_closed = False
        if store is not None:
            with _patient_threads(), self._counted_ports():
                place = self.members.index(own)
                dist.init_process_group(backend, store=self._keys, rank=place, world_size=len(self.members), timeout=self.timeout)

    @property
    def prefix(self) -> str:
        """The prefix of its keys in the store."""
        return _prefix(self.number)

    def group(self, processes: Iterable[int]) -> Any:
        """The group of these processes; None for one alone. A new one is made by every member of the generation, the group's or not."""
        members = tuple(sorted(processes))
        if len(members) == 1:
            return None
        if self.is_closed:
            raise RuntimeError(f"generation {self.number} is closed, but processes {members} were to meet in it")
        if members not in self._made:
            if members == self.members:
                self._made[members] = dist.group.WORLD
            else:
                with _patient_threads(), self._counted_ports():
                    places = [self.members.index(member) for member in members]
                    self._made[members] = dist.new_group(places, timeout=self.timeout)
        return self._made[members]

    def beside(self) -> Any:
        """Another group of all members, through host memory: for messages that a thread sends while others are under way. All make it."""
        if self._beside not in self._made:
            with _patient_threads(), self._counted_ports():
                self._made[self._beside] = dist.new_group(list(range(len(self.members))), timeout=self.timeout, backend="gloo")
        return self._made[self._beside]

    def hold(self, transport: Transport) -> None:
        """The transport ends with the generation."""
        self._transports.append(transport)

    def barrier(self) -> None:
        """Returns when all members have come here."""
        if len(self.members) > 1:
            dist.barrier()

    def close(self) -> None:
        """Drops groups and transports, whatever is under way in them: what waits for another process, here or there, fails at once.

        Nothing else may hold a group or a request of one: their threads and sockets end with the last reference.
        """
        if self.is_closed:
            return
        self.is_closed = True
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        self._made.clear()
        if self._store is not None:
            self.wake()  # a group that still works is not destroyed before it is done
            self._destroy()

    def _destroy(self) -> None:
        """Destroys the groups. gloo may begin to send just as its connection ends, and not hear of it: its thread then waits until the
        operation is timed out, and whoever joined it would wait as long. Such a group is left behind."""
        if self.backend != "gloo":
            dist.destroy_process_group()
            return
        destroying = threading.Thread(target=dist.destroy_process_group, name=DESTROYING, daemon=True)
        destroying.start()
        destroying.join(_DESTROYED_S)

    def wake(self) -> None:
        """Whatever waits in the generation, here or for this process, fails at once; any thread may ask for it. Nothing but `close` may
        follow. gloo's own abort wakes nobody, so its connections are ended."""
        for one in _sockets():
            try:
                if one.getpeername()[1] in self._ports or one.getsockname()[1] in self._own_ports:
                    one.shutdown(socket.SHUT_RDWR)
            except OSError:  # not connected (any more), or one that listens, which gloo must find as it was
                continue

    def next(self, members: Sequence[int] | None = None) -> Generation:
        """The generation after this one, which is closed first: of the same processes, or of those that are left."""
        self.close()
        return Generation(
            self.number + 1, self.members if members is None else members, self.own, store=self._store, backend=self.backend,
            timeout_s=self.timeout.total_seconds(),
        )  # fmt: skip

    def leave(self, others: Sequence[int]) -> None:
        """Closes it in a process that has no part in the next one; returns when all `others` have begun that, and need this one no more."""
        self.close()
        if self._store is not None:
            self._store.wait([f"{_prefix(self.number + 1)}/ports/0/{member}" for member in others], self.timeout)

    @contextmanager
    def _counted_ports(self) -> Iterator[None]:
        """Notes on which ports members listen because of what is made inside. (No other thread listens: loaders only connect.)"""
        before = set(_listening())
        yield
        assert self._keys is not None
        own, number = set(_listening()) - before, len(self._made)
        self._own_ports |= own
        self._keys.set(f"ports/{number}/{self.own}", msgspec.json.encode(sorted(own)).decode())
        for told in self._keys.multi_get([f"ports/{number}/{member}" for member in self.members if member != self.own]):
            self._ports.update(msgspec.json.decode(told))


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Threads that begin inside push nobody off a core when they wake, where the system knows such a policy (Linux: SCHED_BATCH).

    gloo's thread is woken by a message, finds the connection locked by a thread that has just used it, and asks again and again until that
    one is done. Where there are more threads than cores it had often pushed that very thread off its core: milliseconds of two cores for
    each message.
    """
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:  # or somebody has chosen another one
        yield
        return
    with suppress(PermissionError):  # of a sandbox
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread; what it starts inherits it
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _prefix(number: int) -> str:
    return f"generation/{number}"


def _sockets() -> Iterator[socket.socket]:
    """This process' TCP sockets, as copies of its descriptors."""
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                yield found


def _listening() -> list[int]:
    """The ports on which this process listens."""
    return [one.getsockname()[1] for one in _sockets() if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)]
