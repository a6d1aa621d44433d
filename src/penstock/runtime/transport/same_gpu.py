"""Transfers between processes that share one GPU: copies within it, through memory that the receiver lends the sender (CUDA IPC).

    sender                                             receiver
      │ ◄──────── handle of the mailbox ───────────────── │   once, and again before a program that needs a larger one
      │ waits for the event `taken` (on a stream)         │
      │ copies into the mailbox, records `filled`         │
      │ ──────── number of the message (host, gloo) ────► │   an event counts only once it has been recorded
      │                                                   │ waits for `filled` (on a stream), copies out, records `taken`
      │ ◄──────── number of the message (host, gloo) ──── │

The host waits only for the few bytes of these notes; what the GPU has to wait for, its streams wait for. A mailbox is a ring: both ends
know all sizes from their programs, so they agree without a word on where a message lies, and on when a larger mailbox is needed. That is
settled before a program begins: in the midst of one, two ranks could each wait for the other's new mailbox.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.plans.ranks import pairs_of
from penstock.programs.instructions import Program, ReceiveStart, SendStart
from penstock.runtime.transport.allocator import plain_segments
from penstock.runtime.transport.slices import DTYPES
from penstock.runtime.transport.transport import PIPELINE, RESHARD, TIED, Addressed, Pending
from penstock.runtime.transport.world import World

__all__ = ["SameGpuTransport"]

_ROOM = 16
"""Of a program's largest message, how many a mailbox holds: a stage that runs further ahead of the next one has to wait for it."""
_LEAST_BYTES = 1 << 22
_EVENTS = {PIPELINE: 32, RESHARD: 2, TIED: 2}
"""Messages of a purpose under way from one rank to another, however small."""
_LETTER_BYTES = 16384
"""Of what tells the sender where a mailbox is."""
_ALIGN = 512
_NOTES = 16
"""Tags of the host's notes begin here; those below are for transfers between processes with a GPU each."""


_FILLED, _TAKEN, _LETTER = range(3)
"""Kinds of notes."""
_KINDS = 3

_Line = tuple[int, int]
"""Peer and purpose: messages of one line arrive in the order sent."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def _rooms(program: Program, kind: type[SendStart | ReceiveStart]) -> dict[int, int]:
    """Bytes of the mailboxes that a program needs, by peer: room for all its messages, or for many of the largest."""
    sizes: dict[int, list[int]] = {}
    for step in program.instructions:
        if isinstance(step, kind):
            parts = (math.prod(part.sent_shape) * DTYPES[part.dtype].itemsize for part in step.parts)
            sizes.setdefault(step.peer, []).append(sum(map(_aligned, parts)))
    return {peer: max(_LEAST_BYTES, min(sum(own) + max(own), _ROOM * max(own))) for peer, own in sorted(sizes.items())}


class _Mailbox:
    """The memory, and the events, through which one rank sends to another; both ends have one, and place the same messages in turn."""

    def __init__(self, memory: torch.Tensor, filled: list[Any], taken: list[Any]) -> None:
        self.memory, self.filled, self.taken = memory, filled, taken
        self.held: deque[tuple[int, int, int]] = deque()
        """(number, first byte, end) of messages that nothing was laid over since, oldest first."""
        self._next = 0

    def place(self, number: int, size: int) -> tuple[int, list[int]]:
        """The first byte of the next message, and the messages that must have been taken before it may be written."""
        first = self._next if self._next + size <= self.memory.numel() else 0
        below = [first < end and start < first + size for _, start, end in self.held]
        gone = max((place + 1 for place, lies in enumerate(below) if lies), default=0)
        gone = max(gone, len(self.held) + 1 - len(self.filled))
        over = [self.held.popleft()[0] for _ in range(gone)]
        self.held.append((number, first, first + size))
        self._next = first + size
        return first, over

    def views(self, first: int, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The mailbox's memory from a byte on, seen as tensors like the given ones, one after the other."""
        found = []
        for tensor in tensors:
            found.append(self.memory[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
            first += _aligned(tensor.nbytes)
        return found


class _Sent:
    """A message that was copied out: the current stream waits for the copy."""

    def __init__(self, event: Any, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._tensors = ()


class _Received:
    """A message to come: copied in when somebody waits for it."""

    def __init__(self, take: Callable[[], None]) -> None:
        self._take = take

    def wait(self) -> None:
        self._take()


class SameGpuTransport:
    """Copies between processes on one GPU."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._streams: dict[int, Any] = {}
        """One for each peer: a message that waits for its place holds up no other neighbour's."""
        self._out: dict[_Line, _Mailbox] = {}
        self._in: dict[_Line, _Mailbox] = {}
        self._num_sent: Counter[_Line] = Counter()
        self._num_received: Counter[_Line] = Counter()
        self._heard: dict[tuple[_Line, int], set[int]] = {}
        """Numbers that notes have told and nobody has asked for yet, by line and kind."""
        self._notes: list[tuple[Any, torch.Tensor]] = []
        """Sent and perhaps not read; those of the program before were, or the ranks would not have begun this one."""
        self._earlier_notes: list[tuple[Any, torch.Tensor]] = []

    def begin(self, program: Program) -> None:
        self._make_room(
            {(peer, PIPELINE): room for peer, room in _rooms(program, ReceiveStart).items()},
            {(peer, PIPELINE): room for peer, room in _rooms(program, SendStart).items()},
        )

    def end(self) -> None:
        # No note is left for a transport that comes after this one.
        for line, mailbox in self._out.items():
            self._await_taken(line, mailbox, [number for number, _, _ in mailbox.held])
            mailbox.held.clear()
        self._notes, self._earlier_notes = [], self._notes

    def _make_room(self, received: dict[_Line, int], sent: dict[_Line, int]) -> None:
        """Mailboxes at least as large as needed. All are lent before one is waited for."""
        for line, room in received.items():
            if line not in self._in or self._in[line].memory.numel() < room:
                self._in[line] = self._lend(line, room * 5 // 4)  # the next program may need a little more
        for line, room in sent.items():
            if line not in self._out or self._out[line].memory.numel() < room:
                self._give_back(line)
                self._out[line] = self._borrow(line)

    def send(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        line = peer, purpose
        number, mailbox, stream = self._num_sent[line], self._out[line], self._stream_to(peer)
        self._num_sent[line] += 1
        first, over = mailbox.place(number, _size(tensors))
        self._await_taken(line, mailbox, over)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for target, tensor in zip(mailbox.views(first, tensors), tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            mailbox.filled[number % len(mailbox.filled)].record(stream)
            done = torch.cuda.Event()
            done.record(stream)
        self._note(line, number, _FILLED)
        return _Sent(done, tensors)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        line = peer, purpose
        number, mailbox = self._num_received[line], self._in[line]
        self._num_received[line] += 1
        first, _ = mailbox.place(number, _size(tensors))
        return _Received(partial(self._take, line, mailbox, number, first, tensors))

    def _take(self, line: _Line, mailbox: _Mailbox, number: int, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copies a message out, once it is there."""
        self._await_note(line, number, _FILLED)
        stream = torch.cuda.current_stream()
        stream.wait_event(mailbox.filled[number % len(mailbox.filled)])
        for tensor, source in zip(tensors, mailbox.views(first, tensors), strict=True):
            tensor.copy_(source, non_blocking=True)
        mailbox.taken[number % len(mailbox.taken)].record(stream)
        self._note(line, number, _TAKEN)

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], purpose: int) -> None:
        # One message to each peer, however many tensors: a second one would wait until the first was taken.
        outgoing, incoming = _by_peer(sends), _by_peer(receives)
        rooms = ({(peer, purpose): max(_LEAST_BYTES, _size(own)) for peer, own in side.items()} for side in (incoming, outgoing))
        self._make_room(*rooms)
        pending = [self.receive(tensors, peer, purpose) for peer, tensors in incoming.items()]
        pending += [self.send(tensors, peer, purpose) for peer, tensors in outgoing.items()]
        for transfer in pending:
            transfer.wait()

    def warm_up(self) -> None:
        token = torch.zeros(1)
        for a, b in pairs_of(self.world.plan):
            if self.world.rank == a:
                dist.send(token, self.world.process[b])
                dist.recv(token, self.world.process[b])
            elif self.world.rank == b:
                dist.recv(token, self.world.process[a])
                dist.send(token, self.world.process[a])

    def close(self) -> None:
        for stream in self._streams.values():  # copies out of memory that is about to be given up
            stream.synchronize()
        for held in (self._streams, self._out, self._in, self._heard, self._notes, self._earlier_notes):
            held.clear()  # type: ignore[attr-defined]

    def _stream_to(self, peer: int) -> Any:
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream(self.world.device)
        return self._streams[peer]

    def _await_taken(self, line: _Line, mailbox: _Mailbox, numbers: Sequence[int]) -> None:
        """The host waits until these messages are being taken, the stream until they are."""
        for number in numbers:
            self._await_note(line, number, _TAKEN)
            self._stream_to(line[0]).wait_event(mailbox.taken[number % len(mailbox.taken)])

    def _give_back(self, line: _Line) -> None:
        """Lets go of a mailbox once all was taken from it: its owner can use the memory only then."""
        mailbox = self._out.pop(line, None)
        if mailbox is not None:
            self._await_taken(line, mailbox, [number for number, _, _ in mailbox.held])
            self._stream_to(line[0]).synchronize()

    def _lend(self, line: _Line, size: int) -> _Mailbox:
        """Memory and events of one's own, told to the sender."""
        with plain_segments():
            memory = torch.empty(size, dtype=torch.uint8, device=self.world.device)
        filled, taken = ([torch.cuda.Event(interprocess=True) for _ in range(_EVENTS[line[1]])] for _ in range(2))
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
        self._isend(page, line, _LETTER)
        return _Mailbox(memory, filled, taken)

    def _borrow(self, line: _Line) -> _Mailbox:
        """The memory and events that the receiver tells of."""
        page = torch.empty(_LETTER_BYTES, dtype=torch.uint8)
        dist.recv(page, self.world.process[line[0]], tag=_tag(line, _LETTER))
        length = int(page[:4].view(torch.int32))
        share, *handles = msgspec.msgpack.decode(bytes(page[4 : 4 + length].tolist()))
        device = self.world.device
        memory = torch.empty(0, dtype=torch.uint8, device=device).set_(torch.UntypedStorage._new_shared_cuda(*share))
        filled, taken = ([torch.cuda.Event.from_ipc_handle(device, handle) for handle in own] for own in handles)
        return _Mailbox(memory, filled, taken)

    def _note(self, line: _Line, number: int, kind: int) -> None:
        self._isend(torch.tensor([number]), line, kind)

    def _isend(self, words: torch.Tensor, line: _Line, kind: int) -> None:
        """Sends a few bytes from host to host without waiting (gloo sends once they are asked for)."""
        self._notes.append((dist.isend(words, self.world.process[line[0]], tag=_tag(line, kind)), words))

    def _await_note(self, line: _Line, number: int, kind: int) -> None:
        """Reads notes of one kind until the one wanted has come; messages may be taken in another order than they were sent."""
        heard = self._heard.setdefault((line, kind), set())
        while number not in heard:
            note = torch.zeros(1, dtype=torch.int64)
            dist.recv(note, self.world.process[line[0]], tag=_tag(line, kind))
            heard.add(int(note))
        heard.discard(number)


def _tag(line: _Line, kind: int) -> int:
    return _NOTES + line[1] * _KINDS + kind


def _by_peer(addressed: Sequence[Addressed]) -> dict[int, list[torch.Tensor]]:
    """All tensors of each peer, in the order given, which is the same at both ends."""
    found: dict[int, list[torch.Tensor]] = {}
    for peer, tensors in addressed:
        found.setdefault(peer, []).extend(tensors)
    return found
