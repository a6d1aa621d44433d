"""How tensors travel from rank to rank: one small interface, with gloo, NCCL and (`same_gpu`) CUDA IPC behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from penstock.plans.ranks import pairs_of
from penstock.programs.instructions import Program
from penstock.runtime.parallel.world import World

__all__ = ["PIPELINE", "RESHARD", "TIED", "Pending", "ProcessGroupTransport", "Transport", "make_transport"]

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


class _Works:
    """Requests of a process group, with the tensors they work on kept alive."""

    __slots__ = ("tensors", "works")

    def __init__(self, works: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        self.works, self.tensors = works, tensors

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.tensors = ()


class ProcessGroupTransport:
    """Point-to-point operations of the process group: gloo on CPU, NCCL on CUDA.

    NCCL runs the transfers of each pair of ranks on a stream of its own, in the order begun; waiting makes the current stream wait, not
    the host.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._batched = world.device.type == "cuda"

    def begin(self, program: Program) -> None:
        pass  # the process group makes room for itself

    def end(self) -> None:
        pass  # and knows when its sends are done

    def send(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        process = self.world.process[peer]
        return _Works([dist.isend(tensor, process, tag=purpose) for tensor in tensors], tensors)

    def receive(self, tensors: Sequence[torch.Tensor], peer: int, purpose: int = PIPELINE) -> Pending:
        process = self.world.process[peer]
        return _Works([dist.irecv(tensor, process, tag=purpose) for tensor in tensors], tensors)

    def exchange(self, sends: Sequence[Addressed], receives: Sequence[Addressed], purpose: int) -> None:
        if self._batched:  # one group call: NCCL would otherwise wait for each transfer in turn
            process = self.world.process
            operations = [dist.P2POp(dist.isend, tensor, process[peer]) for peer, tensors in sends for tensor in tensors]
            operations += [dist.P2POp(dist.irecv, tensor, process[peer]) for peer, tensors in receives for tensor in tensors]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            return
        pending = [self.send(tensors, peer, purpose) for peer, tensors in sends]
        pending += [self.receive(tensors, peer, purpose) for peer, tensors in receives]
        for transfer in pending:
            transfer.wait()

    def warm_up(self) -> None:
        # The first transfer of a pair makes its connection, for which both must be there: pair by pair none can wait in a circle.
        token = torch.zeros(1, device=self.world.device)
        for a, b in pairs_of(self.world.plan):
            if self.world.rank == a:
                self.send([token], b).wait()
                self.receive([token], b).wait()
            elif self.world.rank == b:
                self.receive([token], a).wait()
                self.send([token], a).wait()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def make_transport(world: World) -> Transport:
    """The transport for this world's device: processes that share a GPU copy within it, others use their process group."""
    if world.staged:
        from penstock.runtime.transport.same_gpu import SameGpuTransport

        return SameGpuTransport(world)
    return ProcessGroupTransport(world)
