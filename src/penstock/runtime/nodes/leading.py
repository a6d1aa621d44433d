"""The supervisor that leads: it meets those of the other nodes, tells them what to start and when to stop, and notices when one is lost."""

from __future__ import annotations

import multiprocessing.connection
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError
from penstock.plans.schema import plan_to_dict
from penstock.plans.texts import format_ranks
from penstock.runtime.checkpoints.going_on import differing_facts
from penstock.runtime.nodes.channel import SILENT_S, Channel
from penstock.runtime.nodes.copy_exchange import CopyMirror, CopyServer, HolderLostError, bring_copies, next_node
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
    SlotHeld,
    Start,
    Stop,
    Stopped,
)  # fmt: skip
from penstock.runtime.nodes.sealed_socket import SealedSocket, SealedSocketError
from penstock.runtime.nodes.succession import LedBy
from penstock.runtime.recovering.copies import Copies, whole_copies
from penstock.runtime.workers import WorkerError
from penstock.stores.listening import bound_socket, connections

if TYPE_CHECKING:
    from penstock.runtime.checkpoints.writer import CheckpointWriter
    from penstock.runtime.planner_processes import Handover
    from penstock.runtime.request import GoingOn, TrainRequest

__all__ = ["MEET_AGAIN_S", "LeadingNode", "held_here", "lost_words", "part"]

_MEET_S = 600.0
"""How long nodes may take to come: clusters start them one after the other."""
MEET_AGAIN_S = 10.0
"""How long those that are left may take to find the one that leads after it."""
_STOP_S = 30.0
"""How long a node that is there may take to end its ranks."""


@dataclass
class _Node:
    """Another node, as the one that leads sees it."""

    channel: Channel
    address: NodeAddress
    held: tuple[SlotHeld, ...] = ()
    """The copies it told of when it last stopped."""
    is_stopped: bool = True
    is_done: bool = False


def held_here(copies: Copies) -> tuple[SlotHeld, ...]:
    """The copies of this node, to tell others of."""
    return tuple(SlotHeld(slot, head.step, head.generation, head.place, head.count) for slot, head in copies.held())


class LeadingNode:
    """All other nodes of a job; what a `WorkerPool` needs to know of them, and where the copies of all are."""

    def __init__(
        self, number: int, met_at: tuple[str, int], key: bytes, ranks: Sequence[Sequence[int]], facts: Mapping[str, Any],
        copies: Copies | None, tell: Callable[[LedBy], None], expected: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`ranks` are those of each node, of which this one has number `number`; others come to an address of this machine, which all are
        told. Those that are `expected` were there under the one that led before: until all are met they may lead in turn."""
        self.number, self.ranks, self._key, self._facts, self._copies = number, ranks, key, facts, copies
        self._listener = bound_socket(*met_at)
        self.host, self.port = self._listener.getsockname()[:2]
        self._nodes: dict[int, _Node] = {}
        self._arrived: dict[int, _Node] = {}
        """Nodes that have come since others were met."""
        self._changed, self._is_closed = threading.Condition(), False
        self.gone: set[int] = set()
        """Nodes that were lost."""
        self._attempt = 0
        self._start: Callable[[Sequence[int], int], Start] | None = None
        self._slots: dict[int, NodeAddress] = {}
        self._server = None if copies is None else CopyServer(copies, key, self.host)
        self._mirror: CopyMirror | None = None
        self.on_left: Callable[[Sequence[int], str], None] = lambda ranks, text: None
        """Told of ranks that have left with their node, and without which the others go on."""
        self._tell, self._expected = tell, tuple(expected)
        self._tell_led()
        self._thread = threading.Thread(target=self._accept, name="nodes", daemon=True)
        self._thread.start()

    @property
    def address(self) -> NodeAddress:
        """The address at which this node serves its copies."""
        return NodeAddress(self.host, 0) if self._server is None else self._server.address

    def _tell_led(self) -> None:
        present = sorted({self.number, *self._nodes, *self._expected})
        self._tell(LedBy(self.number, self.host, self.port, 0, tuple(present), len(self.ranks)))

    def meet(self, expected: Sequence[int], timeout_s: float = _MEET_S, *, needs_all: bool = True) -> None:
        """Returns when all these nodes have come; those that have not in this time are gone, unless all are needed."""
        with self._changed:
            if not self._changed.wait_for(lambda: set(expected) <= set(self._waiting()), timeout_s) and needs_all:
                missing = [str(node) for node in expected if node not in self._arrived]
                raise PenstockError(
                    f"node {', '.join(missing)} has not come in {timeout_s:g} s: start `penstock train … --node-rank {missing[0]} --master "
                    f"{self.host}:{self.port}` there, with the same key."
                )
        self.admit()
        self._expected = ()
        self.gone |= set(range(len(self.ranks))) - {self.number, *self._nodes}

    def admit(self) -> list[int]:
        """Nodes that have come since take part from the next order on; their ranks."""
        with self._changed:
            arrived, self._arrived = self._waiting(), {}
        self._nodes |= arrived
        self.gone -= set(arrived)
        return [rank for number in sorted(arrived) for rank in self.ranks[number]]

    @property
    def is_asked(self) -> bool:
        """Whether a node wants to join."""
        with self._changed:
            return bool(self._waiting())

    def _waiting(self) -> dict[int, _Node]:
        """Nodes that have come since others were met, without those that have ended while they waited: others may come in their place."""
        for number in [number for number, node in self._arrived.items() if node.channel.is_over]:
            self._arrived.pop(number).channel.close()
        return self._arrived

    def gone_ranks(self) -> list[int]:
        """The ranks of nodes that were lost."""
        return [rank for node in sorted(self.gone) for rank in self.ranks[node]]

    def order(self, request: TrainRequest, handover: Handover, token: str, going_on: GoingOn | None) -> None:
        """Has all nodes start their ranks as soon as there is a place where these meet. Copies that are lacking here are brought first."""
        self._attempt += 1
        self._tell_led()
        address, job = handover
        told_job = None if job is None else {name: value for name, value in asdict(job).items() if name != "key"}
        from_copies = going_on is not None and going_on.from_copies
        if from_copies and self._copies is not None and going_on is not None:
            try:
                bring_copies(self._copies, self._key, going_on.step, self._slots)
            except HolderLostError as error:  # others may have what it alone was asked for, or copies of an earlier step
                holder = next(number for number, node in self._nodes.items() if node.address == error.holder)
                raise self._lost(holder, f"does not hand out its copies: {str(error).rstrip('.')}") from None
        nodes = self._mirror_copies()
        self._start = lambda members, port: Start(
            self._attempt, tuple(members), self.host, port, plan_to_dict(request.plan), request.resume,
            None if going_on is None else going_on.step, from_copies, address, told_job, token, nodes, self._slots if from_copies else {},
        )  # fmt: skip

    def ready(self, members: Sequence[int], port: int) -> None:
        """The place where all ranks meet is there: all nodes begin."""
        assert self._start is not None
        for node in self._nodes.values():
            node.is_stopped = node.is_done = False
            node.channel.send(self._start(members, port))

    def handles(self) -> Sequence[Channel]:
        """The channels to all nodes that are there."""
        return [node.channel for node in self._nodes.values()]

    @property
    def are_done(self) -> bool:
        """Whether the ranks of all nodes have come to the end."""
        return all(node.is_done for node in self._nodes.values())

    def hear(self, handle: Channel) -> WorkerError | None:
        """Handles a message of one node: a failure of its ranks, or that it is lost."""
        number, node = next((number, node) for number, node in self._nodes.items() if node.channel is handle)
        match handle.take():
            case Gone(text):
                return self._lost(number, text)
            case Leaving(has_moved):
                left = self._lost(number, "", has_left=True)
                return self._go_on(left) if has_moved else left
            case Failed(attempt, rank, text, is_lost) if attempt == self._attempt:
                return WorkerError(text, [rank] if rank >= 0 else self.ranks[number], is_lost=is_lost)
            case NodeDone(attempt) if attempt == self._attempt:
                node.is_done = True
            case Stopped(attempt, held) if attempt == self._attempt:
                node.is_stopped, node.held = True, held
        return None

    def stop(self) -> list[WorkerError]:
        """Has all nodes end their ranks, and tell of their copies. Returns when all have, or are lost: which of them meanwhile."""
        self._end_mirror()
        lost = list[WorkerError]()
        for node in self._nodes.values():
            if not node.is_stopped:
                node.channel.send(Stop(self._attempt))
        end = time.monotonic() + _STOP_S
        while waiting := [(number, node) for number, node in self._nodes.items() if not node.is_stopped]:
            number, node = waiting[0]
            if multiprocessing.connection.wait([node.channel], max(0.0, end - time.monotonic())):
                heard = self.hear(node.channel)
            else:
                heard = self._lost(number, "did not end its ranks in time")
            if heard is not None and number in self.gone:
                lost.append(heard)
        return lost

    def newest(self, before: int) -> int | None:
        """The newest step below `before` of which all nodes that are there have every rank's copy."""
        return max((step for step, _ in self._whole() if step < before), default=None)

    def go_back(self, step: int | None) -> None:
        """The next order is to go on from the copies of this step; those of later ones are of no more use."""
        held = dict(self._whole()).get(-1 if step is None else step, ())
        own = set() if self._copies is None else {slot for slot, head in self._copies.held() if head.step == step}
        self._slots = {slot: self.address if slot in own else self._holder(slot, step) for slot in held}
        for node in self._nodes.values():
            node.held = tuple(one for one in node.held if step is not None and one.step <= step)
        if self._copies is not None:
            self._copies.go_back(step)

    def write_checkpoint(self, step: int, writer: CheckpointWriter) -> None:
        """Brings the copies of a step here, and writes them down."""
        assert self._copies is not None
        self.go_back(step)
        bring_copies(self._copies, self._key, step, self._slots)
        self._copies.write_checkpoint(step, writer)

    def close(self, end: End | Leaving | None = None) -> None:
        """The run is over, for all, or for this node."""
        self._end_mirror()
        with self._changed:
            self._is_closed = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for node in [*self._nodes.values(), *self._arrived.values()]:
            part(node.channel, end or End())
        if self._server is not None:
            self._server.close()

    def _whole(self) -> list[tuple[int, Sequence[int]]]:
        held = [one for node in self._nodes.values() for one in node.held]
        if self._copies is not None:
            held += held_here(self._copies)
        return list(whole_copies((one.slot, one.step, one.generation, one.place, one.count) for one in held))

    def _holder(self, slot: int, step: int | None) -> NodeAddress:
        return next(node.address for node in self._nodes.values() for one in node.held if (one.slot, one.step) == (slot, step))

    def _lost(self, number: int, text: str, *, has_left: bool = False) -> WorkerError:
        """A node is not there any more."""
        node = self._nodes.pop(number)
        node.channel.close()
        self.gone.add(number)
        ranks, why = self.ranks[number], f"it {text.removeprefix(node.channel.who).strip()}"
        words = lost_words(f"node {number} ({node.address.host})", ranks, why, has_left=has_left)
        return WorkerError(f"{words}.", ranks, is_lost=True, has_left=has_left)

    def _go_on(self, left: WorkerError) -> None:
        """A node has left whose work others have: their ranks go on, and copies go to the nodes that there are."""
        self._tell_led()
        self.on_left(left.ranks, str(left))
        nodes = self._mirror_copies()
        for node in self._nodes.values():
            node.channel.send(Remaining(left.ranks, nodes))

    def _mirror_copies(self) -> dict[int, NodeAddress]:
        """From now on copies of this node go to the next of the nodes that there are, which are returned."""
        nodes = {self.number: self.address, **{number: node.address for number, node in self._nodes.items()}}
        if self._copies is not None:
            other = next_node(self.number, nodes)
            self._mirror = CopyMirror(self._copies, self.ranks[self.number], self._key, other, self._mirror)
        return nodes

    def _end_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def _accept(self) -> None:
        for connection, address in connections(self._listener):  # nobody waits for a stranger who says nothing
            threading.Thread(target=self._welcome, args=(connection, f"the node at {address}"), name="welcome", daemon=True).start()

    def _welcome(self, connection: socket.socket, who: str) -> None:
        """A node is one of this job, or told why not."""
        try:
            channel = Channel(SealedSocket(connection, self._key, who, serves=True))
        except SealedSocketError:
            connection.close()  # a stranger, or somebody who left
            return
        hello = channel.take(SILENT_S)
        if not isinstance(hello, Hello):
            channel.close()
            return
        with self._changed:
            wrong = self._refusal(hello)
            if not wrong:
                self._arrived[hello.node] = _Node(channel, hello.address, hello.held)
                self._changed.notify_all()
        if wrong:
            part(channel, Refused(wrong))

    def _refusal(self, hello: Hello) -> str:
        if self._is_closed:
            return f"node {self.number} leads this run no more."
        if not 0 <= hello.node < len(self.ranks) or hello.node == self.number:
            return f"--node-rank is {hello.node}, but the plan's other nodes are {[n for n in range(len(self.ranks)) if n != self.number]}."
        if self._attempt and self._copies is None:
            return "a node can join only a run that keeps copies to go on from: --on-death recover, and --copies above 0."
        if hello.node < self.number:
            return f"node {hello.node} cannot join a run that node {self.number} leads: the ranks of the one that leads come first."
        if (there := self._nodes.get(hello.node) or self._waiting().get(hello.node)) is not None:
            return f"--node-rank is {hello.node}, but there is such a node already, at {there.address.host}."
        different = list(differing_facts(self._facts, hello.facts, f"on node {self.number}"))
        return f"node {hello.node} was started for something else than node {self.number}:\n" + "\n".join(different) if different else ""


def lost_words(who: str, ranks: Sequence[int], why: str, *, has_left: bool) -> str:
    """Words for a node that is not there any more."""
    whose = f"with rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}"
    return f"{who} leaves, {whose}, as it was asked to (SIGTERM)" if has_left else f"{who} is lost, {whose}: {why}"


def part(channel: Channel, word: End | Refused | Leaving) -> None:
    """Says the last word, and waits until it was heard: what an end that has closed still receives would take it back."""
    channel.send(word)
    while not isinstance(channel.take(SILENT_S), Gone | None):
        pass
    channel.close()
