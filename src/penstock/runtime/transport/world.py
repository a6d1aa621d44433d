"""The processes of a job: the process groups among them, and which process runs which rank of a plan."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import InputError
from penstock.models.modules.parallel import TensorParallel
from penstock.plans.plan import Plan
from penstock.plans.ranks import groups_of
from penstock.plans.texts import format_ranks
from penstock.runtime.transport.generations import Generation

__all__ = ["ProcessGroups", "World"]

_LONGEST = timedelta(days=365)


class ProcessGroups:
    """This process among those of a job: its number, its device, and the generation of process groups that is in force.

    Process r is device r of the cluster, under every plan; not every device needs to have one. Without a store it is alone.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, staged: bool = False, store: Any = None, own: int = 0, members: Sequence[int] = (0,),
        timeout_s: float = 600.0,
    ) -> None:  # fmt: skip
        self.device, self.staged, self.store, self.own = torch.device(device), staged, store, own
        """`staged`: collectives go through host memory, for processes that share one GPU, which NCCL refuses. `own`: the number of this
        process among `members`, all that were started."""
        backend = "gloo" if staged or self.device.type == "cpu" else "cpu:gloo,cuda:nccl"
        self.generation = Generation(0, members, own, store=store, backend=backend, timeout_s=timeout_s)

    def renew(self, members: Sequence[int] | None = None) -> None:
        """Leaves the generation in force for the next one, with all that are in it or with `members` of them, each of whom does the same.

        Nothing that is under way in the old one is waited for. Worlds and transports of it are of no more use.
        """
        self.generation = self.generation.next(members)

    def of(self, processes: Iterable[int]) -> Any:
        """The group of these processes in the generation in force; None for one alone."""
        return self.generation.group(processes)

    def barrier(self) -> None:
        """Returns when all processes of the generation have come here."""
        self.generation.barrier()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(processes, …) the tensors of all processes of the generation, in their order."""
        return _gathered(values, self.of(self.generation.members), len(self.generation.members), staged=self.staged)

    def broadcast(self, data: bytes, size: int) -> bytes:
        """Returns in every process the `size` bytes of the first one."""
        told = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        if len(self.generation.members) > 1:
            dist.broadcast(told, 0)
        return told.numpy().tobytes()

    def part(self) -> None:
        """Returns when all processes are done, however long some of them take: those without work come here at once."""
        if self.store is not None:
            self.store.set(f"parted/{self.own}", "")
            self.store.wait([f"parted/{process}" for process in self.generation.members], _LONGEST)
            self.barrier()  # whoever serves the store must not leave while others ask it


class World:
    """The ranks of a plan on the processes of this job: rank r is process r. A process without work is in no group of the plan."""

    def __init__(self, plan: Plan, groups: ProcessGroups) -> None:
        self.plan, self.groups = plan, groups
        self.device, self.staged = groups.device, groups.staged
        self.ranks = plan.ranks
        members = groups.generation.members
        missing = [rank for rank in self.ranks if rank not in members]
        if missing:
            raise InputError(
                f"the plan has ranks {format_ranks(self.ranks)}, but rank {format_ranks(missing)} has no process. Start one for each rank."
            )
        self.process = {rank: members.index(rank) for rank in self.ranks}
        """The number that torch's process groups have for each rank."""
        self.rank = groups.own if groups.own in self.process else -1
        """This process' rank in the plan; -1: it has no work."""
        for ranks in [self.ranks, *groups_of(plan)]:  # torch wants every process to make all groups, its own or not, in one order
            self.group(ranks)

    @property
    def place(self) -> int:
        """The place of this rank among those that have work, in their order."""
        return self.ranks.index(self.rank)

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of these ranks of the plan; None for one alone."""
        return self.groups.of(ranks)

    def tensor_parallel(self, ranks: Sequence[int]) -> TensorParallel:
        """This rank's place in a tensor-parallel group."""
        if len(ranks) == 1:
            return TensorParallel()
        if self.staged:
            raise InputError(f"ranks {tuple(ranks)} share one GPU, where tensor parallelism has no collectives. Use tp 1 there.")
        # Asked for when it is needed: a module that outlives this generation must not hold its groups.
        return TensorParallel(list(ranks).index(self.rank), len(ranks), partial(self.groups.of, tuple(ranks)))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(ranks, …) the tensors of all ranks, in the order of ranks."""
        return _gathered(values, self.group(self.ranks), len(self.ranks), staged=self.staged)

    def fresh_word(self) -> str:
        """A word that all ranks share and that nobody had before them, also no rank of a start of the same job that was killed."""
        drawn = torch.tensor([secrets.randbits(62)], device=self.device)
        return f"{int(self.gather(drawn)[0]):x}"

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        if len(self.ranks) > 1:
            dist.barrier(group=self.group(self.ranks))


def _gathered(values: torch.Tensor, group: Any, size: int, *, staged: bool) -> torch.Tensor:
    if size == 1:
        return values[None]
    own = values.cpu() if staged else values
    parts = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return torch.stack(parts).to(values.device)
