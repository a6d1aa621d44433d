"""Connections between the supervisors of a job: both ends prove that they hold its key, and every message carries a MAC and its number.

    client ──► server   the greeting and proofs of `stores/proof.py`, then each direction has a key of its own, made of both nonces
    frame               length │ HMAC(key of the direction, number of the frame, payload) │ payload

A frame that was changed, left out, said twice, or overheard on another connection does not match, and ends the connection.
"""

from __future__ import annotations

import hmac
import socket
from contextlib import suppress

from penstock.errors import PenstockError
from penstock.stores.listening import await_readable
from penstock.stores.proof import NONCE_BYTES, PROOF_BYTES, fresh_nonce, is_proof, proof

__all__ = ["SealedSocket", "SealedSocketError"]

_GREETING = b"penstock node 01\n"
_LENGTH_BYTES, _NUMBER_BYTES, _MAC_BYTES = 8, 8, 32
_MOST_BYTES = 1 << 28
"""Of one frame; whoever asks for more is not one of us."""
_PROOF_S = 10.0
_SERVER, _CLIENT = "serving node", "calling node"


class SealedSocketError(PenstockError):
    """The other end is gone, silent, or not of this job."""


class SealedSocket:
    """One end of such a connection; one thread may send while another receives."""

    def __init__(self, connection: socket.socket, key: bytes, who: str, *, serves: bool) -> None:
        """Proves to the other end, `who` in words, that this one holds the job's key, and has it prove that too."""
        self.who, self._socket = who, connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_timeout(_PROOF_S)
        server, client = self._served(key) if serves else self._called(key)
        keys = [hmac.digest(key, f"penstock frames of the {role} ".encode() + server + client, "sha256") for role in (_SERVER, _CLIENT)]
        self._sends, self._receives = keys if serves else reversed(keys)
        self._num_sent = self._num_received = 0

    @classmethod
    def call(cls, host: str, port: int, key: bytes, who: str, *, source: str = "", timeout_s: float = _PROOF_S) -> SealedSocket:
        """Connects to a server, from the address `source` of this machine if there is one."""
        try:
            connection = socket.create_connection((host, port), timeout_s, source_address=(source, 0) if source else None)
        except OSError as error:
            raise SealedSocketError(f"{who} at {host}:{port} does not answer: {error.strerror or error}.") from None
        try:
            return cls(connection, key, who, serves=False)
        except SealedSocketError:
            connection.close()
            raise

    @property
    def own_host(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def set_timeout(self, timeout_s: float) -> None:
        """Sets how long the other end may say nothing, or take nothing, before it counts as gone."""
        self._timeout_s = timeout_s
        self._socket.settimeout(timeout_s)

    def send(self, payload: bytes) -> None:
        """One message."""
        mac = _mac(self._sends, self._num_sent, payload)
        self._num_sent += 1
        self._send(len(payload).to_bytes(_LENGTH_BYTES, "big") + mac + payload)

    def receive(self) -> bytes:
        """The next message."""
        head = self._receive(_LENGTH_BYTES + _MAC_BYTES)
        length = int.from_bytes(head[:_LENGTH_BYTES], "big")
        if length > _MOST_BYTES:
            raise SealedSocketError(f"{self.who} says that a message has {length} bytes; {_MOST_BYTES} is the most. It was ended.")
        payload = self._receive(length)
        if not hmac.compare_digest(_mac(self._receives, self._num_received, payload), head[_LENGTH_BYTES:]):
            raise SealedSocketError(
                f"message {self._num_received} of {self.who} is refused: its MAC does not match. It was changed, left out or said twice."
            )
        self._num_received += 1
        return payload

    def shut(self) -> None:
        """Ends the connection, also while another thread waits on it: whoever waits at either end is told."""
        with suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it, and lets go of it; no other thread may use it any more, since the next file may have its number."""
        self.shut()
        self._socket.close()

    def _served(self, key: bytes) -> tuple[bytes, bytes]:
        mine = fresh_nonce()
        self._send(_GREETING + mine)
        said = self._receive(NONCE_BYTES + PROOF_BYTES)
        its = said[:NONCE_BYTES]
        if not is_proof(said[NONCE_BYTES:], key, _CLIENT, mine, its):
            raise SealedSocketError(f"{self.who} does not hold the job's key.")
        self._send(proof(key, _SERVER, mine, its))
        return mine, its

    def _called(self, key: bytes) -> tuple[bytes, bytes]:
        greeting, mine = self._receive(len(_GREETING) + NONCE_BYTES), fresh_nonce()
        its = greeting[len(_GREETING) :]
        if not greeting.startswith(_GREETING):
            raise SealedSocketError(f"{self.who} is no supervisor of Penstock: it greets with {greeting[:16]!r}.")
        self._send(mine + proof(key, _CLIENT, its, mine))
        if not is_proof(self._receive(PROOF_BYTES), key, _SERVER, its, mine):
            raise SealedSocketError(f"{self.who} does not hold the job's key.")
        return its, mine

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._gone(error) from None

    def _receive(self, count: int) -> bytes:
        parts, left = list[bytes](), count
        while left:
            try:
                await_readable(self._socket, self._timeout_s)
                part = self._socket.recv(min(left, 1 << 20))
            except OSError as error:
                raise self._gone(error) from None
            if not part:
                raise self._gone(ConnectionResetError())
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _gone(self, error: OSError) -> SealedSocketError:
        if isinstance(error, TimeoutError):
            return SealedSocketError(f"{self.who} has been silent for {self._timeout_s:g} s.")
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            return SealedSocketError(f"{self.who} has ended the connection.")
        return SealedSocketError(f"{self.who} is gone: {error.strerror or error}.")


def _mac(key: bytes, number: int, payload: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(_NUMBER_BYTES, "big") + payload, "sha256")
