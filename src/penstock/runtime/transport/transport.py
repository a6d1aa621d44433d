"""How tensors travel from rank to rank: one small interface, with gloo and NCCL (`process_groups`) and CUDA IPC (`same_gpu`) behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.programs.instructions import Program

__all__ = ["PIPELINE", "RESHARD", "TIED", "Addressed", "Pending", "Transport"]

PIPELINE, RESHARD, TIED = 0, 1, 2
"""What a transfer is for. Transfers of one purpose between two ranks arrive in the order in which they were begun."""

Addressed = tuple[int, Sequence[torch.Tensor]]
"""(rank of the plan, contiguous tensors)."""


class Pending(Protocol):
    """A transfer on its way."""

    def wait(self) -> None:
        """Returns when the tensors may be read (received) or given up (sent): at once, if a stream can wait instead of the host."""


class Transport(Protocol):
    """Sends and receives without waiting. Both ends know all shapes, so that nothing but the tensors travels."""

    def begin(self, program: Program) -> None:
        """Makes ready for what a program is about to send and receive; every rank calls it before it runs one."""

    def end(self) -> None:
        """A program has run: all that was sent is received."""

    def send(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        """Begins to send to rank `peer`."""

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        """Begins to receive into `tensors`."""

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], purpose: int) -> None:
        """Sends and receives all, and waits."""

    def warm_up(self) -> None:
        """Opens every connection that the plan needs, in one order for all ranks."""

    def close(self) -> None:
        """Lets go of all that it lent, borrowed and began, finished or not."""
