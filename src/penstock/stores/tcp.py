"""Values in torch's TCPStore, which the launcher of a job serves; nothing needs to be installed."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from penstock.errors import InputError
from penstock.stores.protocol import StoreError

__all__ = ["TcpValues", "serve_tcp"]

T = TypeVar("T")

_CONNECT_S = 30.0
_BACKLOG = 1024


def serve_tcp(host: str = "127.0.0.1", port: int = 0) -> Any:
    """A TCPStore server that lives as long as the returned object, listening on `host` alone; `.port` is where.

    By itself a TCPStore listens on all interfaces; given a socket that is bound already, it takes that.
    """
    from torch.distributed import TCPStore

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise InputError(f"a store cannot listen on {host}:{port}: {error.strerror}. Free the port, or take another.") from None
    bound = listener.getsockname()[1]
    return TCPStore(host, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=_seconds(_CONNECT_S))


class TcpValues:
    """One connection to a TCPStore."""

    may_forget = False

    def __init__(self, host: str, port: int) -> None:
        self.where = f"TCPStore at {host}:{port}"
        self._host, self._port = host, port
        self._store: Any = None
        self.connect()

    def put(self, values: Mapping[str, bytes]) -> None:
        self._call(lambda: self._store.multi_set(list(values), list(values.values())))

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        def read() -> list[bytes | None]:
            if self._store.check(list(keys)):
                return list(self._store.multi_get(list(keys)))
            return [self._store.get(key) if self._store.check([key]) else None for key in keys]

        return self._call(read)

    def missing(self, keys: Sequence[str]) -> list[str]:
        def missing() -> list[str]:
            if self._store.check(list(keys)):
                return []
            return [key for key in keys if not self._store.check([key])]

        return self._call(missing)

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        from torch.distributed import DistNetworkError, DistStoreError

        try:
            self._store.wait([key], _seconds(max(timeout_s, 0.001)))
        except DistNetworkError:
            raise self._gone() from None
        except DistStoreError:  # how it tells that time is up
            return None
        value: bytes = self._call(lambda: self._store.get(key))
        return value

    def delete(self, keys: Sequence[str]) -> None:
        def delete() -> None:
            for key in keys:
                self._store.delete_key(key)

        self._call(delete)

    def names(self, prefix: str) -> list[str]:
        return [key for key in self._call(lambda: self._store.list_keys()) if key.startswith(prefix)]

    def connect(self) -> None:
        from torch.distributed import DistError, TCPStore

        try:
            self._store = TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_seconds(_CONNECT_S))
        except DistError:
            raise StoreError(f"{self.where} does not answer. It is served by the launcher of the job: is that running?") from None

    def close(self) -> None:
        self._store = None

    def _call(self, action: Callable[[], T]) -> T:
        from torch.distributed import DistError

        try:
            return action()
        except DistError:
            raise self._gone() from None

    def _gone(self) -> StoreError:
        """Its server is the launcher, which the job does not outlive: there is nothing to wait for."""
        return StoreError(f"{self.where} is gone: the launcher of the job has ended.")


def _seconds(time_s: float) -> timedelta:
    return timedelta(seconds=time_s)
