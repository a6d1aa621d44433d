"""Values in the store that the launcher of a job serves (`tcp_server.py`); nothing needs to be installed."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.stores.listening import await_readable
from penstock.stores.proof import GREETING, NONCE_BYTES, PROOF_BYTES, fresh_nonce, is_proof, proof
from penstock.stores.protocol import StoreError
from penstock.stores.tcp_server import LENGTH_BYTES

__all__ = ["TcpValues"]

_ANSWER_S = 60.0
"""A server that says nothing for so long is stuck, or cut off."""
_LONGEST_WAIT_S = 10.0
"""What one request waits at most, so that a server that is cut off is noticed, and keeps no wait of a client that is."""


class _Closed(StoreError):
    """The server has closed the connection."""


class TcpValues:
    """One connection to the server of a job, which both ends begin by proving that they hold its key."""

    may_forget = False

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.where = f"the store at {host}:{port}"
        self._place, self._key = (host, port), key
        self._socket: socket.socket | None = None
        self.connect()

    def put(self, values: Mapping[str, bytes]) -> None:
        self._ask("put", dict(values))

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        found: list[bytes | None] = self._ask("read", list(keys))
        return found

    def missing(self, keys: Sequence[str]) -> list[str]:
        found: list[str] = self._ask("missing", list(keys))
        return found

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        left_s = timeout_s
        while left_s > 0:  # counted in waits: time in which this process did not run is none in which nothing came
            value: bytes | None = self._ask("wait", key, min(left_s, _LONGEST_WAIT_S))
            if value is not None:
                return value
            left_s -= _LONGEST_WAIT_S
        return None

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", list(keys))

    def names(self, prefix: str) -> list[str]:
        found: list[str] = self._ask("names", prefix)
        return found

    def connect(self) -> None:
        self.close()
        try:
            self._socket = socket.create_connection(self._place, _ANSWER_S)
        except OSError:
            raise StoreError(f"{self.where} does not answer. It is served by the launcher of the job: is that running?") from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            self._prove()
        except StoreError:
            self.close()
            raise

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _prove(self) -> None:
        """Shows that this process holds the job's key, and that the server does."""
        greeting = self._receive(len(GREETING) + NONCE_BYTES)
        its, mine = greeting[len(GREETING) :], fresh_nonce()
        if not greeting.startswith(GREETING):
            raise StoreError(f"{self.where} is no store of Penstock: it greets with {greeting[:16]!r}.")
        self._send(mine + proof(self._key, "client", its, mine))
        try:
            answer = self._receive(PROOF_BYTES)
        except _Closed:
            raise StoreError(f"{self.where} refuses us: this process does not hold the key of its job.") from None
        if not is_proof(answer, self._key, "server", its, mine):
            raise StoreError(f"{self.where} is not that of this job: it does not hold the job's key.")

    def _ask(self, *request: Any) -> Any:
        frame = msgspec.msgpack.encode(request)
        self._send(len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
        return msgspec.msgpack.decode(self._receive(int.from_bytes(self._receive(LENGTH_BYTES), "big")))

    def _send(self, data: bytes) -> None:
        try:
            self._connected().sendall(data)
        except OSError as error:
            raise self._gone(error) from None

    def _receive(self, count: int) -> bytes:
        parts, left = [], count
        while left:
            try:
                await_readable(self._connected(), _ANSWER_S)
                part = self._connected().recv(min(left, 1 << 20))
            except OSError as error:
                raise self._gone(error) from None
            if not part:
                raise self._gone(None)
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            raise StoreError(f"the connection to {self.where} was closed.")
        return self._socket

    def _gone(self, error: OSError | None) -> StoreError:
        """The error of a server that is gone: that is the launcher, which the job does not outlive, so that there is nothing to wait
        for."""
        if isinstance(error, TimeoutError):
            return StoreError(f"{self.where} has said nothing for {_ANSWER_S:g} s: the launcher of the job hangs, or the network is cut.")
        return _Closed(f"{self.where} is gone: the launcher of the job has ended.")
