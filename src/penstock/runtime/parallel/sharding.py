"""ZeRO-2 and 3: weights that several ranks hold alike, divided among them; each rank updates its part of every weight.

    weight    ├────────────────────────┤        laid flat, cut into as many equal parts as there are ranks (the last may be shorter)
    rank 0    ├───────┤                         its part: gradient, optimizer state, and under ZeRO-3 all that lasts of the weight
    rank 1            ├───────┤
    rank 2                    ├────────┤

A stage runs block by block. Around each block, ZeRO-3 gathers its weights from all ranks (the next block's meanwhile) and lets go of them
again; after its backward pass gradients are summed, and each rank keeps those of its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from penstock.plans.ranks import flat_part

if TYPE_CHECKING:
    from penstock.runtime.parallel.held import Held
    from penstock.runtime.transport.world import World

__all__ = ["Done", "Shard", "ShardedWeights", "sum_dtype"]

# torch 2.13 renames these; older ones have the old names alone.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """One weight: the whole, which ops use, and this rank's part of it."""

    whole: nn.Parameter
    held: Held
    """With the part as its parameter."""
    width: int
    """Elements of a part, padding included."""

    @property
    def part(self) -> nn.Parameter:
        """The part of a weight that this rank updates."""
        return self.held.parameter


@dataclass(frozen=True, eq=False)
class _Unit:
    """The weights that one piece of the stage uses; one that is shared belongs to several units."""

    shards: list[Shard]
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        return sum(shard.width for shard in self.shards)


@dataclass(eq=False)
class _Pending:
    """A collective under way, with what it reads and writes."""

    work: Any
    result: torch.Tensor
    source: torch.Tensor


class ShardedWeights:
    """The weights of one stage on this rank."""

    def __init__(self, world: World, zero: int) -> None:
        self.world, self.divides = world, zero == 3
        """`divides`: whether the weights themselves are divided, not only their gradients."""
        self.shards: dict[int, Shard] = {}
        """By the id of the whole."""
        self._units: list[_Unit] = []
        self._arriving: dict[int, _Pending] = {}
        self._leaving: tuple[list[Shard], _Pending] | None = None

    def add(self, ranks: tuple[int, ...], parameters: Iterable[nn.Parameter], held: Sequence[Held]) -> None:
        """The next piece of the stage: `held` are those of its weights that no piece before it had."""
        ranks = tuple(sorted(ranks))  # as process groups have them
        for own in held:
            self.shards[id(own.parameter)] = self._shard(own, ranks)
        self._units.append(_Unit([self.shards[id(parameter)] for parameter in parameters], ranks))

    def _shard(self, held: Held, ranks: tuple[int, ...]) -> Shard:
        whole = held.parameter
        width = -(-whole.numel() // len(ranks))
        start, stop = flat_part(whole.numel(), ranks.index(self.world.rank), len(ranks))
        values = whole.detach().view(-1)[start:stop]
        if self.divides and len(ranks) > 1:
            values = values.clone()
            _let_go(whole)
        part = nn.Parameter(values, requires_grad=whole.requires_grad)
        if part.requires_grad:
            part.grad_dtype = sum_dtype(self.world, part)
            part.grad = torch.zeros_like(values, dtype=part.grad_dtype)
        return Shard(whole, replace(held, parameter=part, start=start), width)

    @contextmanager
    def around(self, number: int, backward: bool) -> Iterator[None]:
        """A pass of one piece: its weights are there, and afterwards its gradients, if any, are on their way."""
        if self.divides:
            self._fetch(number)
            self._begin(number + (-1 if backward else 1))
        yield
        if backward:
            self._reduce(self._units[number])
        if self.divides:
            self._release(number)

    def join(self, backward: bool) -> None:
        """Takes part in a pass of other ranks without a micro-batch of its own: gives its parts, and gradients of zero."""
        numbers = range(len(self._units))
        for number in reversed(numbers) if backward else numbers:
            with self.around(number, backward):
                pass

    def abandon(self) -> None:
        """Forgets what is under way; every rank has its parts, and nothing else."""
        self._arriving.clear()
        self._leaving = None
        for number, unit in enumerate(self._units):
            for shard in unit.shards:
                shard.whole.grad = None
            if self.divides:
                self._release(number)

    @torch.no_grad()
    def share(self) -> None:
        """The parts have new values: where every rank has the whole, it gets those of the others."""
        if not self.divides:
            for number in range(len(self._units)):
                self._fetch(number)
                self._begin(number + 1)

    # Weights -------------------------------------------------------------------------------------------------------------------

    def _begin(self, number: int) -> None:
        """Begins to gather the weights of a piece, if there is such a one."""
        if not 0 <= number < len(self._units) or number in self._arriving:
            return
        unit = self._units[number]
        if len(unit.ranks) == 1 or not unit.shards:
            return
        first = unit.shards[0].part
        own = torch.zeros(unit.width, dtype=first.dtype, device=first.device)
        for place, shard in _places(unit.shards):
            own[place : place + shard.part.numel()] = shard.part.detach()
        self._arriving[number] = self._gather(own, unit.ranks)

    @torch.no_grad()
    def _fetch(self, number: int) -> None:
        """Returns with all weights of a piece in place."""
        self._begin(number)
        pending = self._arriving.pop(number, None)
        if pending is None:
            return
        unit = self._units[number]
        pending.work.wait()
        table = pending.result.view(len(unit.ranks), unit.width)
        for place, shard in _places(unit.shards):
            _take_back(shard.whole)
            # Through `data`: autograd holds weights for the backward pass, and must not take this for a change of them.
            flat = table[:, place : place + shard.width].reshape(-1)[: shard.whole.numel()]
            shard.whole.data.view(-1).copy_(flat)

    def _release(self, number: int) -> None:
        unit = self._units[number]
        if len(unit.ranks) > 1:
            for shard in unit.shards:
                _let_go(shard.whole)

    # Gradients -----------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _reduce(self, unit: _Unit) -> None:
        """Begins to sum the gradients of a piece; at most one such sum is under way."""
        trained, count = [shard for shard in unit.shards if shard.part.requires_grad], len(unit.ranks)
        if not trained:
            return
        if count == 1:
            for shard in trained:
                if shard.whole.grad is not None:
                    _gradient(shard).add_(shard.whole.grad.view(-1))
                    shard.whole.grad = None
            return
        first = trained[0].part
        table = torch.zeros(count, sum(shard.width for shard in trained), dtype=first.grad_dtype, device=first.device)
        for place, shard in _places(trained):
            if shard.whole.grad is not None:
                flat = F.pad(shard.whole.grad.reshape(-1), (0, count * shard.width - shard.whole.numel()))
                table[:, place : place + shard.width] = flat.view(count, shard.width)
                shard.whole.grad = None
        self.finish()
        self._leaving = trained, self._scatter(table, unit.ranks)

    @torch.no_grad()
    def finish(self) -> None:
        """Returns when all sums are added to this rank's parts."""
        if self._leaving is None:
            return
        shards, pending = self._leaving
        self._leaving = None
        pending.work.wait()
        for place, shard in _places(shards):
            _gradient(shard).add_(pending.result[place : place + shard.part.numel()])

    # Collectives ---------------------------------------------------------------------------------------------------------------

    def _gather(self, own: torch.Tensor, ranks: tuple[int, ...]) -> _Pending:
        group, staged = self.world.group(ranks), self.world.staged
        given = own.cpu() if staged else own
        result = given.new_empty(len(ranks) * own.numel())
        work = _all_gather(result, given, group=group, async_op=not staged)
        return _Pending(work, result, given) if not staged else _Pending(Done(), result.to(own.device), own)

    def _scatter(self, table: torch.Tensor, ranks: tuple[int, ...]) -> _Pending:
        group, staged = self.world.group(ranks), self.world.staged
        given = table.cpu() if staged else table
        result = given.new_empty(table.shape[1])
        work = _reduce_scatter(result, given.view(-1), group=group, async_op=not staged)
        return _Pending(work, result, given) if not staged else _Pending(Done(), result.to(table.device), table)


def sum_dtype(world: World, weight: torch.Tensor) -> torch.dtype:
    """The dtype in which the gradients of a weight are summed, over micro-batches and over ranks."""
    return torch.float32 if world.plan.gradients == "fp32" else weight.dtype


class Done:
    """A collective through host memory, done when it was begun."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def _places(shards: Iterable[Shard]) -> Iterator[tuple[int, Shard]]:
    """Each weight with the place where its part begins among all parts laid end to end."""
    place = 0
    for shard in shards:
        yield place, shard
        place += shard.width


def _gradient(shard: Shard) -> torch.Tensor:
    assert shard.part.grad is not None
    return shard.part.grad


def _let_go(whole: nn.Parameter) -> None:
    """Frees the memory of a weight; the tensors that autograd made of it stay, and see it again when it is back."""
    whole.untyped_storage().resize_(0)


def _take_back(whole: nn.Parameter) -> None:
    whole.untyped_storage().resize_(whole.numel() * whole.element_size())
