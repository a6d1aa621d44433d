"""Values in a Redis server; each is a list of one element, because lists can be waited on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock.errors import InputError
from penstock.stores.protocol import ConnectionLost, StoreError

__all__ = ["RedisValues"]

T = TypeVar("T")

_ANSWER_S = 15.0
"""A server that says nothing for so long counts as lost; longer than any wait blocks."""
_FIRST_CONNECT_S = 10.0
_EXPIRY_S = 3 * 24 * 3600
"""Keys of a job that was killed go by themselves."""


class RedisValues:
    """One connection to a server (`redis://[user:password@]host:port/db`, `rediss://` for TLS)."""

    may_forget = True

    def __init__(self, url: str) -> None:
        self._redis = _import_redis()
        self._url = url
        parts = urlsplit(url)
        self.where = f"Redis at {parts.hostname or 'localhost'}:{_port(url)}"
        self._client: Any = None
        self._make()
        self._first_connect()

    def put(self, values: Mapping[str, bytes]) -> None:
        def put() -> None:
            with self._client.pipeline(transaction=True) as together:
                for key, value in values.items():
                    together.delete(key)
                    together.rpush(key, value)
                    together.expire(key, _EXPIRY_S)
                together.execute()

        self._call(put)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        def read() -> list[bytes | None]:
            with self._client.pipeline(transaction=True) as together:
                for key in keys:
                    together.lindex(key, 0)
                return list(together.execute())

        return self._call(read)

    def missing(self, keys: Sequence[str]) -> list[str]:
        def missing() -> list[str]:
            with self._client.pipeline(transaction=False) as together:
                for key in keys:
                    together.exists(key)
                return [key for key, there in zip(keys, together.execute(), strict=True) if not there]

        return self._call(missing)

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        # Moving the only element of a list onto that list leaves it as it was, and blocks until there is one. Zero would mean for ever.
        value: bytes | None = self._call(lambda: self._client.blmove(key, key, max(0.01, timeout_s), "LEFT", "LEFT"))
        return value

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._call(lambda: self._client.delete(*keys))

    def names(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._call(lambda: list(self._client.scan_iter(match=f"{prefix}*", count=1000)))]

    def connect(self) -> None:
        self.close()
        self._make()
        self._call(lambda: self._client.ping())

    def close(self) -> None:
        self._client.close()

    def _make(self) -> None:
        try:
            # No retries of its own, and no second connection: whoever lost one must first bring back what the server may have forgotten.
            self._is_connected = False
            self._client = self._redis.Redis.from_url(
                self._url, socket_timeout=_ANSWER_S, socket_connect_timeout=_ANSWER_S, socket_keepalive=True,
                redis_connect_func=self._greet,
                retry=self._redis.retry.Retry(self._redis.backoff.NoBackoff(), 0),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise InputError(f"the address of {self.where} is not valid: {error}. Write redis://[user:password@]host:port/db.") from None

    def _greet(self, connection: Any) -> None:
        """Begins the one connection of a client; the package would open another without a word where the server has closed the first."""
        if self._is_connected:
            raise self._redis.exceptions.ConnectionError("the server has closed the connection")
        connection.on_connect()
        self._is_connected = True

    def _first_connect(self) -> None:
        """A server that is only just starting is waited for a little; an address where nothing is should be told soon."""
        start = time.monotonic()
        while True:
            try:
                self._call(lambda: self._client.ping())
                return
            except ConnectionLost as lost:
                why = str(lost).rstrip(".")
                if time.monotonic() - start > _FIRST_CONNECT_S:
                    raise StoreError(f"{self.where} does not answer: {why}. Start one with: penstock store start") from None
            time.sleep(0.1)

    def _call(self, action: Callable[[], T]) -> T:
        errors = self._redis.exceptions
        try:
            return action()
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
            raise StoreError(f"{self.where} refuses us: {error}. Check the user and password of its address.") from None
        except (errors.ConnectionError, errors.TimeoutError, OSError) as error:
            raise ConnectionLost(str(error)) from None
        except errors.ReadOnlyError as error:  # a replica, until it is made the master
            raise ConnectionLost(str(error)) from None
        except errors.ResponseError as error:
            raise StoreError(f"{self.where} refuses a command: {error}.") from None


def _port(url: str) -> int:
    try:
        return urlsplit(url).port or 6379
    except ValueError:
        raise InputError(
            "the port of the store's address is not a number up to 65535. Write redis://[user:password@]host:port/db."
        ) from None


def _import_redis() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ImportError:
        raise InputError("a redis:// store needs the Python package 'redis'. Install it with: pip install 'penstock[redis]'") from None
    return redis
