"""A rank of a plan into a checkpoint and out of one: weights, optimizer state and running statistics, whatever the plan.

Weights are saved in fp32 where the optimizer has masters of them. Over all ranks every part of every tensor is saved once; those that hold
the same share the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from penstock.errors import InputError
from penstock.models.ops import PlacedOp
from penstock.models.stored import stored_name
from penstock.runtime.checkpoints.layout import (
    BUFFERS,
    WEIGHTS,
    CheckpointLayout,
    TensorPiece,
    optimizer_kinds,
    own_share,
    parameter_layout,
    stored_shapes,
    whole_layout,
)
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.optimizing.optimizer import MASTER
from penstock.runtime.parallel.gradients import holders_of

if TYPE_CHECKING:
    from penstock.models.modules import OpModule
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan
    from penstock.runtime.parallel.held import Held
    from penstock.runtime.parallel.stage import StageModule
    from penstock.runtime.rank import Rank

__all__ = [
    "PieceSource",
    "TrainedState",
    "adopt_state",
    "check_state",
    "checkpoint_state",
    "gradient_pieces",
    "held_pieces",
    "load_rank",
    "load_state",
    "load_weights",
    "rank_pieces",
    "rank_state",
    "require_same_training",
]

_OWN = (WEIGHTS, BUFFERS)


class PieceSource(Protocol):
    """A checkpoint, or a Hugging Face folder, from which weights are read."""

    def load(self, pieces: Iterable[TensorPiece]) -> None:
        """Fills the pieces' tensors."""


def rank_pieces(rank: Rank) -> Iterator[TensorPiece]:
    """This rank's part of a checkpoint: views of its tensors, valid until its next step."""
    known: dict[Any, Any] = {}
    optimizer = rank.update.optimizer
    for number, stage in rank.stages.items():
        for held in _saved_here(rank, stage, number):
            layout = parameter_layout(held.module, held.name, known=known)
            state = optimizer.state(held.parameter) if held.parameter.requires_grad else {}
            yield from _pieces(layout, held, state.pop(MASTER, held.parameter.detach()))
            for kind, value in state.items():
                if value.dim():
                    yield from _pieces(layout, held, value, kind)
                elif not held.start:  # a number that is kept for a weight as a whole (the count of its steps) is no part of it
                    yield from whole_layout(layout.name, ()).pieces(value, kind)
        for piece, module in _modules(stage):
            if module.tp.rank == 0 and holders_of(stage, piece)[0] == rank.world.rank:
                yield from _buffers(module)


def held_pieces(rank: Rank) -> Iterator[TensorPiece]:
    """All that this rank holds, whoever else holds it too, as views that are valid until its next step: masters under the names of their
    weights and before these, so that whoever takes the first piece of a name takes the exact one."""
    known: dict[Any, Any] = {}
    for stage, own in zip(rank.stages.values(), rank.gradients.values(), strict=True):
        for held in own.updated_here():
            layout = parameter_layout(held.module, held.name, known=known)
            for kind, value in rank.update.optimizer.state(held.parameter).items():
                if value.dim() or kind == MASTER:
                    yield from _pieces(layout, held, value, WEIGHTS if kind == MASTER else kind)
                else:
                    yield from whole_layout(layout.name, ()).pieces(value, kind)
        for held in own.kept() if stage.stage.zero == 3 else stage.held:  # ZeRO-2 has the whole weights beside the parts that it updates
            yield from _pieces(parameter_layout(held.module, held.name, known=known), held, held.parameter.detach())
        for _, module in _modules(stage):
            yield from _buffers(module)


def gradient_pieces(rank: Rank, gradients: Mapping[int, torch.Tensor], kind: str) -> Iterator[TensorPiece]:
    """Gradients of weights that this rank updates, by the ids of these."""
    known: dict[Any, Any] = {}
    for own in rank.gradients.values():
        for held in own.updated_here():
            if id(held.parameter) in gradients:
                yield from _pieces(parameter_layout(held.module, held.name, known=known), held, gradients[id(held.parameter)], kind)


def _pieces(layout: CheckpointLayout, held: Held, tensor: torch.Tensor, kind: str = "") -> Iterator[TensorPiece]:
    """The piece of a weight's checkpoint tensor that is held here: the whole of it, or a flat part."""
    return layout.pieces(tensor, kind) if held.start is None else layout.flat_pieces(tensor, held.start, kind)


def _saved_here(rank: Rank, stage: StageModule, number: int) -> Iterator[Held]:
    """The weights that this rank saves: its own of ZeRO-1, and its share of what several ranks hold alike."""
    own = rank.gradients[number]
    groups = own.saved_with()
    for piece in range(len(stage.pieces)):
        frozen = [held for held in own.kept() if held.piece == piece and not held.parameter.requires_grad]
        groups.append((frozen, holders_of(stage, piece) if stage.weights is None else (rank.world.rank,)))
    copies = stage.borrowed()
    for group, ranks in groups:
        if rank.world.rank in ranks:
            for index in own_share([held.parameter.nbytes for held in group], ranks.index(rank.world.rank), len(ranks)):
                held = group[index]
                repeated = not held.divided and held.module.tp.rank > 0
                if held.stored_name not in copies and not repeated:
                    yield held


def _modules(stage: StageModule) -> Iterator[tuple[int, OpModule]]:
    for number, piece in enumerate(stage.pieces):
        for module in piece.chain.ops:
            yield number, module


def _buffers(module: OpModule) -> Iterator[TensorPiece]:
    for name, buffer in module.named_buffers(recurse=False):
        stored = stored_name(PlacedOp(0, module.name, "", module.op), name)
        yield from whole_layout(stored, buffer.shape, BUFFERS).pieces(buffer)


def rank_state(rank: Rank) -> dict[str, Any]:
    """The part of a checkpoint that is no tensor: model, seed, optimizer, precision, loss scale. A run adds its data position."""
    scale = rank.update.scale
    return {
        "model": rank.plan.model if isinstance(rank.plan.model, str) else dict(rank.plan.model),
        "seed": rank.settings.seed,
        "optimizer": rank.settings.optimizer.kind,
        "precision": rank.plan.precision,
        "loss_scale": None if scale is None else asdict(scale),
    }


@dataclass(frozen=True)
class TrainedState:
    """All that a rank needs to go on from where training is, by the names and boxes of checkpoints: out of one (`checkpoint_state`), or
    out of the memory of those who have it (`PiecesInMemory`)."""

    source: PieceSource
    """Asked for every piece that the rank needs, before it trains again. Weights are asked for in fp32 where the optimizer has masters."""
    kinds: tuple[str, ...]
    """What the optimizer keeps for each weight: `exp_avg` …; nothing before the first step."""
    scalars: frozenset[str] = frozenset()
    """Those kinds that are one number, and not of the weight's shape: `step`."""
    loss_scale: Mapping[str, Any] | None = None


def checkpoint_state(checkpoint: Checkpoint, model: Model, optimizer: str) -> TrainedState:
    """The state in a checkpoint; refused if it is of another model or optimizer."""
    kinds, scalars = check_state(checkpoint, model, optimizer)
    return TrainedState(checkpoint, kinds, frozenset(scalars), checkpoint.state.get("loss_scale"))


def load_rank(checkpoint: Checkpoint, rank: Rank) -> None:
    """Sets this rank's weights, statistics and optimizer state from a checkpoint."""
    load_state(checkpoint_state(checkpoint, rank.model, rank.settings.optimizer.kind), rank)


@torch.no_grad()
def load_state(state: TrainedState, rank: Rank) -> None:
    """Sets this rank's weights, statistics, optimizer state and loss scale."""
    _load(state.source, rank, state.kinds, state.scalars)
    if rank.update.scale is not None and state.loss_scale is not None:
        for name, value in state.loss_scale.items():
            setattr(rank.update.scale, name, value)


def adopt_state(rank: Rank, plan: Plan, state: TrainedState, members: Sequence[int] | None = None) -> None:
    """Puts `plan` in force with a state that is known already; a step that is under way is abandoned, and ops that stay keep their modules.

    Every process of the job calls it, also one to which either plan gives nothing, or every one of the `members` that go on. To the bit
    what a new process under `plan` would do with the same state.
    """
    require_same_training(rank.plan, plan)
    rank.adopt(plan, keep=True, members=members)
    if rank.world.rank >= 0:
        load_state(state, rank)


def require_same_training(old: Plan, new: Plan) -> None:
    """Refuses a plan that cannot go on with what another has learned."""
    if (new.model, new.precision) != (old.model, old.precision):
        raise InputError(f"a plan of model '{new.model}' in {new.precision} cannot go on with what one of '{old.model}' in "
                         f"{old.precision} has learned. Use plans of one model and precision.")  # fmt: skip


@torch.no_grad()
def load_weights(source: PieceSource, rank: Rank) -> None:
    """Sets this rank's weights and statistics from anything that can fill pieces of them; the optimizer starts anew."""
    _load(source, rank, (), frozenset())


def _load(source: PieceSource, rank: Rank, kinds: tuple[str, ...], scalars: frozenset[str]) -> None:
    known: dict[Any, Any] = {}
    for number, stage in rank.stages.items():
        own = rank.gradients[number]
        updated = {id(held.parameter) for held in own.updated_here()}
        for held in own.kept():
            layout = parameter_layout(held.module, held.name, known=known)
            if id(held.parameter) in updated:
                rank.update.optimizer.load_state(held.parameter, _state(source, held, layout, kinds, scalars))
            else:
                source.load(_pieces(layout, held, held.parameter.detach()))
        own.share_loaded()
        for _, module in _modules(stage):
            source.load(_buffers(module))


def check_state(checkpoint: Checkpoint, model: Model, now: str) -> tuple[tuple[str, ...], set[str]]:
    """Refuses a checkpoint of another model or another optimizer than `now`; the kinds of its optimizer's state, and which are scalars."""
    found = optimizer_kinds((name, tensor.shape) for name, tensor in checkpoint.manifest.tensors.items())
    kinds, scalars = tuple(found), {kind for kind, is_number in found.items() if is_number}
    before = checkpoint.state.get("optimizer")
    if kinds and before != now:
        raise InputError(
            f"checkpoint '{checkpoint.path}' has the optimizer state of {before}, but {now} is asked for. "
            f"Train with {before}, or take the weights alone with --weights in place of --resume."
        )
    expected = stored_shapes(model, (WEIGHTS, *(kind for kind in kinds if kind not in scalars)), sorted(scalars))
    checkpoint.check(expected, kinds=(*_OWN, *kinds))
    return kinds, scalars


def _state(
    source: PieceSource, held: Held, layout: CheckpointLayout, kinds: tuple[str, ...], scalars: frozenset[str]
) -> dict[str, torch.Tensor]:
    """The optimizer's state of one weight (master, moments, step count), in the shape in which this rank keeps it."""
    device = held.parameter.device
    shape = held.parameter.shape
    state = {MASTER: torch.empty(shape, device=device)}
    source.load(_pieces(layout, held, state[MASTER]))
    for kind in kinds:
        state[kind] = torch.empty(() if kind in scalars else shape, device=device)
        one = whole_layout(layout.name, ()).pieces(state[kind], kind) if kind in scalars else _pieces(layout, held, state[kind], kind)
        source.load(one)
    return state
