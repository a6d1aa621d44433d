"""The processes of a job: the process groups among them, and which process runs which rank of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import InputError
from penstock.models.modules.parallel import TensorParallel
from penstock.plans.plan import Plan
from penstock.plans.ranks import groups_of

__all__ = ["ProcessGroups", "World"]


class ProcessGroups:
    """The process groups of one process, by the processes in them.

    Making one takes milliseconds and sockets, so each is made when a plan first asks for it, and kept for the plans that follow.
    """

    def __init__(self, device: torch.device | str = "cpu", *, staged: bool = False, timeout_s: float = 600.0) -> None:
        self.device, self.staged = torch.device(device), staged
        """`staged`: collectives go through host memory, for processes that share one GPU, which NCCL refuses."""
        self._timeout = timedelta(seconds=timeout_s)
        self._made: dict[tuple[int, ...], Any] = {}

    @property
    def place(self) -> tuple[int, int]:
        """(number of this process, how many there are)."""
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def of(self, processes: Iterable[int]) -> Any:
        """The group of these processes; None for one alone. A new one is made by every process of the job, its member or not."""
        members = tuple(sorted(processes))
        if len(members) == 1:
            return None
        if members not in self._made:
            everyone = len(members) == dist.get_world_size()
            self._made[members] = dist.group.WORLD if everyone else dist.new_group(list(members), timeout=self._timeout)
        return self._made[members]

    def barrier(self) -> None:
        """Returns when all processes of the job have come here."""
        if self.place[1] > 1:
            dist.barrier()


class World:
    """The ranks of a plan on the processes of this job; process i runs the plan's i-th rank."""

    def __init__(self, plan: Plan, groups: ProcessGroups) -> None:
        self.plan, self.groups = plan, groups
        self.device, self.staged = groups.device, groups.staged
        self.ranks = plan.ranks
        self.process = {rank: index for index, rank in enumerate(self.ranks)}
        mine, size = groups.place
        if size < len(self.ranks):
            raise InputError(f"the plan has {len(self.ranks)} ranks, but {size} processes were started. Start one for each rank.")
        self.rank = self.ranks[mine] if mine < len(self.ranks) else -1
        """This process' rank in the plan; -1: it has no work."""
        for members in [self.ranks, *groups_of(plan)]:  # torch wants every process to make all groups, its own or not, in one order
            self.group(members)

    def group(self, ranks: Iterable[int]) -> Any:
        """The process group of these ranks of the plan; None for one alone."""
        return self.groups.of(self.process[rank] for rank in ranks)

    def tensor_parallel(self, ranks: Sequence[int]) -> TensorParallel:
        """This rank's place in a tensor-parallel group."""
        if len(ranks) == 1:
            return TensorParallel()
        if self.staged:
            raise InputError(f"ranks {tuple(ranks)} share one GPU, where tensor parallelism has no collectives. Use tp 1 there.")
        return TensorParallel(list(ranks).index(self.rank), len(ranks), self.group(ranks))

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """(ranks, …) the tensors of all ranks, in the order of ranks."""
        if len(self.ranks) == 1:
            return values[None]
        own = values.cpu() if self.staged else values
        parts = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(parts, own, group=self.group(self.ranks))
        return torch.stack(parts).to(values.device)

    def barrier(self) -> None:
        """Returns when all ranks have come here."""
        if len(self.ranks) > 1:
            dist.barrier(group=self.group(self.ranks))
