"""The node that leads, as others meet it: strangers keep nobody waiting, and whoever comes too late is told."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from penstock.runtime.nodes import sealed_socket
from penstock.runtime.nodes.channel import Channel
from penstock.runtime.nodes.leading import LeadingNode
from penstock.runtime.nodes.messages import Hello, NodeAddress, Refused
from penstock.runtime.nodes.sealed_socket import SealedSocket

KEY = b"k" * 32


def leading() -> LeadingNode:
    return LeadingNode(0, ("127.0.0.1", 0), KEY, [(0,), (1,)], {"--steps": 3}, None, lambda led: None)


def follower(nodes: LeadingNode, **facts: object) -> Channel:
    """Node 1, which has said who it is."""
    channel = Channel(SealedSocket.call(nodes.host, nodes.port, KEY, "the node that leads"))
    channel.send(Hello(1, NodeAddress("127.0.0.2", 0), facts))
    return channel


def test_a_stranger_who_says_nothing_keeps_no_node_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_socket, "_PROOF_S", 1000.0)
    with closing(leading()) as nodes, socket.create_connection((nodes.host, nodes.port)), closing(follower(nodes, **{"--steps": 3})):
        nodes.meet([1], 60.0)
        assert not nodes.gone


def test_one_number_is_one_node_and_all_are_asked_for_the_same() -> None:
    with closing(leading()) as nodes, closing(follower(nodes, **{"--steps": 3})):
        nodes.meet([1], 60.0)
        with closing(follower(nodes, **{"--steps": 3})) as other:
            told = other.take(60.0)
            assert isinstance(told, Refused) and "there is such a node already, at 127.0.0.2" in told.text
    with closing(leading()) as nodes, closing(follower(nodes, **{"--steps": 4})) as other:
        told = other.take(60.0)
        assert isinstance(told, Refused) and "--steps: 3 on node 0, 4 asked for" in told.text
