"""Servers for the tests of stores: memory, the server of a launcher and a real Redis, each with fresh connections on demand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.stores.memory import MemoryValues
from penstock.stores.protocol import KeyValues

Connect = Callable[[], KeyValues]


def require_redis() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine's path (Debian: apt-get install redis-server)")
    pytest.importorskip("redis", reason="the Python package 'redis' is not installed")


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[Any]:
    """One server for all tests that do not harm it."""
    require_redis()
    from penstock.stores.server import start_redis

    server = start_redis()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "tcp", "redis"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes connections to one server; each thread of a test takes its own."""
    if request.param == "memory":
        shared = MemoryValues()
        yield lambda: shared
    elif request.param == "tcp":
        from penstock.stores.tcp import TcpValues
        from penstock.stores.tcp_server import TcpServer

        key = bytes(32)
        with TcpServer(key) as server:
            yield lambda: TcpValues("127.0.0.1", server.port, key)
    else:
        from penstock.stores.redis import RedisValues

        address = request.getfixturevalue("shared_redis").address
        made: list[RedisValues] = []
        yield lambda: made.append(RedisValues(address)) or made[-1]  # type: ignore[func-returns-value]
        for values in made:
            values.close()
