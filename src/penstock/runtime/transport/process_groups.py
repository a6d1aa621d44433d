"""Transfers by the process group that torch has (gloo on CPU, NCCL on GPUs), and the choice between it and copies within one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from penstock.plans.ranks import pairs_of
from penstock.programs.instructions import Program
from penstock.runtime.transport.transport import PIPELINE, Addressed, Pending, Transport
from penstock.runtime.transport.world import World

__all__ = ["ProcessGroupTransport", "make_transport"]


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

    def close(self) -> None:
        pass  # requests are held by those who began them


def make_transport(world: World) -> Transport:
    """The transport for this world's device: processes that share a GPU copy within it, others use their process group.

    It ends with the generation that is in force.
    """
    made: Transport
    if world.staged:
        from penstock.runtime.transport.same_gpu import SameGpuTransport

        made = SameGpuTransport(world)
    else:
        made = ProcessGroupTransport(world)
    world.groups.generation.hold(made)
    return made
