"""Ports for what binds them later, in another process: none that the system or another test gives away meanwhile."""

from __future__ import annotations

import random
import socket

__all__ = ["free_port"]

_KEPT: list[socket.socket] = []
"""One of UDP with the number of each port that was given, which is how other processes with tests know that it is taken."""
_PORTS = range(12_000, 30_000)
"""Below those that systems give to whoever asks for any."""


def free_port() -> int:
    """A port of TCP that is free, and stays so until somebody binds this very number."""
    while True:
        port = random.SystemRandom().choice(_PORTS)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            mark.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)):
                _KEPT.append(mark)
                return port
        except OSError:
            mark.close()
