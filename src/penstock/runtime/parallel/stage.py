"""A stage on one rank: its ops as torch modules, and its forward and backward passes over carries that come from elsewhere.

A stage is a run of *pieces*, ops of equal degrees; most have one. Between pieces the carry is handed over among the stage's ranks,
outside of autograd:

    forward     carry ─► [piece 0] ─► reshard ─► [piece 1] ─► carry
    backward    grads ◄─ [piece 0] ◄─ reshard ◄─ [piece 1] ◄─ grads

Under ZeRO-2 and 3 each block is a piece of its own, around which weights come and gradients go (`sharding`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import InputError
from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.backward import run_backward
from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch
from penstock.models.modules.build import TORCH_DTYPES, Chain, build_op
from penstock.models.modules.fused import has_triton
from penstock.models.modules.init import init_parameter
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model, PlacedOp
from penstock.models.stored import shared_weights
from penstock.plans.degrees import Axis, parts_of
from penstock.plans.plan import Stage
from penstock.programs.routing import Side
from penstock.programs.sharing import ranks_with
from penstock.runtime.parallel.deferred import DeferWeights
from penstock.runtime.parallel.held import Held
from penstock.runtime.parallel.module_chain import CutModule, ModuleChain
from penstock.runtime.parallel.recordings import Recordings
from penstock.runtime.parallel.resharding import Reshard
from penstock.runtime.parallel.sequence import SequenceChain
from penstock.runtime.parallel.sharding import ShardedWeights
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.world import World
from penstock.timing.recorded import FewShapes, can_be_recorded, is_recorded

__all__ = ["ModuleKey", "StageModule", "StageRun", "module_key"]

Batches = Mapping[int, Batch]
"""This rank's share of a micro-batch for each dp that a piece has."""


ModuleKey = tuple[int, int, int, int]
"""Which part of which op a module is: the op's index, rank and size of its tensor parallelism, and how it is split."""


def module_key(place: PlacedOp, module: OpModule) -> ModuleKey:
    """The key of a module that is built already, by which ops that stay on a rank keep theirs under another plan."""
    return place.index, module.tp.rank, module.tp.size, module.algo


@dataclass(frozen=True, slots=True)
class StageRun:
    """Ops [first, last) of equal degrees."""

    first: int
    last: int
    tp: TensorParallel
    dp: int
    chain: Chain | ModuleChain
    reshard: Reshard | None
    """How the carry comes from the piece before; None for the first, and where degrees stay the same."""


@dataclass(slots=True)
class _Pass:
    """One piece between forward and backward pass: the tensors that entered, and where the graph of its results begins."""

    leaves: Carry
    edges: dict[str, GradientEdge]


@dataclass(slots=True)
class _Running:
    """A micro-batch between its forward and its backward pass."""

    micro: MicroBatch
    passes: list[_Pass]
    deferred: DeferWeights | None


class StageModule:
    """Stage `number` of a plan on this rank of replica `replica`."""

    def __init__(
        self, model: Model, stage: Stage, number: int, replica: int, world: World, transport: Transport, *, seed: int = 0,
        kept: Mapping[ModuleKey, OpModule] | None = None, cut: CutModule | None = None,
    ) -> None:  # fmt: skip
        """`kept`: modules of a plan before, to be used where they fit. `cut`: the module that is trained, where it is not one of ours."""
        self.model, self.stage, self.number, self.replica, self.world = model, stage, number, replica, world
        self.ranks = stage.devices[replica]
        self.index = self.ranks.index(world.rank)
        self.is_last = stage.last == model.num_ops
        self.held: list[Held] = []
        self.cut = cut
        self.weights = ShardedWeights(world, stage.zero) if stage.zero > 1 else None
        self._kept = {} if kept is None or self.weights is not None else kept
        self.pieces = self._build(transport, seed)
        self._kept = {}
        self._running: dict[int, _Running] = {}
        self.recordings = self._recordings()

    def _build(self, transport: Transport, seed: int) -> list[StageRun]:
        """The modules of the stage in pieces: runs of ops of one degree, cut further where ZeRO-2 and 3 gather weights block by block."""
        pieces: list[StageRun] = []
        shared: dict[str, OpModule] = {}
        algos = self.stage.algos()
        before: Side | None = None
        for part in parts_of(self.stage):
            tp = self.world.tensor_parallel(part.degrees.group(Axis.TP, self.index, self.ranks))
            side = Side(part.tp, part.dp, self.stage.sequence_parallel)
            reshard = None
            if before is not None:
                reshard = Reshard(self.model, part.first, before, side, self.ranks, self.index, transport, self.world.device)
            for places in self._runs(part.first, part.last):
                modules = [self._op(place, tp, algos[place.index - self.stage.first], shared, len(pieces), seed) for place in places]
                chain: Chain | ModuleChain
                if self.cut is not None:
                    chain = self.cut.chain(modules, places)
                elif self.stage.sequence_parallel and tp.size > 1:
                    chain = SequenceChain(modules, places, [self.model.carry_before(place.index) for place in places])
                else:
                    chain = Chain(modules, places)
                pieces.append(StageRun(places[0].index, places[-1].index + 1, tp, part.dp, chain, reshard))
                reshard = None
                if self.weights is not None:
                    ranks = ranks_with(self.stage, self.index, places[0].index) or (self.world.rank,)
                    self.weights.add(ranks, chain.parameters(), [held for held in self.held if held.piece == len(pieces) - 1])
            before = side
        return pieces

    def _runs(self, first: int, last: int) -> list[Sequence[PlacedOp]]:
        """The pieces of ops of equal degrees: one, or one for each block."""
        places = self.model.ops[first:last]
        return [places] if self.weights is None else [tuple(run) for _, run in groupby(places, key=lambda place: (place.block, place.copy))]

    def _op(self, place: PlacedOp, tp: TensorParallel, algo: int, shared: dict[str, OpModule], piece: int, seed: int) -> OpModule:
        """One op, and what it holds that no op before it does."""
        module = self._ours(place, tp, algo, shared, seed) if self.cut is None else self.cut.op(place, tp)
        known = {id(held.parameter) for held in self.held}
        for name, parameter in module.named_parameters():
            if id(parameter) not in known:
                self.held.append(Held(place, name, parameter, module, piece))
        return module

    def _ours(self, place: PlacedOp, tp: TensorParallel, algo: int, shared: dict[str, OpModule], seed: int) -> OpModule:
        """An op of our own; its weight is that of an earlier op of the stage where the two are tied, else starts equal to it."""
        module = self._kept.get((place.index, tp.rank, tp.size, algo))
        if module is None:
            module = build_op(place, tp, algo, device=self.world.device, dtype=TORCH_DTYPES[self.model.dtype], seed=seed)
        module.tp = tp  # the same part of the op, perhaps beside other ranks
        owner = place.op.tied_to or place.name
        first = shared.setdefault(owner, module)
        if first is not module:
            if first.tp.size != tp.size:
                raise InputError(
                    f"stage {self.number} holds ops '{first.name}' and '{place.name}', which share a weight, with tp {first.tp.size} and "
                    f"{tp.size}. Give both the same tp, or put them in different stages."
                )
            module.weight = first.weight
        elif place.op.tied_to:
            whole = init_parameter(module.whole_shapes["weight"], owner, "weight", seed=seed, device=self.world.device)
            module.load("weight", whole.detach())
        return module

    def _recordings(self) -> Recordings | None:
        plan = self.world.plan
        if torch.device(self.world.device).type != "cuda" or not has_triton() or not can_be_recorded(plan, self.stage, self.model):
            return None
        (first,) = self.pieces
        assert isinstance(first.chain, Chain)

        def run(batch: Batch, carry: Carry, recompute: list[int]) -> tuple[Carry, Callable[[Carry], Carry]]:
            results, done = self._run(first, batch, carry, recompute)
            return results, lambda gradients: _backward(done, gradients)

        return Recordings(run, first.chain, FewShapes.of(first.chain.places, plan, self.stage), self.world.device)

    def is_recorded(self, micro: MicroBatch) -> bool:
        """Whether passes of a micro-batch are to be played from a recording, once its shape has come often enough."""
        plan = self.world.plan
        ragged = (micro.row_length, micro.dec_row_length) != (plan.seq_length, plan.dec_length)
        if self.recordings is None or not is_recorded(plan, self.stage, self.model, ragged=ragged):
            return False
        return not self.recordings.shapes.keeps_busy(micro.shape())

    def as_recorded(self, micro: MicroBatch, dp: int) -> MicroBatch:
        """A micro-batch to be played from a recording, brought to a size that comes again where no other stage must agree on it."""
        if self.recordings is None or not is_recorded(self.world.plan, self.stage, self.model, ragged=True):
            return micro
        return self.recordings.shapes.brought(micro, self.share(dp))

    @property
    def dp_degrees(self) -> list[int]:
        """The dp of its pieces, each once, with this rank's share of the samples: see `share`."""
        return list(dict.fromkeys(piece.dp for piece in self.pieces))

    def share(self, dp: int) -> int:
        """Which of `dp` parts of the samples this rank has in pieces of that degree."""
        return self.index // (len(self.ranks) // dp)

    def borrowed(self) -> set[str]:
        """Stored names of weights of which this stage has a copy: an earlier stage has them too."""
        return {name for name, ops in shared_weights(self.model).items() if ops[0] < self.stage.first}

    def modules(self) -> Iterator[OpModule]:
        """All ops in order."""
        for piece in self.pieces:
            yield from piece.chain.ops

    def forward(
        self, micro: MicroBatch, batches: Batches, carry: Carry, pattern: int = 0, *, training: bool = True, split: bool = False,
        watched: bool = False,
    ) -> Carry:  # fmt: skip
        """The carry that leaves (the loss, in the last stage), detached; with `training` the backward pass stays possible.

        `split` puts weight gradients aside in the backward pass. `watched`: somebody wants to know when each gradient is complete.
        """
        recomputed = [self.stage.first + position for position in sorted(self.stage.recomputed(pattern))]
        if self.recordings is not None and training and not split and not watched:
            again = [op - self.stage.first for op in recomputed]
            played = self.recordings.forward(micro.index, batches[self.pieces[0].dp], carry, again, alone=not self._running)
            if played is not None:
                return played
        deferred = DeferWeights() if split and training else None
        passes: list[_Pass] = []
        for number, piece in enumerate(self.pieces):
            if piece.reshard is not None:
                carry = piece.reshard.forward(carry, micro)
            again = [op - piece.first for op in recomputed if piece.first <= op < piece.last]
            with torch.set_grad_enabled(training), deferred or nullcontext(), self._weights_of(number):
                carry, done = self._run(piece, batches[piece.dp], carry, again)
            passes.append(done)
        if training:
            self._running[micro.index] = _Running(micro, passes, deferred)
        return carry

    def _run(self, piece: StageRun, batch: Batch, carry: Carry, recompute: list[int]) -> tuple[Carry, _Pass]:
        leaves = {}
        for spec in self.model.carry_before(piece.first):
            leaves[spec.name] = carry[spec.name].detach().requires_grad_(spec.differentiable and torch.is_grad_enabled())
        results = piece.chain(batch, dict(leaves), recompute)
        # An edge of the graph instead of the tensor: what nobody else needs of the result can then be freed before the backward pass.
        edges = {name: get_gradient_edge(tensor) for name, tensor in results.items() if tensor.requires_grad}
        return {name: tensor.detach() for name, tensor in results.items()}, _Pass(leaves, edges)

    def backward(self, micro_batch: int, gradients: Carry) -> Carry:
        """The gradient of the carry that entered, given that of the carry that left (of the loss, in the last stage)."""
        if self.recordings is not None and micro_batch in self.recordings:
            return self.recordings.backward(micro_batch, gradients)
        running = self._running[micro_batch]
        for number, piece in reversed(list(enumerate(self.pieces))):
            with self._weights_of(number, backward=True):
                gradients = _backward(running.passes.pop(), gradients)
            if piece.reshard is not None:
                gradients = piece.reshard.backward(gradients, running.micro)
        if running.deferred is None:
            del self._running[micro_batch]
        return gradients

    def _weights_of(self, piece: int, backward: bool = False) -> AbstractContextManager[None]:
        return nullcontext() if self.weights is None else self.weights.around(piece, backward)

    def backward_weights(self, micro_batch: int, paid: Callable[[nn.Parameter], None]) -> None:
        """The second half of a split backward pass; `paid` is told each weight whose gradient is complete for this micro-batch."""
        deferred = self._running.pop(micro_batch).deferred
        if deferred is None:
            raise RuntimeError(f"stage {self.number}: micro-batch {micro_batch} was not run to be split")
        deferred.pay(paid)

    def abandon(self) -> None:
        """Forgets the micro-batches that are between forward and backward pass."""
        self._running.clear()
        if self.recordings is not None:
            self.recordings.abandon()
        if self.weights is not None:
            self.weights.abandon()

    @property
    def num_running(self) -> int:
        """Micro-batches between forward and backward pass."""
        return len(self._running) + (0 if self.recordings is None else len(self.recordings))


def _backward(done: _Pass, gradients: Carry) -> Carry:
    names = [name for name in done.edges if name in gradients]
    if names:
        run_backward([done.edges[name] for name in names], [gradients[name] for name in names])
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in done.leaves.items() if leaf.requires_grad}
