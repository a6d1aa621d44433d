"""The node that leads, as others meet it: strangers keep nobody waiting, and whoever comes too late is told."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from penstock.errors import PenstockError
from penstock.runtime.nodes import sealed_socket
from penstock.runtime.nodes.channel import Channel
from penstock.runtime.nodes.leading import LeadingNode
from penstock.runtime.nodes.messages import Hello, NodeAddress, Refused
from penstock.runtime.nodes.sealed_socket import SealedSocket

KEY = b"k" * 32


def leading(number: int = 0) -> LeadingNode:
    return LeadingNode(number, ("127.0.0.1", 0), KEY, [(0,), (1,)], {"--steps": 3}, None, lambda led: None)


def follower(nodes: LeadingNode, node: int = 1, **facts: object) -> Channel:
    """Node 1, or another, which has said who it is."""
    channel = Channel(SealedSocket.call(nodes.host, nodes.port, KEY, "the node that leads"))
    channel.send(Hello(node, NodeAddress("127.0.0.2", 0), facts))
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


@pytest.mark.parametrize(
    ("number", "node", "attempt", "words"),
    [
        (0, 0, 0, "--node-rank is 0, but the plan's other nodes are [1]"),
        (0, 2, 0, "--node-rank is 2, but the plan's other nodes are [1]"),
        (0, 1, 1, "a node can join only a run that keeps copies to go on from"),
        (1, 0, 0, "node 0 cannot join a run that node 1 leads"),
    ],
)
def test_who_cannot_take_part_is_told_why(number: int, node: int, attempt: int, words: str) -> None:
    with closing(leading(number)) as nodes:
        nodes._attempt = attempt
        with closing(follower(nodes, node, **{"--steps": 3})) as other:
            told = other.take(60.0)
            assert isinstance(told, Refused) and words in told.text and not nodes.is_asked


def test_nodes_that_do_not_come_are_named_or_done_without() -> None:
    with closing(leading()) as nodes:
        with pytest.raises(PenstockError, match=rf"node 1 has not come in 0.05 s: .* --node-rank 1 --master {nodes.host}:{nodes.port}"):
            nodes.meet([1], 0.05)
        nodes.meet([1], 0.05, needs_all=False)
        assert nodes.gone == {1} and nodes.gone_ranks() == [1]
