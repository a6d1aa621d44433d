"""A stage's gradients: in flat buffers, summed over the ranks that hold the same weights while the last backward pass still runs.

    op        7   6   5   4   3   2   1   0        the order in which gradients are complete
    bucket    └─0─┘   └───1───┘   └───2───┘        each is summed as soon as it and all before it are

With ZeRO-1 each op's optimizer state belongs to one of the ranks, and its bucket is summed there alone. With ZeRO-2 and 3 gradients are
summed block by block in every backward pass, see `sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.models.stored import shared_weights
from penstock.plans.ranks import state_owners
from penstock.programs.instructions import ReduceStart
from penstock.programs.sharing import ranks_with
from penstock.runtime.parallel.held import Held
from penstock.runtime.parallel.sharding import Done, ShardedWeights, sum_dtype
from penstock.runtime.parallel.stage import StageModule
from penstock.runtime.transport.world import World

__all__ = ["Bucket", "BucketedGradients", "Gradients", "ShardedGradients", "gradients_of", "holders_of"]

BUCKET_BYTES = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Gradients that are summed together: views of one flat buffer."""

    held: list[Held]
    flat: torch.Tensor
    ranks: tuple[int, ...]
    """Who holds the same weights."""
    owner: int | None = None
    """The rank that alone needs the sum, because it alone updates the weights (ZeRO-1); None: all do."""
    waiting: set[int] = field(default_factory=set)
    """Ids of the weights whose gradients the last backward pass has still to complete."""


class Gradients:
    """The gradients of one stage: summed over the ranks that hold the same weights, in flat buffers (`BucketedGradients`) or as parts of
    each (`ShardedGradients`)."""

    def __init__(self, stage: StageModule, world: World) -> None:
        self.stage, self.world = stage, world
        self._works: list[Any] = []
        self._statistics: list[tuple[list[torch.Tensor], torch.Tensor, int]] = []

    def start(self, step: ReduceStart) -> None:
        """Begins what can be sent of a stage's gradients, now that all backward passes but one are done, or all."""

    def completed(self, parameter: nn.Parameter) -> None:
        """The gradient of a weight got its last share of a backward pass."""

    def passed(self, micro_batch: int) -> None:
        """A backward pass of this stage is over."""

    def sum_now(self) -> None:
        """Sums what there is, with the passes of one micro-batch behind it."""
        raise TypeError(f"{type(self).__name__} are summed with every pass")

    def wait(self) -> None:
        """Returns when all sums are there."""
        for work in self._works:
            work.wait()
        self._works.clear()
        for tensors, flat, count in self._statistics:
            means = flat / count if flat.is_floating_point() else flat.div(count, rounding_mode="trunc")
            for tensor, mean in zip(tensors, means.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))
        self._statistics.clear()

    def abandon(self) -> None:
        """Lets go of sums that are under way. What is in place of the gradients then is worth nothing."""
        self._works.clear()
        self._statistics.clear()

    def zero(self) -> None:
        """Forgets them; their memory stays."""
        raise TypeError(f"{type(self).__name__} has no gradients")

    def kept(self) -> list[Held]:
        """All weights of this rank, or its parts of them, as they last."""
        return self.stage.held

    def updated_here(self) -> list[Held]:
        """The weights that this rank updates."""
        raise TypeError(f"{type(self).__name__} has no weights")

    def counted_here(self) -> list[Held]:
        """The weights whose gradients this rank contributes to the global norm: over all ranks, every part of every weight once."""
        raise TypeError(f"{type(self).__name__} has no weights")

    def saved_with(self) -> list[tuple[list[Held], tuple[int, ...]]]:
        """All that is trained, each with the ranks that have the same and share the work of saving it."""
        raise TypeError(f"{type(self).__name__} has no weights")

    def share_updates(self) -> None:
        """Weights were updated: whoever uses them gets them."""

    def share_loaded(self) -> None:
        """The weights of `kept` were read from a checkpoint: whoever else uses them gets them."""

    def _launch_statistics(self) -> None:
        """Running statistics (batch norm) become their mean over the ranks, so that any of these can stand for all."""
        for number, piece in enumerate(self.stage.pieces):
            ranks = holders_of(self.stage, number)
            for tensors in _alike(piece.chain.buffers()) if len(ranks) > 1 else ():
                flat = torch.cat([tensor.flatten() for tensor in tensors])
                flat = flat if flat.is_floating_point() else flat.long()
                self._statistics.append((tensors, flat, len(ranks)))
                self._works += [self._sum(flat, ranks, None)]

    def _sum(self, tensor: torch.Tensor, ranks: Iterable[int], owner: int | None) -> Any:
        group = self.world.group(ranks)
        if self.world.staged:
            host = tensor.cpu()
            dist.all_reduce(host, group=group)
            tensor.copy_(host)
            return Done()
        if owner is None:
            return dist.all_reduce(tensor, group=group, async_op=True)
        return dist.reduce(tensor, self.world.process[owner], group=group, async_op=True)


class BucketedGradients(Gradients):
    """Gradients in flat buffers, each summed over its ranks once an iteration (ZeRO-0 and 1)."""

    def __init__(self, stage: StageModule, world: World, bucket_bytes: int) -> None:
        super().__init__(stage, world)
        ranks_of = {number: holders_of(stage, number) for number in range(len(stage.pieces))}
        self.buckets = list(_buckets(stage, ranks_of, bucket_bytes))
        uses: dict[int, set[int]] = {}
        for number, piece in enumerate(stage.pieces):
            for parameter in piece.chain.parameters():
                uses.setdefault(id(parameter), set()).add(number)
        # A weight that several pieces use is complete only when the first of them is done.
        self._late = {key for key, pieces in uses.items() if len(pieces) > 1}
        self._home = {id(held.parameter): bucket for bucket in self.buckets for held in bucket.held}
        self._during: int | None = None
        self._hooks: list[Any] = []
        self._next = 0

    def start(self, step: ReduceStart) -> None:
        """Begins; with a micro-batch still to come, buckets follow as its backward pass completes them."""
        self._next = 0
        if step.micro_batch is None:
            self._finish()
            return
        self._during = step.micro_batch
        for bucket in self.buckets:
            bucket.waiting = {id(held.parameter) for held in bucket.held}
            self._hooks += [
                held.parameter.register_post_accumulate_grad_hook(self.completed)
                for held in bucket.held
                if id(held.parameter) not in self._late
            ]

    def sum_now(self) -> None:
        self._next = 0
        self._finish()
        self.wait()

    def completed(self, parameter: nn.Parameter) -> None:
        """The gradient of a weight got its last share."""
        if self._during is None or id(parameter) in self._late:
            return
        self._home[id(parameter)].waiting.discard(id(parameter))
        while self._next < len(self.buckets) and not self.buckets[self._next].waiting:
            self._launch(self.buckets[self._next])
            self._next += 1

    def passed(self, micro_batch: int) -> None:
        """A backward pass of this stage is over: if it was the one waited for, all that is left begins."""
        if self._during == micro_batch:
            self._finish()

    def abandon(self) -> None:
        super().abandon()
        self._listen_no_more()

    def _listen_no_more(self) -> None:
        self._during = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _finish(self) -> None:
        self._listen_no_more()
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._next = len(self.buckets)
        self._launch_statistics()

    def _launch(self, bucket: Bucket) -> None:
        if len(bucket.ranks) > 1:
            self._works += [self._sum(bucket.flat, bucket.ranks, bucket.owner)]

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()

    def updated_here(self) -> list[Held]:
        return [held for bucket in self.buckets if bucket.owner in (None, self.world.rank) for held in bucket.held]

    def counted_here(self) -> list[Held]:
        copies = self.stage.borrowed()
        found = []
        for bucket in self.buckets:
            first = bucket.ranks[0] if bucket.owner is None else bucket.owner
            for held in bucket.held:
                whole_elsewhere = not held.divided and held.module.tp.rank > 0
                if first == self.world.rank and not whole_elsewhere and held.stored_name not in copies:
                    found.append(held)
        return found

    def saved_with(self) -> list[tuple[list[Held], tuple[int, ...]]]:
        return [(bucket.held, bucket.ranks if bucket.owner is None else (bucket.owner,)) for bucket in self.buckets]

    def share_updates(self) -> None:
        """ZeRO-1: every owner hands its new weights to the others."""
        works, copies = [], []
        for bucket in self.buckets:
            if bucket.owner is None or len(bucket.ranks) == 1:
                continue
            values = [held.parameter.detach() for held in bucket.held]
            flat = torch.cat([value.flatten() for value in values])
            group, source = self.world.group(bucket.ranks), self.world.process[bucket.owner]
            if self.world.staged:
                host = flat.cpu()
                dist.broadcast(host, source, group=group)
                flat.copy_(host)
            else:
                works.append(dist.broadcast(flat, source, group=group, async_op=True))
            copies.append((values, flat))
        for work in works:
            work.wait()
        for values, flat in copies:
            torch._foreach_copy_(values, [p.view_as(v) for p, v in zip(flat.split([v.numel() for v in values]), values, strict=True)])


class ShardedGradients(Gradients):
    """Gradients of which each rank keeps its parts (ZeRO-2 and 3): they are summed within the stage's backward passes."""

    def __init__(self, stage: StageModule, weights: ShardedWeights, world: World) -> None:
        super().__init__(stage, world)
        self._weights = weights

    def wait(self) -> None:
        self._weights.finish()
        self._launch_statistics()
        super().wait()

    def zero(self) -> None:
        torch._foreach_zero_([held.parameter.grad for held in self.updated_here() if held.parameter.grad is not None])

    def kept(self) -> list[Held]:
        return [shard.held for shard in self._weights.shards.values()]

    def updated_here(self) -> list[Held]:
        return [held for held in self.kept() if held.parameter.requires_grad and held.parameter.numel()]

    def counted_here(self) -> list[Held]:
        return [held for held in self.updated_here() if held.divided or held.module.tp.rank == 0]

    def saved_with(self) -> list[tuple[list[Held], tuple[int, ...]]]:
        return [(self.updated_here(), (self.world.rank,))]

    def share_updates(self) -> None:
        self._weights.share()

    def share_loaded(self) -> None:
        self._weights.share()


def gradients_of(stage: StageModule, world: World) -> Gradients:
    """The gradients of a stage, in the form that its ZeRO level asks for."""
    return BucketedGradients(stage, world, BUCKET_BYTES) if stage.weights is None else ShardedGradients(stage, stage.weights, world)


def _alike(buffers: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Buffers that can be added up in one tensor: fractions, complex ones as pairs of them; and whole numbers, which stay exact."""
    real = [torch.view_as_real(buffer) if buffer.is_complex() else buffer for buffer in buffers]
    kinds = [buffer for buffer in real if buffer.is_floating_point()], [buffer for buffer in real if not buffer.is_floating_point()]
    return [some for some in kinds if some]


def holders_of(stage: StageModule, piece: int) -> tuple[int, ...]:
    """The ranks with the same part of the weights of a piece, this one among them."""
    return ranks_with(stage.stage, stage.index, stage.pieces[piece].first) or (stage.world.rank,)


def _buckets(stage: StageModule, ranks_of: dict[int, tuple[int, ...]], bucket_bytes: int) -> Iterable[Bucket]:
    """Last op first, never across pieces, owners or what all must have (shared weights)."""
    shared = {op for ops in shared_weights(stage.model).values() for op in ops}
    trained = [held for held in stage.held if held.parameter.requires_grad]
    owners = _owners(trained, ranks_of, shared) if stage.stage.zero else {}
    ordered = sorted(trained, key=lambda held: -held.place.index)
    for (number, owner), run in groupby(ordered, key=lambda held: (held.piece, owners.get(held.place.index))):
        filled: list[Held] = []
        size = 0
        for held in run:
            dtype = sum_dtype(stage.world, held.parameter)
            num_bytes = held.parameter.numel() * dtype.itemsize
            if filled and size + num_bytes > bucket_bytes:
                yield _bucket(filled, ranks_of[number], owner, dtype)
                filled, size = [], 0
            filled.append(held)
            size += num_bytes
        yield _bucket(filled, ranks_of[number], owner, dtype)


def _owners(trained: list[Held], ranks_of: dict[int, tuple[int, ...]], shared: set[int]) -> dict[int, int]:
    """For each op the rank that keeps its optimizer state. Ops with shared weights are updated by all."""
    sizes: dict[int, dict[int, int]] = {piece: {} for piece in ranks_of}
    for held in trained:
        if held.place.index not in shared:
            of_piece = sizes[held.piece]
            of_piece[held.place.index] = of_piece.get(held.place.index, 0) + held.parameter.numel()
    return {op: owner for piece, ranks in ranks_of.items() for op, owner in state_owners(sizes[piece], ranks).items()}


def _bucket(held: list[Held], ranks: tuple[int, ...], owner: int | None, dtype: torch.dtype) -> Bucket:
    """Puts the gradients of some weights into one buffer, for good."""
    flat = torch.zeros(sum(one.parameter.numel() for one in held), dtype=dtype, device=held[0].parameter.device)
    at = 0
    for one in held:
        one.parameter.grad_dtype = None  # torch then adds what a pass brings as it is, where it would otherwise cast it first
        one.parameter.grad = flat[at : at + one.parameter.numel()].view_as(one.parameter)
        at += one.parameter.numel()
    return Bucket(list(held), flat, ranks, owner)
