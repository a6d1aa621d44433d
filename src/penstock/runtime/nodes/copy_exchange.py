"""Copies at another node too: each supervisor sends those of its ranks to the next node, and hands out what it holds.

    node 0: copies of ranks 0, 1 ──► node 1: copies of ranks 2, 3, and 0, 1 ──► node 2 … ──► node 0

A node that is lost leaves all of its copies at the next one. Before ranks go on from copies, every node gets those that it lacks.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Literal

import msgspec

from penstock.runtime.nodes.messages import NodeAddress
from penstock.runtime.nodes.sealed_socket import SealedSocket, SealedSocketError
from penstock.runtime.recovering.copies import Copies, SlotHead
from penstock.stores.listening import bound_socket, connections

__all__ = ["CopyMirror", "CopyServer", "HolderLostError", "bring_copies", "next_node"]

_LOOK_S = 0.05
_AGAIN_S = 0.5
_ANSWER_S, _CALL_S = 10.0, 2.0
_YES, _NO = b"y", b"n"
_Asked = tuple[Literal["put", "get"], int, SlotHead]


class HolderLostError(SealedSocketError):
    """A node does not hand out the copies that it told of."""

    def __init__(self, message: str, holder: NodeAddress) -> None:
        super().__init__(message)
        self.holder = holder


class CopyServer:
    """Takes the copies of another node, and hands out all that are here; from threads of its own until it is closed."""

    def __init__(self, copies: Copies, key: bytes, host: str) -> None:
        self._copies, self._key = copies, key
        self._listener = bound_socket(host)
        self.address = NodeAddress(host, self._listener.getsockname()[1])
        self._met: set[SealedSocket] = set()
        self._thread = threading.Thread(target=self._accept, name="copy server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        for one in list(self._met):
            one.shut()

    def _accept(self) -> None:
        for connection, address in connections(self._listener):
            threading.Thread(target=self._serve, args=(connection, f"the node at {address}"), name="copies", daemon=True).start()

    def _serve(self, connection: socket.socket, who: str) -> None:
        with closing(connection):
            try:
                sealed = SealedSocket(connection, self._key, who, serves=True)
                self._met.add(sealed)
                try:
                    sealed.set_timeout(_ANSWER_S)
                    while True:
                        self._answer(sealed, *_decoded(sealed.receive()))
                finally:
                    self._met.discard(sealed)
            except (SealedSocketError, msgspec.DecodeError):
                return  # whoever asked connects again, or is gone

    def _answer(self, sealed: SealedSocket, asked: str, slot: int, head: SlotHead) -> None:
        if not 0 <= slot < len(self._copies.slots(0)) * self._copies.num_processes:
            raise SealedSocketError(f"{sealed.who} names copy {slot}, which there is not.")
        if asked == "put":
            _receive(sealed, self._copies, slot, head)
            sealed.send(_YES)
        else:
            found = self._copies.head(slot)
            sealed.send(msgspec.msgpack.encode(("get", slot, found)))
            _send(sealed, self._copies, slot, found)


class CopyMirror:
    """Sends each new copy of this node's ranks to another node, from a thread of its own; without another node all are safe as they are."""

    def __init__(
        self, copies: Copies, own: Sequence[int], key: bytes, other: NodeAddress | None, before: CopyMirror | None = None
    ) -> None:  # fmt: skip
        """In place of the one `before`, which ends: where that sent to a node that has left, the other one has none of the copies."""
        self._copies, self._key, self.other = copies, key, other
        self._slots = [slot for process in own for slot in copies.slots(process)]
        if before is not None:
            before.close()
            for slot in self._slots if before.other != other else ():
                copies.mirrored_elsewhere(slot, SlotHead(0))
        self._closed = threading.Event()
        self._sealed: SealedSocket | None = None
        self._thread = threading.Thread(target=self._mirror, name="copy mirror", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Sends no more; what is under way is cut off."""
        self._closed.set()
        if self._sealed is not None:
            self._sealed.shut()
        self._thread.join()
        if self._sealed is not None:
            self._sealed.close()

    def _mirror(self) -> None:
        pause_s = _LOOK_S
        while not self._closed.wait(pause_s):
            pause_s = _LOOK_S
            for slot in self._slots:
                head = self._copies.head(slot)
                if not head.marked or head.is_elsewhere:
                    continue
                try:
                    if self.other is None or self._put(self.other, slot, head):
                        self._copies.mirrored_elsewhere(slot, head)
                except SealedSocketError:  # whether the node is lost is for its channel to say
                    if self._sealed is not None:
                        self._sealed.close()
                    self._sealed, pause_s = None, _AGAIN_S
                    break

    def _put(self, other: NodeAddress, slot: int, head: SlotHead) -> bool:
        """Whether the other node has this copy whole."""
        if self._sealed is None:
            self._sealed = SealedSocket.call(other.host, other.port, self._key, "the next node", timeout_s=_CALL_S)
            self._sealed.set_timeout(_ANSWER_S)
        self._sealed.send(msgspec.msgpack.encode(("put", slot, head)))
        is_whole = _send(self._sealed, self._copies, slot, head)
        return self._sealed.receive() == _YES and is_whole


def bring_copies(
    copies: Copies, key: bytes, step: int, held: Mapping[int, NodeAddress], look: Callable[[], None] = lambda: None
) -> None:  # fmt: skip
    """Forgets the copies of later steps than this one, and gets those of it that are not here from the nodes that hold them. `look` is
    called now and then: it raises what is to end that."""
    copies.go_back(step)
    for slot, address in held.items():
        if copies.head(slot).step != step:
            try:
                _get(copies, key, slot, address, look)
            except SealedSocketError as error:
                raise HolderLostError(str(error), address) from None
            if copies.head(slot).step != step:
                raise HolderLostError(f"a node at {address.host} does not have the copy of step {step} that it told of.", address)
        copies.mirrored_elsewhere(slot, copies.head(slot))


def _get(copies: Copies, key: bytes, slot: int, holder: NodeAddress, look: Callable[[], None]) -> None:
    with closing(SealedSocket.call(holder.host, holder.port, key, "a node with copies", timeout_s=_CALL_S)) as sealed:
        sealed.send(msgspec.msgpack.encode(("get", slot, SlotHead(0))))
        _receive(sealed, copies, slot, _decoded(sealed.receive())[2], look)


def next_node(own: int, nodes: Mapping[int, NodeAddress]) -> NodeAddress | None:
    """The node that keeps the copies of another: the one after it, or the first after the last."""
    others = sorted(node for node in nodes if node != own)
    return nodes[next((node for node in others if node > own), others[0])] if others else None


def _send(sealed: SealedSocket, copies: Copies, slot: int, head: SlotHead) -> bool:
    """The bytes of a copy, and whether it stayed the same meanwhile."""
    for part in copies.read(slot, head):
        sealed.send(part)
    is_whole = head.marked > 0 and copies.head(slot)[:6] == head[:6]
    sealed.send(_YES if is_whole else _NO)
    return is_whole


def _receive(sealed: SealedSocket, copies: Copies, slot: int, head: SlotHead, look: Callable[[], None] = lambda: None) -> None:
    with copies.written(slot, head) as write:
        left = head.size - copies.HEAD_BYTES
        while left > 0:
            look()
            part = sealed.receive()
            write(part)
            left -= len(part)
        if sealed.receive() != _YES:
            raise SealedSocketError(f"{sealed.who} has begun another copy in place of the one that it sent.")


def _decoded(payload: bytes) -> _Asked:
    return msgspec.msgpack.decode(payload, type=_Asked)
