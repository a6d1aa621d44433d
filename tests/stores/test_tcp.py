"""The store of a launcher: on loopback alone, for holders of the job's key alone, and a clean end when it goes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.errors import InputError
from penstock.stores import Job, StoreError, open_store
from penstock.stores import tcp as tcp_module
from penstock.stores import tcp_server as server_module
from penstock.stores.listening import means_loopback
from penstock.stores.proof import GREETING, NONCE_BYTES, PROOF_BYTES, proof
from penstock.stores.ring import Ring
from penstock.stores.tcp import TcpValues
from penstock.stores.tcp_server import TcpServer

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def server() -> Iterator[TcpServer]:
    with TcpServer(KEY) as served:
        yield served


def received(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def test_nobody_reaches_it_from_outside(server: TcpServer) -> None:
    """127.0.0.2 is this machine too, and would be answered by whoever listens on all addresses."""
    socket.create_connection(("127.0.0.1", server.port), 60).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), 60)


def test_a_stranger_gets_nothing(server: TcpServer) -> None:
    with closing(TcpValues("127.0.0.1", server.port, KEY)) as ours:
        ours.put({"secret": b"program"})
        with pytest.raises(StoreError, match=r"store at 127\.0\.0\.1:\d+ refuses us: this process does not hold the key of its job"):
            TcpValues("127.0.0.1", server.port, OTHER)
        request = b"\x00" * 7 + b"\x10" + b"\x92\xa4read\x91\xa6secret" + b"\x00" * 64
        with socket.create_connection(("127.0.0.1", server.port), 60) as stranger:  # asks at once, as if no proof were needed
            stranger.sendall(request)
            said = received(stranger)
        assert said.startswith(GREETING) and len(said) == len(GREETING) + NONCE_BYTES
        assert ours.read(["secret"]) == [b"program"]


def test_what_was_overheard_proves_nothing_later(server: TcpServer) -> None:
    """A proof is for the server's random bytes, which are others on every connection."""

    def greeted(connection: socket.socket) -> bytes:
        greeting = connection.recv(len(GREETING) + NONCE_BYTES, socket.MSG_WAITALL)
        return greeting[len(GREETING) :]

    mine = bytes(NONCE_BYTES)
    with socket.create_connection(("127.0.0.1", server.port), 60) as first:
        nonce = greeted(first)
        overheard = mine + proof(KEY, "client", nonce, mine)
        first.sendall(overheard)
        assert first.recv(PROOF_BYTES, socket.MSG_WAITALL) == proof(KEY, "server", nonce, mine)
    with socket.create_connection(("127.0.0.1", server.port), 60) as again:
        assert greeted(again) != nonce
        again.sendall(overheard)
        assert received(again) == b""
    with socket.create_connection(("127.0.0.1", server.port), 60) as mirror:  # the server's own word does not do for a client's
        nonce = greeted(mirror)
        mirror.sendall(mine + proof(KEY, "server", nonce, mine))
        assert received(mirror) == b""


def test_the_key_is_never_sent(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(TcpValues, "_send", lambda self, data: (sent.append(data), self._socket.sendall(data)))
    with closing(TcpValues("127.0.0.1", server.port, KEY)) as values:
        values.put({"name": b"value"})
    assert len(sent) == 2 and KEY not in b"".join(sent)


def test_a_client_wants_proof_too() -> None:
    """A false server, which cannot answer for the key, hears of no program."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as false:

        def serve() -> None:
            connection, _ = false.accept()
            with connection:
                connection.sendall(GREETING + bytes(NONCE_BYTES))
                heard.append(connection.recv(NONCE_BYTES + PROOF_BYTES, socket.MSG_WAITALL))
                connection.sendall(bytes(PROOF_BYTES))
                heard.append(received(connection))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match="is not that of this job"):
            TcpValues("127.0.0.1", false.getsockname()[1], KEY).put({"name": b"program"})
        thread.join()
    assert heard[1] == b""


def test_other_servers_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def serve() -> None:
            with other.accept()[0] as connection:
                connection.sendall(b"SSH-2.0-OpenSSH".ljust(len(GREETING) + NONCE_BYTES))
                received(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(StoreError, match="is no store of Penstock: it greets with b'SSH"):
            TcpValues("127.0.0.1", port, KEY)
        thread.join()
        monkeypatch.setattr(tcp_module, "_ANSWER_S", 0.1)
        with pytest.raises(StoreError, match=r"has said nothing for 0\.1 s"):  # in the backlog, where nobody takes the connection
            TcpValues("127.0.0.1", port, KEY)
    with pytest.raises(StoreError, match="does not answer"):
        TcpValues("127.0.0.1", port, KEY)


def test_who_was_stopped_blames_nobody(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-Z and `fg`: time in which this process did not run is none in which the launcher said nothing."""
    monkeypatch.setattr(tcp_module, "_ANSWER_S", 2.0)
    before = signal.signal(signal.SIGUSR1, lambda *_: time.sleep(2.1))
    try:
        with closing(TcpValues("127.0.0.1", server.port, KEY)) as values:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            assert values.wait("nothing", 0.5) is None
            assert values.names("") == []
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_proves_nothing_is_sent_away(server: TcpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as hasty:
        hasty.setattr(server_module, "_PROOF_S", 0.05)
        with socket.create_connection(("127.0.0.1", server.port), 60) as silent:
            assert len(received(silent)) == len(GREETING) + NONCE_BYTES
    TcpValues("127.0.0.1", server.port, KEY).close()  # and keeps nobody out


def test_a_wait_that_is_given_up_is_forgotten(server: TcpServer) -> None:
    with closing(TcpValues("127.0.0.1", server.port, KEY)) as values:
        assert values.wait("never", 0.05) is None and not server._awaited


def test_a_store_that_is_closed_lets_go_of_its_connection(server: TcpServer) -> None:
    values = TcpValues("127.0.0.1", server.port, KEY)
    Ring(values, Job("job", KEY, 1)).close()
    with pytest.raises(StoreError, match="was closed"):
        values.read(["any"])


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{port}"):
            TcpServer(KEY, port=port)
    with pytest.raises(InputError, match=r"cannot listen on no\.such\.host\.invalid:0"):
        TcpServer(KEY, "no.such.host.invalid")


def test_a_server_that_goes_ends_the_wait_with_a_message() -> None:
    job = Job.new(1)
    server = TcpServer(job.key)
    store = open_store(f"tcp://127.0.0.1:{server.port}", job)
    store.publish(0, {0: b"program"})
    ending = threading.Timer(0.1, server.close)
    ending.start()
    with pytest.raises(StoreError, match="is gone: the launcher of the job has ended"):
        store.fetch(1, 0)
    ending.join()
    with pytest.raises(StoreError, match="is gone"):
        store.publish(1, {0: b"program"})
    store.close()
    with pytest.raises(StoreError, match="does not answer"):
        open_store(f"tcp://127.0.0.1:{server.port}", job)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "127.1.2.3", "::1"])
def test_names_of_loopback(name: str) -> None:
    assert means_loopback(name)


@pytest.mark.parametrize("name", ["", "node-0", "10.0.0.1", "0.0.0.0", "::", "localhost.example.org"])
def test_names_of_other_machines(name: str) -> None:
    assert not means_loopback(name)
