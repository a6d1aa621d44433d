"""What each rank holds under a plan between two steps: weights, masters, moments, step counts and buffers, as boxes of global tensors.

    who                              weights            masters, moments, step counts
    ZeRO-0                           whole tp part      whole tp part
    ZeRO-1, owner of the op          whole tp part      whole tp part
    ZeRO-1, not its owner            whole tp part      none
    ZeRO-2                           whole tp part      a flat part
    ZeRO-3                           a flat part        a flat part

The layouts are those by which checkpoints are written and read (`runtime.checkpoints.layout`). Owners and flat parts follow from the plan
alone (`plans.ranks`), so that a rank that resumes a plan and one that moves to it hold the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.adapting.boxes import Region, union
from penstock.models.modules import build_op
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model, PlacedOp
from penstock.models.stored import is_trained, shared_weights, stored_name
from penstock.plans.degrees import Axis, DegreeRun, parts_of
from penstock.plans.plan import Plan, Stage
from penstock.plans.ranks import flat_part, holders, seats_of, state_owners
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, CheckpointLayout, parameter_layout, whole_layout
from penstock.runtime.optimizing.optimizer import MASTER

__all__ = ["MASTER", "STATE", "STEPS", "HeldTensor", "Holdings", "Layouts", "Sizes", "holdings"]

STATE, STEPS = "state", "steps"
"""What an optimizer keeps in a weight's shape, and as one number for a weight; beside `WEIGHTS` and `BUFFERS`."""

_MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "lamb": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_SCALARS = {"adamw": ("step",), "lamb": ("step",), "sgd": ()}
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A global tensor, or several of one shape that lie alike, and which of it each rank holds."""

    group: str
    """`WEIGHTS`, `STATE`, `STEPS` or `BUFFERS`."""
    name: str
    """`op.parameter`, as in checkpoints."""
    shape: tuple[int, ...]
    regions: dict[int, Region] = field(default_factory=dict)


Holdings = dict[tuple[str, str], HeldTensor]
"""By group and name."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of an element of each kind of tensor, by group: what travels with a box."""

    kinds: Mapping[str, Mapping[str, int]]

    @staticmethod
    def of(plan: Plan) -> Sizes:
        """The sizes for a plan's precision and optimizer. Half-precision weights have fp32 masters; buffers are fp32."""
        own = TORCH_DTYPES[plan.precision].itemsize
        state = (*((MASTER,) if own < _FP32_BYTES else ()), *_MOMENTS[plan.optimizer])
        return Sizes({
            WEIGHTS: {WEIGHTS: own}, STATE: dict.fromkeys(state, _FP32_BYTES), BUFFERS: {BUFFERS: _FP32_BYTES},
            STEPS: dict.fromkeys(_SCALARS[plan.optimizer], _FP32_BYTES),
        })  # fmt: skip

    def element_bytes(self, group: str) -> int:
        """Bytes of one element of all kinds of a group together."""
        return sum(self.kinds[group].values())

    @property
    def has_masters(self) -> bool:
        """Whether a weight is its fp32 master rounded, so that it need not travel where that does."""
        return MASTER in self.kinds[STATE]


@dataclass(frozen=True, slots=True)
class _Own:
    """A parameter of an op as one tensor-parallel lane holds it."""

    layout: CheckpointLayout
    num_elements: int
    trained: bool


class Layouts:
    """The layouts of a model's ops, asked of their modules on torch's meta device and remembered by kind of op and lane."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._cuts: dict[tuple[str, int, int, int], tuple[dict[str, CheckpointLayout], dict[str, tuple[int, ...]]]] = {}
        self.shared = {op for ops in shared_weights(model).values() for op in ops}
        """Ops with a weight that others use too."""

    def parameters(self, place: PlacedOp, algo: int, lane: int, tp: int) -> Iterator[_Own]:
        """The weights of an op on one lane of `tp`."""
        for name, cut in self._cut(place, algo, lane, tp)[0].items():
            own = CheckpointLayout(stored_name(place, name), cut.shape, cut.runs)
            yield _Own(own, math.prod(cut.local_shape), is_trained(place.op, name))

    def buffers(self, place: PlacedOp) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(global name, shape) of each buffer of an op."""
        return ((stored_name(place, name), shape) for name, shape in self._cut(place, 0, 0, 1)[1].items())

    def _cut(self, place: PlacedOp, algo: int, lane: int, tp: int) -> tuple[dict[str, CheckpointLayout], dict[str, tuple[int, ...]]]:
        key = place.op.signature, algo, lane, tp
        if key not in self._cuts:
            module = build_op(PlacedOp(0, place.op.name, "", place.op), TensorParallel(lane, tp), algo, device="meta")
            parameters = {name: parameter_layout(module, name) for name in module.whole_shapes}
            self._cuts[key] = parameters, {name: tuple(buffer.shape) for name, buffer in module.named_buffers(recurse=False)}
        return self._cuts[key]


def holdings(plan: Plan, layouts: Layouts) -> Holdings:
    """The state that every rank of a plan holds; a rank that has several chunks of an interleaved schedule holds what any of them needs."""
    found: Holdings = {}
    lanes: dict[tuple[int, int], _Lane] = {}
    for rank, seats in seats_of(plan).items():
        for seat in seats:
            stage = plan.stages[seat.stage]
            if (seat.stage, seat.index) not in lanes:  # replicas share them, and to make one takes longer than to ask it
                lanes[seat.stage, seat.index] = _Lane(stage, seat.index, layouts)
            for group, name, shape, region in lanes[seat.stage, seat.index].held_by(rank):
                if region:  # small weights have fewer elements than ranks that divide them
                    held = found.setdefault((group, name), HeldTensor(group, name, shape))
                    held.regions[rank] = union(held.regions.get(rank, ()), region)
    return found


class _Lane:
    """The ranks that are at the same place of a stage in its replicas."""

    def __init__(self, stage: Stage, index: int, layouts: Layouts) -> None:
        self.stage, self.index, self.layouts = stage, index, layouts
        self._parts = [(part, holders(stage, part, index)) for part in parts_of(stage)]
        self._held = [list(self._parameters(part)) for part, _ in self._parts]
        self._owners = [self._state_owners(held, ranks) for held, (_, ranks) in zip(self._held, self._parts, strict=True)]

    def _parameters(self, part: DegreeRun) -> Iterator[tuple[PlacedOp, _Own]]:
        """The weights of a run of ops; one that several ops share has one name, and lies alike for all ops of a stage."""
        lane = part.degrees.coordinate(Axis.TP, self.index)
        for place in self.layouts.model.ops[part.first : part.last]:
            for own in self.layouts.parameters(place, self.stage.run_of(place.index).algo, lane, part.tp):
                yield place, own

    def _state_owners(self, held: list[tuple[PlacedOp, _Own]], ranks: tuple[int, ...]) -> dict[int, int]:
        if self.stage.zero != 1:
            return {}
        sizes: defaultdict[int, int] = defaultdict(int)
        for place, own in held:
            if own.trained and place.index not in self.layouts.shared:
                sizes[place.index] += own.num_elements
        return state_owners(sizes, ranks)

    def held_by(self, rank: int) -> Iterator[tuple[str, str, tuple[int, ...], Region]]:
        """(group, name, shape, region) of all that one of the lane's ranks holds."""
        for (part, ranks), held, owners in zip(self._parts, self._held, self._owners, strict=True):
            for place, own in held:
                layout, whole = own.layout, own.layout.boxes()
                flat = whole
                if self.stage.zero > 1:
                    start, stop = flat_part(own.num_elements, sorted(ranks).index(rank), len(ranks))
                    flat = layout.boxes(start, stop) if len(ranks) > 1 else whole
                yield WEIGHTS, layout.name, layout.shape, flat if self.stage.zero == 3 else whole
                if own.trained and flat and owners.get(place.index, rank) == rank:
                    yield STATE, layout.name, layout.shape, flat
                    yield STEPS, layout.name, (), whole_layout(layout.name, ()).boxes()
            for place in self.layouts.model.ops[part.first : part.last]:
                for name, shape in self.layouts.buffers(place):
                    yield BUFFERS, name, shape, whole_layout(name, shape).boxes()
