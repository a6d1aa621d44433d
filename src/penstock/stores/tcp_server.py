"""The store that the launcher of a job serves: values in its memory, for whoever proves to hold the job's key."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from penstock.stores.listening import LOOPBACK, bound_socket
from penstock.stores.proof import GREETING, NONCE_BYTES, PROOF_BYTES, fresh_nonce, is_proof, proof

__all__ = ["LENGTH_BYTES", "TcpServer"]

LENGTH_BYTES = 8
"""A request and its answer are msgpack behind their length."""
_PROOF_S = 30.0
"""How long a stranger may keep a connection."""


class TcpServer:
    """Serves on one address until it is closed, from a thread of its own; `.port` is where.

    >>> with TcpServer(job.key) as server: open_store(f"tcp://127.0.0.1:{server.port}", job)   # doctest: +SKIP
    """

    def __init__(self, key: bytes, host: str = LOOPBACK, port: int = 0) -> None:
        self._key = key
        self._listener = bound_socket(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, set[asyncio.Future[bytes]]] = defaultdict(set)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="store server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def __enter__(self) -> TcpServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which cancels what is left of connections
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._listener)
        await self._end.wait()
        server.close()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: proof first, then requests until the client goes."""
        try:
            async with asyncio.timeout(_PROOF_S):
                if not await self._proven(reader, writer):
                    return
            while True:
                length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
                answer = msgspec.msgpack.encode(await self._answer(*msgspec.msgpack.decode(await reader.readexactly(length))))
                writer.write(len(answer).to_bytes(LENGTH_BYTES, "big") + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.CancelledError):
            return  # whoever goes away, or cannot prove anything in time, needs no answer; nor does anybody when the server is closed
        finally:
            writer.close()

    async def _proven(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the client holds the job's key; if so, it is shown that this server does."""
        mine = fresh_nonce()
        writer.write(GREETING + mine)
        said = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
        its = said[:NONCE_BYTES]
        if not is_proof(said[NONCE_BYTES:], self._key, "client", mine, its):
            return False
        writer.write(proof(self._key, "server", mine, its))
        return True

    async def _answer(self, name: str, *given: Any) -> Any:
        """What a method of `KeyValues` returns."""
        match name:
            case "put":
                return self._put(*given)
            case "read":
                return [self._values.get(key) for key in given[0]]
            case "missing":
                return [key for key in given[0] if key not in self._values]
            case "wait":
                return await self._wait(*given)
            case "delete":
                return self._delete(*given)
            case "names":
                return [key for key in self._values if key.startswith(given[0])]
        raise ConnectionAbortedError(f"a store has no '{name}'")

    def _put(self, values: Mapping[str, bytes]) -> None:
        self._values.update(values)
        for key in values.keys() & self._awaited.keys():
            for waiting in self._awaited.pop(key):
                if not waiting.done():
                    waiting.set_result(values[key])

    def _delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._values.pop(key, None)

    async def _wait(self, key: str, timeout_s: float) -> bytes | None:
        if key in self._values:
            return self._values[key]
        waiting: asyncio.Future[bytes] = self._loop.create_future()
        self._awaited[key].add(waiting)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting
        except TimeoutError:
            return None
        finally:
            if key in self._awaited:  # nobody put it: the last who gives up forgets that it was awaited
                self._awaited[key].discard(waiting)
                if not self._awaited[key]:
                    del self._awaited[key]
