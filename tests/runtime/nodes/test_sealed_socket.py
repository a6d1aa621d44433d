"""Messages of supervisors: only from holders of the key, each once and unchanged; and who is silent is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.runtime.nodes import channel
from penstock.runtime.nodes.channel import Channel
from penstock.runtime.nodes.messages import Gone, NodeDone, Stop
from penstock.runtime.nodes.sealed_socket import SealedSocket, SealedSocketError

KEY = b"k" * 32
Pair = tuple[SealedSocket, SealedSocket, socket.socket, socket.socket]


@contextmanager
def pair(its_key: bytes = KEY) -> Iterator[Pair]:
    """A server and a client that have met, and their sockets."""
    mine, its = socket.socketpair(socket.AF_UNIX)
    mine, its = _Plain(fileno=mine.detach()), _Plain(fileno=its.detach())
    found: list[SealedSocket | SealedSocketError] = []

    def call() -> None:
        try:
            found.append(SealedSocket(its, its_key, "the other", serves=False))
        except SealedSocketError as error:
            found.append(error)
            its.close()

    thread = threading.Thread(target=call)
    thread.start()
    try:
        server = SealedSocket(mine, KEY, "the other", serves=True)
    except SealedSocketError:
        mine.close()
        raise
    finally:
        thread.join()
    assert isinstance(found[0], SealedSocket)
    with mine, its:
        yield server, found[0], mine, its


class _Plain(socket.socket):
    """One that is no TCP socket, and takes its options all the same."""

    def setsockopt(self, *_: object) -> None:  # type: ignore[override]
        return


def test_messages_arrive_in_order() -> None:
    with pair() as (server, client, _, _):
        for word in (b"", b"one", b"x" * 100_000):
            threading.Thread(target=client.send, args=(word,)).start()
            assert server.receive() == word
        server.send(b"back")
        assert client.receive() == b"back"


@pytest.mark.parametrize("what", ["said twice", "left out", "changed", "sent back", "of another connection"])
def test_what_was_overheard_is_refused(what: str) -> None:
    with pair() as (server, client, mine, its), pair() as (other, _, others, _):
        frames = []
        for word in (b"first", b"second"):
            client.send(word)
            frames.append(mine.recv(1000))
        if what == "said twice":
            its.sendall(frames[0])
            assert server.receive() == b"first"
            its.sendall(frames[0])
        elif what == "left out":
            its.sendall(frames[1])
        elif what == "changed":
            its.sendall(frames[0][:-1] + b"!")
        elif what == "sent back":
            mine.sendall(frames[0])
            server = client
        else:
            server = other
            others.close()
            server._socket = mine
            its.sendall(frames[0])
        with pytest.raises(SealedSocketError, match="refused: its MAC does not match"):
            server.receive()


def test_nobody_without_the_key_is_met() -> None:
    with pytest.raises(SealedSocketError, match="does not hold the job's key"), pair(b"w" * 32):
        pass


def test_a_channel_tells_what_was_said_and_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence of an end that beats no more, though its connection stays."""
    monkeypatch.setattr(channel, "SILENT_S", 0.2)
    monkeypatch.setattr(channel, "_BEAT_S", 0.02)
    with pair() as (server, client, _, _):
        one, other = Channel(server), Channel(client)
        other.send(NodeDone(3))
        other.send(Stop(4))
        assert (one.take(), one.take()) == (NodeDone(3), Stop(4))
        assert one.take(0.5) is None  # far longer than the silence that counts: beats were heard
        other._closed.set()
        assert one.take() == one.take() == Gone("the other has been silent for 0.2 s")
        one.close()
        assert isinstance(other.take(), Gone)
        other.close()


def test_a_message_of_more_than_anybody_sends_is_refused_at_once() -> None:
    """Whoever holds the key and has gone mad would be read into memory otherwise."""
    with pair() as (server, _, _, its):
        its.sendall((1 << 40).to_bytes(8, "big") + bytes(32))
        with pytest.raises(SealedSocketError, match="a message has 1099511627776 bytes; 268435456 is the most"):
            server.receive()
