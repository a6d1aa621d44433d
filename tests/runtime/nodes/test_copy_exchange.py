"""Copies that nodes keep for each other: whole or not there, and back where they are lacking."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.nodes import copy_exchange
from penstock.runtime.nodes.copy_exchange import CopyMirror, CopyServer, bring_copies, next_node
from penstock.runtime.nodes.messages import NodeAddress
from penstock.runtime.nodes.sealed_socket import SealedSocketError
from penstock.runtime.recovering import copies as copies_module
from penstock.runtime.recovering.copies import Copies, CopyPlace

KEY = b"k" * 32


def copy(copies: Copies, process: int, step: int, keep: int = -1) -> None:
    piece = TensorPiece("weights/w", (2000,), ((1000 * process, 1000 * process + 1000),), torch.full((1000,), float(step)))
    copies.save(process, step, CopyPlace(0, process, 2), [piece], {"optimizer": "adamw"}, keep=keep)


def await_safe(copies: Copies, process: int, step: int) -> None:
    while copies.safe_step(process) != step:  # the time-out ends a wait in vain
        pass


def test_a_node_that_is_lost_leaves_its_copies_at_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_PART_BYTES", 1000)
    first, second = Copies(2, mirrored=True), Copies(2, mirrored=True)
    with closing(first), closing(second), closing(CopyServer(second, KEY, "127.0.0.2")) as server:
        copy(first, 0, 10)
        assert first.safe_step(0) == -1 and second.newest(99) is None
        with closing(CopyMirror(first, [0], KEY, server.address)):
            await_safe(first, 0, 10)
            copy(second, 1, 10)
            assert second.newest(99) == 10 and first.newest(99) is None
            copy(first, 0, 20)
            await_safe(first, 0, 20)
        assert second.newest(99) == 10  # of which both are there still
        found = torch.zeros(2000)
        second.state(10).source.load([TensorPiece("weights/w", (2000,), ((0, 2000),), found)])
        assert found.unique().tolist() == [10.0]
        # A third node has none of them, and gets all.
        third = Copies(2, mirrored=True)
        bring_copies(third, KEY, 10, dict.fromkeys([slot for slot, head in second.held() if head.step == 10], server.address))
        assert third.newest(99) == 10 and third.safe_step(0) == third.safe_step(1) == 10
        with pytest.raises(SealedSocketError, match="does not have the copy of step 30"):
            bring_copies(third, KEY, 30, {0: server.address})


def test_bringing_copies_ends_when_all_ranks_are_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another has died meanwhile: a node that took as long as its copies are large would count as lost."""
    monkeypatch.setattr(copies_module, "_PART_BYTES", 1000)
    first, second, seen = Copies(2, mirrored=True), Copies(2, mirrored=True), list[int]()

    class Stopped(Exception):
        pass

    def look() -> None:
        seen.append(0)
        if len(seen) == 3:
            raise Stopped

    with closing(first), closing(second), closing(CopyServer(second, KEY, "127.0.0.2")) as server:
        copy(second, 0, 10)
        with pytest.raises(Stopped):
            bring_copies(first, KEY, 10, {0: server.address}, look)
        assert first.head(0).step == -1
        bring_copies(first, KEY, 10, {0: server.address})
        assert first.head(0).step == 10


def test_a_copy_that_is_begun_anew_while_it_travels_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Copies(1, mirrored=True), Copies(1, mirrored=True)
    send, seen = copy_exchange._send, list[set[int]]()

    def overtaken(sealed: object, copies: Copies, slot: int, head: copies_module.SlotHead) -> bool:
        seen.append({head.step for _, head in second.held()})
        if len(seen) == 1:
            for step in (20, 30):
                piece = TensorPiece("weights/w", (2000,), ((0, 1000),), torch.zeros(1000))
                copies.save(0, step, CopyPlace(0, 0, 1), [piece], {})
        return send(sealed, copies, slot, head)  # type: ignore[arg-type]

    monkeypatch.setattr(copy_exchange, "_send", overtaken)
    monkeypatch.setattr(copy_exchange, "_AGAIN_S", 0.01)
    with closing(first), closing(second), closing(CopyServer(second, KEY, "127.0.0.2")) as server:
        copy(first, 0, 10)
        with closing(CopyMirror(first, [0], KEY, server.address)):
            await_safe(first, 0, 30)
        assert seen[0] == set() and len(seen) > 1 and not any(10 in steps for steps in seen)


def test_a_copy_that_is_not_elsewhere_yet_never_replaces_the_one_that_is() -> None:
    copies = Copies(1, mirrored=True)
    with closing(copies):
        for step, keep in ((10, -1), (20, 10), (30, 10), (40, 10)):
            copy(copies, 0, step, keep)
            assert {head.step for _, head in copies.held()} == {10, step}


def test_copies_go_around() -> None:
    nodes = {number: NodeAddress("", number) for number in (0, 2, 5)}
    assert [next_node(own, nodes) for own in nodes] == [nodes[2], nodes[5], nodes[0]]
    assert next_node(0, {0: nodes[0]}) is None
