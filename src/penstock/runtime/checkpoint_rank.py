"""A rank of a plan into a checkpoint and out of one: weights, optimizer state and running statistics, whatever the plan.

Weights are saved in fp32 where the optimizer has masters of them. Over all ranks every part of every tensor is saved once; those that hold
the same share the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from penstock.errors import InputError
from penstock.programs.sharing import reduce_groups
from penstock.runtime.checkpoint_layout import BUFFERS, WEIGHTS, Layout, Piece, own_share, parameter_layout, stored_shapes, whole_layout
from penstock.runtime.checkpoint_reader import Checkpoint

if TYPE_CHECKING:
    from penstock.models.modules import OpModule
    from penstock.runtime.rank import Rank
    from penstock.runtime.stage import Held, StageModule

__all__ = ["load_rank", "rank_pieces", "rank_state"]

_OWN = (WEIGHTS, BUFFERS)


def rank_pieces(rank: Rank) -> Iterator[Piece]:
    """What this rank saves, to be read before its next step."""
    known: dict[Any, Any] = {}
    optimizer = rank.update.optimizer
    for number, stage in rank.stages.items():
        for held in _saved_here(rank, stage, number):
            layout = parameter_layout(held.module, held.name, known=known)
            state = optimizer.state(held.parameter) if held.parameter.requires_grad else {}
            yield from layout.pieces(state.pop("master", held.parameter.detach()))
            for kind, value in state.items():
                yield from _state_layout(layout, value).pieces(value, kind)
        for piece, module in _modules(stage):
            if module.tp.rank == 0 and _holders(rank, stage, piece)[0] == rank.world.rank:
                yield from _buffers(module)


def _saved_here(rank: Rank, stage: StageModule, number: int) -> Iterator[Held]:
    """The weights that this rank saves: its own of ZeRO-1, and its share of what several ranks hold alike."""
    groups = [(bucket.held, bucket.ranks if bucket.owner is None else (bucket.owner,)) for bucket in rank.gradients[number].buckets]
    for piece in range(len(stage.pieces)):
        frozen = [held for held in stage.held if held.piece == piece and not held.parameter.requires_grad]
        groups.append((frozen, _holders(rank, stage, piece)))
    here = {place.name for place in stage.model.ops[stage.stage.first : stage.stage.last]}
    for group, ranks in groups:
        if rank.world.rank in ranks:
            for index in own_share([held.parameter.nbytes for held in group], ranks.index(rank.world.rank), len(ranks)):
                held = group[index]
                borrowed = held.name == "weight" and held.place.op.tied_to and held.place.op.tied_to not in here
                repeated = not held.divided and held.module.tp.rank > 0
                if not borrowed and not repeated:
                    yield held


def _state_layout(layout: Layout, value: torch.Tensor) -> Layout:
    """Numbers that are kept for a weight as a whole (the count of its steps) are no part of it."""
    return layout if value.dim() else whole_layout(layout.name, ())


def _holders(rank: Rank, stage: StageModule, piece: int) -> tuple[int, ...]:
    """The ranks with the same part of the weights of a run of ops."""
    first, last = stage.pieces[piece].first, stage.pieces[piece].last
    groups = {(group.first, group.last): group.ranks for group in reduce_groups(stage.stage, stage.index)}
    return groups.get((first, last), (rank.world.rank,))


def _modules(stage: StageModule) -> Iterator[tuple[int, OpModule]]:
    for number, piece in enumerate(stage.pieces):
        for module in piece.chain.ops:
            yield number, module


def _buffers(module: OpModule) -> Iterator[Piece]:
    for name, buffer in module.named_buffers(recurse=False):
        yield from whole_layout(f"{module.name}.{name}", buffer.shape, BUFFERS).pieces(buffer)


def rank_state(rank: Rank) -> dict[str, Any]:
    """What a rank knows besides tensors; a run adds its data position and more."""
    scale = rank.update.scale
    return {
        "model": rank.plan.model if isinstance(rank.plan.model, str) else dict(rank.plan.model),
        "seed": rank.settings.seed,
        "optimizer": rank.settings.optimizer.kind,
        "precision": rank.plan.precision,
        "loss_scale": None if scale is None else asdict(scale),
    }


@torch.no_grad()
def load_rank(checkpoint: Checkpoint, rank: Rank, *, weights_only: bool = False) -> None:
    """Sets this rank's weights, statistics and optimizer state; with `weights_only` the optimizer starts anew from the weights."""
    kinds = () if weights_only else tuple(kind for kind in checkpoint.kinds if kind not in _OWN)
    scalars = {kind for kind in kinds if checkpoint.is_scalar(kind)}
    _check(checkpoint, rank, kinds, scalars)
    known: dict[Any, Any] = {}
    for number, stage in rank.stages.items():
        updated = {id(held.parameter) for held in rank.gradients[number].updated_here()}
        for held in stage.held:
            layout = parameter_layout(held.module, held.name, known=known)
            if id(held.parameter) in updated:
                rank.update.optimizer.load_state(held.parameter, _state(checkpoint, held, layout, kinds, scalars))
            else:
                checkpoint.load(layout.pieces(held.parameter.detach()))
        for _, module in _modules(stage):
            checkpoint.load(_buffers(module))
    scale = checkpoint.state.get("loss_scale")
    if rank.update.scale is not None and scale is not None and not weights_only:
        for name, value in scale.items():
            setattr(rank.update.scale, name, value)


def _check(checkpoint: Checkpoint, rank: Rank, kinds: tuple[str, ...], scalars: set[str]) -> None:
    before, now = checkpoint.state.get("optimizer"), rank.settings.optimizer.kind
    if kinds and before != now:
        raise InputError(
            f"checkpoint '{checkpoint.path}' has the optimizer state of {before}, but {now} is asked for. "
            f"Train with {before}, or take the weights alone."
        )
    expected = stored_shapes(rank.model, (WEIGHTS, *(kind for kind in kinds if kind not in scalars)), sorted(scalars))
    checkpoint.check(expected, kinds=(*_OWN, *kinds))


def _state(checkpoint: Checkpoint, held: Held, layout: Layout, kinds: tuple[str, ...], scalars: set[str]) -> dict[str, torch.Tensor]:
    """What the optimizer keeps for one weight, read as this rank needs it."""
    device = held.parameter.device
    state = {"master": torch.empty(layout.local_shape, device=device)}
    checkpoint.load(layout.pieces(state["master"]))
    for kind in kinds:
        own = whole_layout(layout.name, ()) if kind in scalars else layout
        state[kind] = torch.empty(own.local_shape, device=device)
        checkpoint.load(own.pieces(state[kind], kind))
    return state
