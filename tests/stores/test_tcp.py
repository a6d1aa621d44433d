"""TCPStore: bound to loopback alone, and a clean end when its server goes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.stores import Job, StoreError, open_store
from penstock.stores.tcp import serve_tcp


def listening_addresses(port: int) -> set[str]:
    """Where the kernel says that a port is listened on, in its own hexadecimal form."""
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()[1:]]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}


def test_the_server_listens_on_loopback_alone() -> None:
    server = serve_tcp()
    assert listening_addresses(server.port) == {"0100007F"}


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve_tcp(port=port)


def test_a_server_that_goes_ends_the_wait_with_a_message() -> None:
    server = serve_tcp()
    store = open_store(f"tcp://127.0.0.1:{server.port}", Job.new(1))
    store.publish(0, {0: b"program"})
    del server
    with pytest.raises(StoreError, match="is gone: the launcher of the job has ended"):
        store.fetch(0, 0)
    with pytest.raises(StoreError, match="is gone"):
        store.publish(1, {0: b"program"})
