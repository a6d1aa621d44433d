"""Starts and watches the processes that plan batches ahead of training, and the store through which ranks get their programs.

The launcher starts them for its own workers. Under torchrun rank 0 serves the store, the ranks agree on it through their process group, and
the first rank of each node starts the planners of that node.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address

from penstock.data.planners import BatchSource, PlannerPool
from penstock.data.planning import ProgramPlanner
from penstock.errors import InputError
from penstock.runtime.request import PlanningSettings
from penstock.stores import Job, Store, StoreError, open_store
from penstock.stores.listening import LOOPBACK, means_loopback
from penstock.stores.tcp_server import TcpServer

__all__ = ["Handover", "Planners", "planners_here", "planners_of_nodes"]

Handover = tuple[str, Job | None]
"""The store's address, and the job in it; no job: every rank plans for itself."""


@dataclass
class Planners:
    """The planners that this process has started, if any."""

    handover: Handover
    """For ranks that begin now."""
    pool: PlannerPool | None = None
    store: Store | None = None
    """The launcher's own connection to it."""

    def adopt(self, step: int, planner: ProgramPlanner) -> None:
        """They plan for another plan from iteration `step` on, as ranks do that adopt it."""
        if self.pool is not None:
            self.handover = self.handover[0], self.pool.adopt(step, planner)

    def begin_anew(self, step: int, planner: ProgramPlanner) -> None:
        """Starts planners for new ranks, after all others have ended: nobody will read what was planned for those."""
        if self.pool is not None and self.store is not None:
            self.pool.stop()
            with suppress(StoreError):  # one that is away is told of by those who need it
                self.store.purge()
        self.adopt(step, planner)


_EVERYWHERE = "0.0.0.0"
_ID_BYTES, _KEY_BYTES, _PORT_BYTES = 8, 32, 4


@contextmanager
def planners_here(
    settings: PlanningSettings, source: BatchSource, planner: ProgramPlanner, first_step: int, host: str = LOOPBACK, key: bytes = b""
) -> Iterator[Planners]:
    """All planners of a run, beside the launcher; on several machines `host` is this one's address, and all know `key`."""
    if not settings.planners:
        yield Planners(("", None))
        return
    key = key or secrets.token_bytes(_KEY_BYTES)
    job = Job(f"train-{secrets.token_hex(_ID_BYTES)}", key, len(planner.plan.ranks), first=first_step, away_s=settings.away_s)
    with ExitStack() as stack:
        address = settings.address or f"tcp://{host}:{stack.enter_context(TcpServer(key, host)).port}"
        store = stack.enter_context(_left_clean(address, job))
        yield Planners((address, job), stack.enter_context(_pool(settings, source, planner, address, job)), store)


@contextmanager
def planners_of_nodes(settings: PlanningSettings, source: BatchSource, planner: ProgramPlanner, first_step: int) -> Iterator[Planners]:
    """The planners of this node, if this process is the first of it, in a job that torchrun started."""
    import torch
    import torch.distributed as dist

    if not settings.planners:
        yield Planners(("", None))
        return
    first, node, num_nodes = dist.get_rank() == 0, int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    host = os.environ.get("MASTER_ADDR", LOOPBACK) if num_nodes > 1 else LOOPBACK
    identity, key = secrets.token_bytes(_ID_BYTES), secrets.token_bytes(_KEY_BYTES)
    with ExitStack() as stack:
        port = stack.enter_context(TcpServer(key, _reachable(host))).port if first and not settings.address else 0
        agreed = torch.frombuffer(bytearray(identity + key + port.to_bytes(_PORT_BYTES, "big")), dtype=torch.uint8)
        dist.broadcast(agreed, 0)
        told = agreed.numpy().tobytes()
        identity, key, port = told[:_ID_BYTES], told[_ID_BYTES:-_PORT_BYTES], int.from_bytes(told[-_PORT_BYTES:], "big")
        address = settings.address or f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        job = Job(f"train-{identity.hex()}", key, len(planner.plan.ranks), first=first_step, away_s=settings.away_s)
        if first:
            stack.enter_context(_left_clean(address, job))
        starts = os.environ.get("LOCAL_RANK", "0") == "0"
        pool = stack.enter_context(_pool(settings, source, planner, address, job, node, num_nodes)) if starts else None
        yield Planners((address, job), pool)


def _reachable(name: str) -> str:
    """The address to listen at so that other nodes reach this one by `name`: some systems say that their own name means loopback, which is
    true for themselves alone."""
    if means_loopback(name):
        return name
    try:
        local = ip_address(socket.gethostbyname(name)).is_loopback
    except OSError as error:
        raise InputError(f"MASTER_ADDR is '{name}', which this node cannot resolve: {error}.") from None
    return _EVERYWHERE if local else name


def _pool(
    settings: PlanningSettings, source: BatchSource, planner: ProgramPlanner, address: str, job: Job, node: int = 0, num_nodes: int = 1
) -> PlannerPool:
    own = settings.planners
    return PlannerPool(source, planner, address, job, first=node * own, own=own, count=num_nodes * own, hang_s=settings.hang_s)


@contextmanager
def _left_clean(address: str, job: Job) -> Iterator[Store]:
    """Connects, so that a wrong address is told before anything starts, and deletes the job's keys at the end."""
    with closing(open_store(address, replace(job, away_s=0.0))) as store:
        try:
            yield store
        finally:
            with suppress(StoreError):  # a store that is gone keeps nothing
                store.purge()
