"""Who comes to a socket that listens: one that fails to come in keeps the next from nothing."""

from __future__ import annotations

import errno
import socket
from typing import cast

from penstock.stores.listening import bound_socket, connections


class _Busy:
    """A listener that has no room for the first who comes."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._failures = listener, [errno.EMFILE, errno.ECONNABORTED]

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self._failures:
            raise OSError(self._failures.pop(), "not now")
        return self._listener.accept()


def test_others_come_in_after_one_who_could_not() -> None:
    listener = bound_socket("127.0.0.1")
    with listener, socket.create_connection(listener.getsockname()):
        coming = connections(cast(socket.socket, _Busy(listener)))
        connection, address = next(coming)
        assert address == "127.0.0.1"
        connection.close()
        listener.shutdown(socket.SHUT_RDWR)
        assert next(coming, None) is None
