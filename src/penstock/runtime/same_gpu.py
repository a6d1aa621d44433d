"""Transfers between processes that share one GPU: copies within it, through memory that the receiver lends the sender (CUDA IPC).

    sender                                             receiver
      │ ◄──────── handle of the mailbox ───────────────── │   once, and again when a message is larger than the mailbox
      │ waits for the event `taken` (on a stream)         │
      │ copies into a slot, records `filled`              │
      │ ──────── number of the message (host, gloo) ────► │   an event counts only once it has been recorded
      │                                                   │ waits for `filled` (on a stream), copies out, records `taken`
      │ ◄──────── number of the message (host, gloo) ──── │

The host waits only for the few bytes of these notes; what the GPU has to wait for, its streams wait for. Both ends know all sizes from
their programs, so they agree without a word on the slot, and on when a larger mailbox is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.runtime.allocator import plain_segments
from penstock.runtime.transport import PIPELINE, Addressed, Pending
from penstock.runtime.world import World, pairs_of

__all__ = ["SameGpuTransport"]

_SLOTS = 4
"""Messages under way from one rank to another."""
_LETTER_BYTES = 4096
"""Of what tells the sender where a mailbox is."""
_ALIGN = 512
_FIRST_SLOT_BYTES = 1 << 20
_KEPT_NOTES = 256
_NOTES = 16
"""Tags of the host's notes begin here; those below are for transfers between processes with a GPU each."""


def _slot_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors)


def _views(slot: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The slot's memory, seen like each tensor in turn."""
    found, at = [], 0
    for tensor in tensors:
        found.append(slot[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return found


class _Mailbox:
    """The memory, and the events, through which one rank sends to another; both ends have one."""

    def __init__(self, memory: torch.Tensor, filled: list[Any], taken: list[Any], first: int) -> None:
        self.memory, self.filled, self.taken = memory, filled, taken
        self.first = first
        """Number of the first message in it."""
        self.slot_bytes = memory.numel() // _SLOTS

    def slot(self, number: int) -> torch.Tensor:
        first = number % _SLOTS * self.slot_bytes
        return self.memory[first : first + self.slot_bytes]


class _Sent:
    """A message that was copied out: the current stream waits for the copy."""

    def __init__(self, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()


class _Received:
    """A message to come: copied in when somebody waits for it."""

    def __init__(self, transport: SameGpuTransport, peer: int, tensors: Sequence[torch.Tensor], mailbox: _Mailbox, number: int) -> None:
        self._transport, self._peer, self._tensors, self._mailbox, self._number = transport, peer, tensors, mailbox, number

    def wait(self) -> None:
        self._transport.take(self._peer, self._tensors, self._mailbox, self._number)


class SameGpuTransport:
    """Copies between processes on one GPU. Messages between two ranks arrive in the order sent, whatever their purpose."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._stream = torch.cuda.Stream(world.device)
        self._out: dict[int, _Mailbox] = {}
        self._in: dict[int, _Mailbox] = {}
        self._num_sent: dict[int, int] = {}
        self._num_received: dict[int, int] = {}
        self._heard: dict[tuple[int, int], set[int]] = {}
        """Numbers that notes have told and nobody has asked for yet, by peer and kind."""
        self._notes: deque[tuple[Any, torch.Tensor]] = deque()
        self._outgrown: list[_Mailbox] = []
        """Copies into them may still be under way."""

    def send(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        number = self._num_sent[peer] = self._num_sent.get(peer, -1) + 1
        mailbox = self._out.get(peer)
        if mailbox is None or _slot_bytes(tensors) > mailbox.slot_bytes:
            self._outgrown += [] if mailbox is None else [mailbox]
            mailbox = self._out[peer] = self._borrow(peer, number)
        if number - mailbox.first >= _SLOTS:  # the slot's last message must have been taken, which the receiver tells
            self._await_note(peer, number - _SLOTS, 1)
            self._stream.wait_event(mailbox.taken[number % _SLOTS])
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for target, tensor in zip(_views(mailbox.slot(number), tensors), tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            mailbox.filled[number % _SLOTS].record(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._note(peer, number, 0)
        return _Sent(done, tensors)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        number = self._num_received[peer] = self._num_received.get(peer, -1) + 1
        mailbox = self._in.get(peer)
        if mailbox is None or _slot_bytes(tensors) > mailbox.slot_bytes:
            mailbox = self._in[peer] = self._lend(peer, number, max(_FIRST_SLOT_BYTES, 2 * _slot_bytes(tensors)))
        return _Received(self, peer, tensors, mailbox, number)

    def take(self, peer: int, tensors: Sequence[torch.Tensor], mailbox: _Mailbox, number: int) -> None:
        """Copies a message out of its slot, once it is there."""
        self._await_note(peer, number, 0)
        stream = torch.cuda.current_stream()
        stream.wait_event(mailbox.filled[number % _SLOTS])
        for tensor, source in zip(tensors, _views(mailbox.slot(number), tensors), strict=True):
            tensor.copy_(source, non_blocking=True)
        mailbox.taken[number % _SLOTS].record(stream)
        self._note(peer, number, 1)

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], purpose: int) -> None:
        # Receives first: they lend the mailboxes that sends may wait for.
        pending = [self.receive(tensors, peer, purpose) for peer, tensors in receives]
        pending += [self.send(tensors, peer, purpose) for peer, tensors in sends]
        for transfer in pending:
            transfer.wait()

    def warm_up(self) -> None:
        token = torch.zeros(1, device=self.world.device)
        for a, b in pairs_of(self.world.plan):
            if self.world.rank == a:
                self.exchange([(b, [token])], [(b, [token.clone()])], PIPELINE)
            elif self.world.rank == b:
                self.exchange([(a, [token])], [(a, [token.clone()])], PIPELINE)

    def _lend(self, peer: int, number: int, slot_bytes: int) -> _Mailbox:
        """Memory and events of one's own, told to the sender."""
        with plain_segments():
            memory = torch.empty(_SLOTS * slot_bytes, dtype=torch.uint8, device=self.world.device)
        filled, taken = ([torch.cuda.Event(interprocess=True) for _ in range(_SLOTS)] for _ in range(2))
        for event in (*filled, *taken):
            event.record()  # an event has a handle only after it was recorded
        torch.cuda.current_stream().synchronize()
        events = [[event.ipc_handle() for event in own] for own in (filled, taken)]
        letter = msgspec.msgpack.encode([list(memory.untyped_storage()._share_cuda_()), *events])
        if len(letter) + 4 > _LETTER_BYTES:
            raise RuntimeError(f"a mailbox takes {len(letter)} bytes to tell of, more than {_LETTER_BYTES - 4}")
        page = torch.zeros(_LETTER_BYTES, dtype=torch.uint8)
        page[:4] = torch.tensor([len(letter)], dtype=torch.int32).view(torch.uint8)
        page[4 : 4 + len(letter)] = torch.frombuffer(bytearray(letter), dtype=torch.uint8)
        self._isend(page, peer, 2)
        return _Mailbox(memory, filled, taken, number)

    def _borrow(self, peer: int, number: int) -> _Mailbox:
        """The memory and events that the receiver tells of."""
        page = torch.empty(_LETTER_BYTES, dtype=torch.uint8)
        dist.recv(page, self.world.process[peer], tag=_NOTES + 2)
        length = int(page[:4].view(torch.int32))
        share, *handles = msgspec.msgpack.decode(bytes(page[4 : 4 + length].tolist()))
        device = self.world.device
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(torch.UntypedStorage._new_shared_cuda(*share))
        filled, taken = ([torch.cuda.Event.from_ipc_handle(device, handle) for handle in own] for own in handles)
        return _Mailbox(memory, filled, taken, number)

    def _note(self, peer: int, number: int, kind: int) -> None:
        self._isend(torch.tensor([number]), peer, kind)

    def _isend(self, words: torch.Tensor, peer: int, kind: int) -> None:
        """Sends a few bytes from host to host without waiting; they are kept until they have surely gone."""
        self._notes.append((dist.isend(words, self.world.process[peer], tag=_NOTES + kind), words))
        if len(self._notes) > _KEPT_NOTES:
            self._notes.popleft()[0].wait()

    def _await_note(self, peer: int, number: int, kind: int) -> None:
        """Reads notes of one kind until the one wanted has come; messages may be taken in another order than they were sent."""
        heard = self._heard.setdefault((peer, kind), set())
        while number not in heard:
            note = torch.zeros(1, dtype=torch.int64)
            dist.recv(note, self.world.process[peer], tag=_NOTES + kind)
            heard.add(int(note))
        heard.discard(number)
