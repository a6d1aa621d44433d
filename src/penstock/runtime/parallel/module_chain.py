"""Somebody's module on a rank: stands where a chain of our own ops does, and holds the weights of this rank's units alone.

    process     one module, whose weights are on torch's meta device but for those of the rank's units
    chain       units [first, last) of it: a pass of a stage, or of one unit under ZeRO-2 and 3
    carry       tensors at the sites that cross the cut, laid flat as the description says
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from penstock.errors import InputError, plural
from penstock.models.modules.attention import cudnn_attention
from penstock.models.modules.base import Carry
from penstock.models.modules.build import TORCH_DTYPES
from penstock.models.modules.cutting.chain import Site
from penstock.models.modules.cutting.dividing import Division, Styles
from penstock.models.modules.cutting.origins import Made, make_origin
from penstock.models.modules.cutting.packing import Keeper, SeenDropout, has_dropout, kept
from penstock.models.modules.cutting.seen import SeenMicroBatch, seen
from penstock.models.modules.cutting.skipping import Skipping
from penstock.models.modules.cutting.weights import WeightTable
from penstock.models.modules.parallel import TensorParallel
from penstock.models.modules.unit import UnitOp
from penstock.models.ops import Model, PlacedOp, TensorSpec
from penstock.runtime.transport.slices import DTYPES

if TYPE_CHECKING:
    from penstock.models.modules.base import OpModule
    from penstock.models.modules.batch import Batch

__all__ = ["CutModule", "ModuleChain", "cut_module", "described_styles"]


def cut_module(model: Model, device: torch.device, seed: int) -> CutModule | None:
    """The module that a traced description was made of; None for models of ours."""
    origin = model.config.get("origin")
    if not any(place.op.kind == "traced" for place in model.ops[:1]):
        return None
    if not origin:
        raise InputError(f"model '{model.name}' was traced from a module that its description does not name. Import it again.")
    return CutModule(model, make_origin(str(origin), seed=seed), device)


class CutModule:
    """A module whose units are the ops of `model`; one for a process, whatever its stages."""

    def __init__(self, model: Model, made: Made, device: torch.device) -> None:
        self.model, self.made, self.device = model, made, device
        self.dtype = TORCH_DTYPES[model.dtype]
        self.module = made.module.train()
        for p in self.module.parameters():  # before shapes of skipped units are learnt, and dtypes with them
            p.data = p.data.to(self.dtype) if p.is_floating_point() else p.data
        parts = dict(self.module.named_modules())
        styles = {path: style for path, style in described_styles(model).items() if path in parts}  # of another module: told below
        self.division = Division(self.module, styles)  # before units are skipped: some divided parts are units
        self.skipping = Skipping(self.module)
        with SeenDropout() as seen_dropout:
            self.skipping.trace(lambda module: made.loss(module, self._tiny()))
        self.drops = has_dropout(self.module) or seen_dropout.drops
        self._table = WeightTable(self.skipping)
        self._require_same()
        for p in self.module.parameters():
            if id(p) in self._table.unused:  # plain torch would leave it as it is too, where an optimizer decays all that it has
                p.requires_grad_(False)
        self._stores: dict[int, list[tuple[dict[str, Any], str]]] = defaultdict(list)
        """Where the module has each weight, by id."""
        for part in self.module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    self._stores[id(p)].append((part._parameters, name))
            for name, b in part._buffers.items():
                if b is not None:
                    part._buffers[name] = b.to(device)

    def _tiny(self) -> SeenMicroBatch:
        """A micro-batch to find the order of calls with, as `seen` would give it: images in the dtype of the weights."""
        micro = self.made.tiny()
        micro.ids = micro.ids.to(self.dtype) if micro.ids.is_floating_point() else micro.ids
        return micro

    def _require_same(self) -> None:
        """Refuses a module that has changed since its plan was made: its weights would be zeros of other shapes."""
        ours, its = tuple(place.name for place in self.model.ops), tuple(_numbered(self.skipping.calls))
        if ours != its:
            first = next((pair for pair in zip(ours, its, strict=False) if pair[0] != pair[1]), (plural(len(ours), "part"), f"{len(its)}"))
            raise InputError(
                f"the plan is of another module: it has '{first[0]}' where {self.made.name} has '{first[1]}'. Search for a plan again; of "
                "a module that calls other parts for other lengths there is none."
            )
        for index, place in enumerate(self.model.ops):
            planned, found = ({name: tuple(shape) for name, shape in one.get("weights", {}).items()}
                              for one in (place.op.config, self._table.config(index)))  # fmt: skip
            for name in planned | found:
                if planned.get(name) != found.get(name):
                    raise InputError(
                        f"the plan is of another module: in '{place.name}' its weight '{name}' is {_sizes(planned.get(name))}, and "
                        f"{_sizes(found.get(name))} in {self.made.name}. Search for a plan again."
                    )

    def compile(self) -> None:
        """Units run compiled, if nobody has to make their torch calls for them."""
        packed = "packed" in self.model.layouts and not self.made.stays_inside
        if self.drops or packed:
            why = "it has dropout, which is drawn by sample" if self.drops else "its attention is kept inside samples from outside"
            raise InputError(f"{self.made.name} cannot be compiled: {why}. Leave compile out.")
        self.skipping.compile()

    def hold(self, ops: Mapping[int, TensorParallel], *, filled: bool = False) -> None:
        """Has the weights of these ops here, divided so, and no others. Those that come anew have their first values, unless they are
        `filled` afterwards."""
        table = self._table
        self.division.tps.clear()
        wanted: dict[int, tuple[UnitOp, str]] = {}
        for index, tp in ops.items():
            op = UnitOp(self.model.ops[index].op, self.model.ops[index].name, tp)
            wanted |= {id(p): (op, name) for name, p in table.ops[index].items()}
            self.division.tps |= {_inside(self.skipping.calls[index], part): tp for part in op.config.get("tp", {})}
        weights = [place.op.config["weights"] for place in self.model.ops]
        shapes = {id(p): (p, weights[index][name]) for index, own in enumerate(table.ops) for name, p in own.items()}
        for p, whole in shapes.values():
            if id(p) in wanted:
                self._hold(p, torch.empty(whole, device="meta"), *wanted[id(p)], filled)
            elif not p.is_meta:
                self._replace(p, torch.empty(whole, dtype=p.dtype, device="meta"))

    def _hold(self, p: nn.Parameter, whole: torch.Tensor, op: UnitOp, name: str, filled: bool) -> None:
        shard = op.shards[name] or (lambda x: x)
        dtype, shape = self.dtype if p.is_floating_point() else p.dtype, shard(whole).shape
        if (p.device, p.dtype, p.shape) == (self.device, dtype, shape):
            return
        made_here = p.shape == whole.shape and not filled
        values = shard(self.made.values(self._table.home[id(p)], p)) if made_here else torch.zeros(shape)
        self._replace(p, (values if shape == whole.shape else values.clone()).to(self.device, dtype))

    def _replace(self, old: nn.Parameter, values: torch.Tensor) -> None:
        """Puts another tensor in place of a weight, wherever the module has it."""
        trained = old.requires_grad and id(old) not in self._table.unused
        new = nn.Parameter(values, requires_grad=trained)
        for hook in (old._backward_hooks or {}).values() if trained else ():
            if new.shape != old.shape:
                raise InputError(
                    f"weight '{self._table.home[id(old)]}' of {self.made.name} has a hook on its gradient, of which each rank of this plan "
                    "would have a part. Allow no tensor parallelism, or leave the part out of the tp_plan."
                )
            new.register_hook(hook)
        stores = self._stores.pop(id(old))
        for store, name in stores:
            store[name] = new
        self._stores[id(new)] = stores
        self._table.replace(old, new)

    def op(self, place: PlacedOp, tp: TensorParallel) -> UnitOp:
        """A unit's weights and buffers, as they are here."""
        made = UnitOp(place.op, place.name, tp)
        kept = place.op.config.get("buffers", {})
        made.bind(self._table.ops[place.index], {name: b for name, b in self._table.buffers(place.index).items() if name in kept})
        return made

    def chain(self, ops: Sequence[OpModule], places: Sequence[PlacedOp]) -> ModuleChain:
        """Units of a pass."""
        return ModuleChain(self, ops, places)

    def carried(self, before: int) -> list[tuple[TensorSpec, Site]]:
        """The carry that crosses the cut before an op."""
        specs = self.model.carry_before(before)
        return list(zip(specs, self.skipping.cuts[before - 1].sites, strict=True)) if 0 < before < self.model.num_ops else []


class ModuleChain(nn.Module):
    """A run of a module's units on this rank; used as `Chain` is."""

    def __init__(self, cut: CutModule, ops: Sequence[OpModule], places: Sequence[PlacedOp]) -> None:
        super().__init__()
        self.ops = nn.ModuleList(ops)
        self.places = tuple(places)
        self.first, self.last = places[0].index, places[-1].index + 1
        self.__dict__["cut"] = cut  # no part of it: its weights are those of other chains too
        self._hits: torch.Tensor | None = None

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of its units, each once."""
        return iter({id(p): p for op in self.ops for _, p in op.named_parameters()}.values())

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The buffers of its units that checkpoints keep."""
        return (b for op in self.ops for b in op.buffers())

    def forward(self, batch: Batch, carry: Carry | None = None, recompute: Collection[int] = ()) -> Carry:
        """Runs its units; the carry after the last one, or the loss."""
        cut: CutModule = self.cut
        if cut.module.training != batch.training:
            cut.module.train(batch.training)
        micro = seen(batch, cut.dtype)
        into = {site: (carry or {})[spec.name] for spec, site in cut.carried(self.first)}
        lies_packed = len(micro.bounds) > 1 and not cut.made.stays_inside
        through = Keeper(micro) if lies_packed or (cut.drops and batch.training) else None
        with kept(micro), cudnn_attention(batch.repeats):
            out = cut.skipping.run(
                lambda module: cut.made.loss(module, micro), self.first, self.last, into, {self.first + at for at in recompute},
                cut.device, through,
            )  # fmt: skip
        self._hits = micro.hits
        if isinstance(out, torch.Tensor):
            return {"loss": out.float()}
        shape = batch.shape
        return {spec.name: _laid(out[site], spec.shape(shape), DTYPES[_dtype(spec, cut.model)]) for spec, site in cut.carried(self.last)}

    def take_hits(self) -> torch.Tensor:
        """(labels that were the most likely ones, labels that count) of the pass before, which was no training."""
        found, self._hits = self._hits, None
        return torch.zeros(2, device=self.cut.device) if found is None else found


def _inside(path: str, part: str) -> str:
    """The path of a unit's part in the module."""
    return f"{path}.{part}" if path and part else path or part


def _sizes(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else " × ".join(map(str, shape)) or "a number"


def described_styles(model: Model) -> Styles:
    """The tensor-parallel styles by which a model's description divides parts of its module."""
    return {
        _inside("" if place.name == "module" else place.name.partition("#")[0], part): style
        for place in model.ops
        for part, style in place.op.config.get("tp", {}).items()
    }


def _dtype(spec: TensorSpec, model: Model) -> str:
    return model.dtype if spec.dtype == "compute" else spec.dtype


def _laid(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor as it travels; where the description cannot tell its size exactly, with zeros behind it."""
    size = torch.Size(shape).numel()
    flat = x.to(dtype).reshape(-1)
    if flat.numel() > size:
        raise InputError(f"a tensor of shape {tuple(x.shape)} is to cross a cut where the description has {shape}. Trace the module again.")
    return (flat if flat.numel() == size else torch.cat([flat, flat.new_zeros(size - flat.numel())])).view(shape)


def _numbered(calls: Iterable[str]) -> Iterator[str]:
    """Names of ops: the second call of a unit is `unit#2`."""
    seen_so_far: dict[str, int] = defaultdict(int)
    for path in calls:
        seen_so_far[path] += 1
        yield f"{path}#{seen_so_far[path]}" if seen_so_far[path] > 1 else path or "module"
