"""The supervisor of a node that does not lead: it starts, watches and ends the ranks of its node as it is told, and tells how they fare."""

from __future__ import annotations

import multiprocessing.connection
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.errors import InputError, PenstockError
from penstock.plans.schema import plan_from_dict
from penstock.runtime.nodes.channel import Channel
from penstock.runtime.nodes.copy_exchange import CopyMirror, CopyServer, bring_copies, next_node
from penstock.runtime.nodes.leading import held_here, part
from penstock.runtime.nodes.messages import (
    End,
    Failed,
    Gone,
    Hello,
    Leaving,
    NodeAddress,
    NodeDone,
    Refused,
    Remaining,
    Start,
    Stop,
    Stopped,
)  # fmt: skip
from penstock.runtime.nodes.place import store_key
from penstock.runtime.nodes.sealed_socket import SealedSocket, SealedSocketError
from penstock.runtime.nodes.succession import LeaderLostError, LedBy
from penstock.runtime.request import GoingOn, MayLeave, NodePlace
from penstock.runtime.workers import OtherNodes, WorkerError, WorkerPool
from penstock.stores import Job

if TYPE_CHECKING:
    from penstock.runtime.planner_processes import Handover
    from penstock.runtime.recovering.copies import Copies
    from penstock.runtime.request import TrainRequest

__all__ = ["CALL_S", "FollowingNode", "NodeLeaves", "TakenLead"]

CALL_S, _AGAIN_S = 600.0, 0.3
"""How long node 0 may take to come, and how often it is called."""


@dataclass(frozen=True)
class TakenLead:
    """Facts with which a node takes the lead from another, which was lost."""

    node: int
    """The one that was lost."""
    why: str
    term: int
    address: str
    """Of the one that leads now."""
    members: tuple[int, ...]
    """The devices that had a process."""
    expected: tuple[int, ...]
    """Other nodes that were there."""
    has_left: bool = False
    """Whether the one that was lost said so before."""


class _StopAsked(Exception):
    """All ranks are to be ended."""


class NodeLeaves(Exception):
    """This node was asked to leave, and has nothing any more that others lack; `has_moved`: they go on without it already."""

    def __init__(self, *, has_moved: bool = False) -> None:
        super().__init__()
        self.has_moved = has_moved


class FollowingNode(OtherNodes):
    """This node, as one that follows; the node that leads stands for all others."""

    are_done = True
    """It is for the leader to wait for all."""

    def __init__(
        self, place: NodePlace, key: bytes, ranks: Sequence[int], facts: dict[str, Any], copies: Copies | None, timeout_s: float,
        started: Start | None = None,
    ) -> None:  # fmt: skip
        """`ranks` are this node's; `started` is what it was doing under the one that led before: the one that leads now may be lost too."""
        self._place, self._key, self._ranks, self._copies = place, key, tuple(ranks), copies
        sealed = _called(place, key, timeout_s, has_led=started is not None)
        self.address = place.address or sealed.own_host
        self._server = None if copies is None else CopyServer(copies, key, self.address)
        self._mirror: CopyMirror | None = None
        self._channel = Channel(sealed)
        own = NodeAddress(self.address, 0) if self._server is None else self._server.address
        self._channel.send(Hello(place.number, own, facts, () if copies is None else held_here(copies)))
        self.started = started
        """What was last begun."""

    def follow(self, pool: WorkerPool, request: TrainRequest, job: Callable[..., Any], watching: Any, threads: int) -> int:
        """Does what it is told until the run is over; the signal that ended it, 0: none."""
        told = self._channel.take()
        while True:
            match told:
                case Start():
                    told = self._started(told, pool, request, job, watching, threads)
                    continue
                case Stop(attempt):
                    self._stopped(attempt)
                case Refused(text):
                    raise InputError(text)
                case End(text, ended_by):
                    if text:
                        raise PenstockError(text)
                    return ended_by
                case Gone(text):
                    raise LeaderLostError(f"{text}.")
                case Leaving():
                    raise LeaderLostError(_LEADER_LEAVES, has_left=True)
            told = self._channel.take()

    def _started(self, start: Start, pool: WorkerPool, request: TrainRequest, job: Callable[..., Any], watching: Any, threads: int) -> Any:
        """Starts the ranks of this node, and waits for their end, or for what the leader says before it; which is returned."""
        self.started = start
        plan = plan_from_dict(start.plan, "the plan of the node that leads")
        going_on = None if start.step is None else GoingOn(start.step, start.from_copies)
        handover: Handover = (start.store, None if start.job is None else Job(**start.job, key=store_key()))
        try:
            if self._copies is not None:
                if start.from_copies and start.step is not None:
                    bring_copies(self._copies, self._key, start.step, start.slots, self._look)
                else:
                    self._copies.go_back(None)
                self._mirror_copies(start)
            pool.revive(start.members, threads, (start.host, start.port))
            given = replace(request, plan=plan, resume=start.resume), handover, start.token, watching, going_on
            pool.run(job, *given, timeout_s=_RUN_S, listen=_leave_if_allowed)
            self._channel.send(NodeDone(start.attempt))
        except NodeLeaves as leaves:
            part(self._channel, Leaving(leaves.has_moved))
            raise
        except _StopAsked:
            self._stopped(start.attempt)
        except WorkerError as error:
            self._channel.send(Failed(start.attempt, error.ranks[0] if error.ranks else -1, str(error), error.is_lost))
        except SealedSocketError as error:
            self._channel.send(Failed(start.attempt, -1, f"copies to go on from cannot be had: {error}", True))
        return self._channel.take()

    def taken_lead(self, led: LedBy, why: str, *, has_left: bool) -> TakenLead:
        """The facts with which this node takes the lead from `led`."""
        assert self.started is not None
        expected = tuple(node for node in led.nodes or self.started.nodes if node not in (led.node, self._place.number))
        said = why.removeprefix(self._channel.who).strip(" .")
        return TakenLead(led.node, f"it {said}", led.term + 1, self.address, self.started.members, expected, has_left)

    def ready(self, members: Sequence[int], port: int) -> None:
        """The leader has made the place where ranks meet."""

    def handles(self) -> Sequence[Channel]:
        """The channel to the leader."""
        return [self._channel]

    def hear(self, handle: Channel) -> WorkerError | None:
        """Handles a message of the leader while ranks run."""
        match handle.take():
            case Stop():
                raise _StopAsked
            case Remaining(left, nodes):
                assert self.started is not None
                members = tuple(rank for rank in self.started.members if rank not in left)
                self.started = msgspec.structs.replace(self.started, members=members, nodes=nodes)
                self._mirror_copies(self.started)
            case Gone(text):
                raise LeaderLostError(f"{text}.")
            case Leaving():
                raise LeaderLostError(_LEADER_LEAVES, has_left=True)
            case End(text, _):
                raise PenstockError(text or "the run was ended by the node that leads it.")
        return None

    def _look(self) -> None:
        """Hears what the leader has said meanwhile, if anything."""
        while multiprocessing.connection.wait([self._channel], 0.0):
            self.hear(self._channel)

    def close(self) -> None:
        """Lets go of everything."""
        self._end_mirror()
        self._channel.close()
        if self._server is not None:
            self._server.close()

    def _stopped(self, attempt: int) -> None:
        self._end_mirror()
        self._channel.send(Stopped(attempt, () if self._copies is None else held_here(self._copies)))

    def _mirror_copies(self, start: Start) -> None:
        """From now on copies go to the next of the nodes that there are."""
        if self._copies is not None:
            other = next_node(self._place.number, start.nodes)
            self._mirror = CopyMirror(self._copies, self._ranks, self._key, other, self._mirror)

    def _end_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None


_RUN_S = 365 * 24 * 3600.0
_LEADER_LEAVES = "the node that leads leaves."


def _leave_if_allowed(rank: int, message: object) -> None:
    if isinstance(message, MayLeave):
        raise NodeLeaves(has_moved=message.has_moved)


def _called(place: NodePlace, key: bytes, timeout_s: float, *, has_led: bool) -> SealedSocket:
    """A connection to the node that leads, which may come later than this one, unless it leads (`has_led`)."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return SealedSocket.call(place.host, place.port, key, "the node that leads", source=place.address, timeout_s=_AGAIN_S * 10)
        except SealedSocketError as error:
            if "does not answer" not in str(error) or time.monotonic() > end:
                if has_led:
                    raise LeaderLostError(str(error)) from None
                raise InputError(f"{error} Is `penstock train … --node-rank 0` running there, with the same key?") from None
            time.sleep(_AGAIN_S)
