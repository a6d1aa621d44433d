"""What the processes of a job agree on after each program, by one message of each to all: the same decisions follow everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.plans.schema import plan_from_dict, plan_to_dict
from penstock.runtime.steps.messages import StepMessage

if TYPE_CHECKING:
    from penstock.plans.plan import Plan
    from penstock.runtime.transport.world import ProcessGroups

__all__ = ["Agreed", "Order", "agree", "broadcast_plan"]


@dataclass(frozen=True)
class Order:
    """A plan that all are to move to."""

    plan: Plan
    exact: bool = False
    """Whether it is to be in force with the next step, so that nothing can travel beside one."""

    def packed(self) -> bytes:
        """The order as a message."""
        return msgspec.json.encode((plan_to_dict(self.plan), self.exact))

    @classmethod
    def unpacked(cls, message: bytes) -> Order:
        """Back from a message."""
        plan, exact = msgspec.json.decode(message)
        return cls(plan_from_dict(plan, "the plan to move to"), exact)


@dataclass(frozen=True)
class Agreed:
    """The state of the run after a program, as all processes agree on it, and what they will do before the next."""

    messages: tuple[Mapping[int, StepMessage], ...]
    """Of each step of the program (one, but for asynchronous plans), what each process said."""
    ended_by: int
    """The signal that asks any of them to end, so that they do so after the same step."""
    leaving: tuple[int, ...]
    """Whose nodes are to leave, while others stay."""
    order: Order | None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a checkpoint, which none is still writing."""
        return any(one.is_due for one in self.messages[-1].values()) and not self.is_saving

    @property
    def is_saving(self) -> bool:
        """Whether any still writes the last checkpoint: until the first rank is done with it, it is not whole."""
        return any(one.is_saving for one in self.messages[-1].values())

    @property
    def has_lost_store(self) -> bool:
        """Whether one gets no more programs, so that all have to end."""
        return any(one.lost_store for one in self.messages[-1].values())

    @property
    def safe_copy(self) -> float:
        """The newest step of which all copies are safe."""
        return min(one.copied for one in self.messages[-1].values())


def agree(groups: ProcessGroups, members: Sequence[int], own: Sequence[StepMessage], order: Order | None) -> Agreed:
    """Exchanges what every process says of each step of a program (`own`: this one), and the `order` of the first of `members`, which alone
    has any; all get the same."""
    message = b"" if order is None else order.packed()
    said = [*own[:-1], replace(own[-1], order_bytes=len(message))]
    table = groups.gather(torch.tensor([one.row() for one in said], dtype=torch.float64)).tolist()
    messages = tuple({member: StepMessage.of_row(rows[at]) for member, rows in zip(members, table, strict=True)} for at in range(len(said)))
    size = messages[-1][members[0]].order_bytes
    ended_by, leaving = _asked({member: one.asked_to_end for member, one in messages[-1].items()})
    return Agreed(messages, ended_by, leaving, Order.unpacked(groups.broadcast(message, size)) if size else None)


def broadcast_plan(groups: ProcessGroups, plan: Plan | None) -> Plan | None:
    """Returns in every process the plan that the first one has."""
    message = b"" if plan is None else Order(plan).packed()
    size = int(groups.gather(torch.tensor([len(message)]))[0])
    return Order.unpacked(groups.broadcast(message, size)).plan if size else None


def _asked(signals: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
    """The signal that ends the run, and the ranks whose nodes are to leave it. Where all are, it ends.

    >>> _asked({0: 0, 1: 15}), _asked({0: 0, 1: -15}), _asked({0: -15, 1: -15}), _asked({0: -15, 1: 2})
    ((15, ()), (0, (1,)), (15, ()), (2, ()))
    """
    ended_by = abs(max(signals.values()))
    return ended_by, () if ended_by else tuple(rank for rank, number in signals.items() if number < 0)
