"""The channel between two supervisors: messages both ways, and a heartbeat by which each knows that the other is there."""

from __future__ import annotations

import select
import socket
import threading
from queue import SimpleQueue

import msgspec

from penstock.runtime.nodes.messages import Gone, Message, decode
from penstock.runtime.nodes.sealed_socket import SealedSocket, SealedSocketError

__all__ = ["SILENT_S", "Channel"]

_BEAT_S = 0.25
SILENT_S = 2.5
"""A node that says nothing for so long counts as lost."""
_BEAT = b""


class Channel:
    """One end. `multiprocessing.connection.wait` takes it, and returns when there is something to `take`."""

    def __init__(self, sealed: SealedSocket) -> None:
        self.who, self._sealed = sealed.who, sealed
        self._heard: SimpleQueue[Message] = SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        self._sending, self._closed = threading.Lock(), threading.Event()
        sealed.set_timeout(SILENT_S)
        self._threads = [threading.Thread(target=work, name="node channel", daemon=True) for work in (self._hear, self._beat)]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        """Readable while there is something to take."""
        return self._woken.fileno()

    @property
    def is_over(self) -> bool:
        """Whether the other end is gone, as is heard after all that it has said."""
        return self._closed.is_set()

    def send(self, message: Message) -> None:
        """Says something, if the other end is there; if not, `Gone` is heard."""
        self._say(msgspec.msgpack.encode(message))

    def take(self, timeout_s: float | None = None) -> Message | None:
        """The next message, `Gone` at last and for ever; None: nothing came in that time."""
        if not select.select([self._woken], [], [], timeout_s)[0]:
            return None
        found = self._heard.get()
        if not isinstance(found, Gone):
            self._woken.recv(1)
        else:
            self._heard.put(found)
        return found

    def close(self) -> None:
        """Ends the connection and its threads."""
        self._closed.set()
        self._sealed.shut()
        for thread in self._threads:
            thread.join()
        self._sealed.close()
        self._woken.close()
        self._waker.close()

    def _say(self, payload: bytes) -> None:
        try:
            with self._sending:
                self._sealed.send(payload)
        except SealedSocketError:
            self._sealed.shut()  # which the thread that hears is told

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_S):
            self._say(_BEAT)

    def _hear(self) -> None:
        while True:
            try:
                payload = self._sealed.receive()
                found = decode(payload) if payload != _BEAT else None
            except (SealedSocketError, msgspec.DecodeError) as error:
                found = Gone(str(error).rstrip("."))
            if found is not None:
                self._heard.put(found)
                self._waker.send(b"\0")
            if isinstance(found, Gone):
                self._closed.set()
                self._sealed.shut()
                return
