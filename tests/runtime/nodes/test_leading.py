"""The node that leads, as others meet it: strangers keep nobody waiting, and whoever comes too late is told."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch

from penstock.errors import PenstockError
from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.nodes import sealed_socket
from penstock.runtime.nodes.channel import Channel
from penstock.runtime.nodes.copy_exchange import CopyServer
from penstock.runtime.nodes.leading import LeadingNode, held_here
from penstock.runtime.nodes.messages import Hello, Leaving, NodeAddress, Refused, Stop, Stopped
from penstock.runtime.nodes.sealed_socket import SealedSocket
from penstock.runtime.nodes.succession import LedBy
from penstock.runtime.recovering.copies import Copies, CopyPlace
from penstock.runtime.request import GoingOn
from penstock.runtime.workers import WorkerError

KEY = b"k" * 32
NO_STORE: Any = ("", None)


def leading(
    copies: Copies | None = None, tell: Callable[[LedBy], None] = lambda led: None, nodes: int = 2, number: int = 0, **given: Any
) -> LeadingNode:  # fmt: skip
    return LeadingNode(number, ("127.0.0.1", 0), KEY, [(number,) for number in range(nodes)], {"--steps": 3}, copies, tell, **given)


def follower(nodes: LeadingNode, number: int = 1, copies: CopyServer | None = None, **facts: object) -> Channel:
    """Another node, which has said who it is."""
    channel = Channel(SealedSocket.call(nodes.host, nodes.port, KEY, "the node that leads"))
    address = NodeAddress(f"127.0.0.{number + 1}", 0) if copies is None else copies.address
    channel.send(Hello(number, address, facts or {"--steps": 3}))
    return channel


def copy(copies: Copies, process: int, step: int, count: int = 2) -> None:
    piece = TensorPiece("weights/w", (count,), ((process, process + 1),), torch.full((1,), float(step)))
    copies.save(process, step, CopyPlace(0, process, count), [piece], {})


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


def test_a_node_that_ends_while_it_waits_to_join_makes_room_for_another() -> None:
    with closing(leading()) as nodes:
        for _ in range(2):
            with closing(follower(nodes)) as one:
                while not nodes.is_asked:  # the time-out ends a wait in vain
                    assert not isinstance(one.take(0.01), Refused)
            waited = nodes._arrived[1]
            while not waited.channel.is_over:
                time.sleep(0.01)
            assert not nodes.is_asked


def test_those_who_were_there_may_lead_in_turn_until_all_are_met() -> None:
    """One who leads in another's place may be lost before anybody has found it."""
    told = list[LedBy]()
    with closing(leading(tell=told.append, nodes=3, expected=(1, 2))) as nodes, closing(follower(nodes, 2)):
        assert told[-1].nodes == (0, 1, 2)
        while not nodes.is_asked:
            time.sleep(0.01)
        nodes.meet((1, 2), 0.0, needs_all=False)
        nodes._tell_led()
    assert told[-1].nodes == (0, 2)


def test_a_node_that_is_lost_with_the_newest_copies_leaves_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had told of them when its ranks ended, and they had come to nobody else yet."""
    first, second = Copies(2, mirrored=True), Copies(2, mirrored=True)
    server = CopyServer(second, KEY, "127.0.0.2")
    with closing(first), closing(second), closing(leading(first)) as nodes, closing(follower(nodes, copies=server)) as other:
        nodes.meet([1], 60.0)
        nodes.order(None, NO_STORE, "", None)  # type: ignore[arg-type]
        monkeypatch.setattr(nodes, "_start", lambda members, port: Stop(0))
        nodes.ready((0, 1), 1)
        for process, held in ((0, first), (1, first), (1, second)):
            copy(held, process, 10)
        copy(first, 0, 20)
        copy(second, 1, 20)
        other.send(Stopped(1, held_here(second)))
        assert nodes.stop() == [] and nodes.newest(99) == 20
        server.close()
        nodes.go_back(20)
        with pytest.raises(WorkerError, match=r"node 1 \(127.0.0.2\) is lost, with rank 1: it does not hand out its copies") as found:
            nodes.order(None, NO_STORE, "", GoingOn(20, True))  # type: ignore[arg-type]
        assert found.value.ranks == (1,) and found.value.is_lost and nodes.gone_ranks() == [1]
        assert nodes.newest(99) == 10


def test_copies_that_only_a_node_had_that_has_left_are_not_safe() -> None:
    """Until the next one has them, which here never answers."""
    first, second = Copies(3, mirrored=True), Copies(3, mirrored=True)
    with (
        closing(first), closing(second), closing(CopyServer(second, KEY, "127.0.0.2")) as server, closing(leading(first, nodes=3)) as nodes,
        closing(follower(nodes, 1, server)) as leaves, closing(follower(nodes, 2)),
    ):  # fmt: skip
        nodes.meet([1, 2], 60.0)
        nodes.order(None, NO_STORE, "", None)  # type: ignore[arg-type]
        copy(first, 0, 10, 1)
        while first.safe_step(0) != 10:
            time.sleep(0.01)
        leaves.send(Leaving(has_moved=True))
        assert nodes.hear(nodes._nodes[1].channel) is None and first.safe_step(0) == -1  # which of two was met first is chance


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
    with closing(leading(number=number)) as nodes:
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
