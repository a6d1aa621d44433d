"""What the supervisors of a job tell each other."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "End", "Failed", "Gone", "Hello", "Leaving", "Message", "NodeAddress", "NodeDone", "Refused", "Remaining", "SlotHeld", "Start", "Stop",
    "Stopped", "decode",
]  # fmt: skip


class NodeAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a supervisor serves the copies that it holds."""

    host: str
    port: int


class SlotHeld(msgspec.Struct, frozen=True, array_like=True):
    """A whole copy of one process, and which step of whom it is."""

    slot: int
    step: int
    generation: int
    place: int
    count: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A supervisor begins: its node, where it serves copies, and what it was asked to train."""

    node: int
    address: NodeAddress
    facts: dict[str, Any]
    held: tuple[SlotHeld, ...] = ()
    """Copies that it has, of a run that another led before."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why a supervisor cannot take part."""

    text: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Each node starts its ranks of `members`, who meet at `host`:`port`, and they train `plan`."""

    attempt: int
    members: tuple[int, ...]
    host: str
    port: int
    plan: dict[str, Any]
    resume: str
    step: int | None
    """Where they go on from; None: at the beginning."""
    from_copies: bool
    store: str
    """Address of the programs' store."""
    job: dict[str, Any] | None
    """The job in it, without its key."""
    token: str
    nodes: dict[int, NodeAddress]
    """Of all that are left."""
    slots: dict[int, NodeAddress]
    """Who has each copy that they go on from."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """All ranks are to be ended: one has died somewhere."""

    attempt: int


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """They are, and these copies are here."""

    attempt: int
    held: tuple[SlotHeld, ...]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank of this node has died or failed, and all others here were ended."""

    attempt: int
    rank: int
    text: str
    is_lost: bool


class NodeDone(msgspec.Struct, frozen=True, tag=True):
    """All ranks of this node are done."""

    attempt: int


class End(msgspec.Struct, frozen=True, tag=True):
    """The run is over; `text` says why if it failed, `ended_by` is the signal that ended it."""

    text: str = ""
    ended_by: int = 0


class Leaving(msgspec.Struct, frozen=True, tag=True):
    """This node's machine will be gone soon: it leaves, and others have what its ranks have learned."""

    has_moved: bool = False
    """Whether they have its work too, and need not begin again."""


class Remaining(msgspec.Struct, frozen=True, tag=True):
    """Ranks have left with their node, and all others go on."""

    left: tuple[int, ...]
    nodes: dict[int, NodeAddress]
    """Those that are still there."""


class Gone(msgspec.Struct, frozen=True, tag=True):
    """The other end is not there any more; never sent, but the last that one hears."""

    text: str


Message = Hello | Refused | Start | Stop | Stopped | Failed | NodeDone | End | Leaving | Remaining | Gone
_DECODER = msgspec.msgpack.Decoder(Message)


def decode(payload: bytes) -> Message:
    """A message that was encoded as msgpack."""
    found: Message = _DECODER.decode(payload)
    return found
