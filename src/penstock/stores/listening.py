"""Sockets that listen on one address alone, waiting on one, and whether an address is loopback."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterator
from ipaddress import ip_address

from penstock.errors import InputError

__all__ = ["LOOPBACK", "await_readable", "bound_socket", "connections", "means_loopback"]

LOOPBACK = "127.0.0.1"
_BACKLOG, _AGAIN_S = 1024, 0.1
_LOOKS = 10
"""In which silence is counted."""


def means_loopback(name: str) -> bool:
    """Whether a name or an address says that all who use it are on one machine. Not if it merely resolves so: some systems call themselves
    loopback, which is true for themselves alone."""
    try:
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def bound_socket(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on this address alone; port 0 takes a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"this machine cannot listen on {host}:{port}: {error.strerror}. Name an address of this machine.") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise InputError(f"this machine cannot listen on {host}:{port}: {error.strerror}. Free the port, or take another.") from None
    return listener


def connections(listener: socket.socket) -> Iterator[tuple[socket.socket, str]]:
    """Accepts connections, each with the address of its other end, until the listener is shut down."""
    while True:
        try:
            connection, place = listener.accept()
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EBADF):  # it was shut down, or closed
                return
            time.sleep(_AGAIN_S)  # whoever came has gone, or there are too many files open just now
            continue
        yield connection, place[0]


def await_readable(connection: socket.socket, timeout_s: float) -> None:
    """Returns when there is something to receive; `TimeoutError` if nothing comes. Time in which this process did not run counts as one
    look: who is stopped, as by Ctrl-Z, or gets no core, blames nobody."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not any(poll.poll(1000 * timeout_s / _LOOKS) for _ in range(_LOOKS)):
        raise TimeoutError
