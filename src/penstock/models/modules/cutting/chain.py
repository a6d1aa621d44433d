"""A module as a chain of units: the order of their calls, what crosses between them, and the weights of the code that calls them.

    units    embed    layers.0 … layers.n    norm    head       each is called as a whole, and can be answered for: see `answer`
    glue     code of the module itself between those calls      may use weights of its own, and of units too
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.models.modules.cutting.absent import absent
from penstock.models.modules.cutting.buffers import ChangingBuffers
from penstock.models.modules.cutting.shapes import UnitShapes
from penstock.models.modules.cutting.units import kind_of, units_of

__all__ = ["Call", "CarryAt", "GlueBuffer", "GlueWeight", "Owned", "Site", "UnitChain"]

Call = Callable[[nn.Module], Any]
"""Runs a module on one micro-batch, and may go on with what it returns (a loss)."""
Answer = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""What a call of a unit returns: the unit, its own forward pass, arguments, named arguments."""


class Site(NamedTuple):
    """Where a tensor is made."""

    begun: int
    """How many units were called before."""
    kind: str
    """`out`: by the last of them. `glue`: by the code after it."""
    number: int
    """Which of its outputs, or of the torch calls of that code on what units gave."""


@dataclass(frozen=True)
class CarryAt:
    """What crosses the cut before a call."""

    sites: tuple[Site, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]


class Owned(NamedTuple):
    """A weight or buffer by its place in the module: the tensor there is another one now and then, on meta, absent or fake."""

    name: str
    owner: nn.Module
    attribute: str


@dataclass(frozen=True)
class GlueWeight:
    """A weight that code between units uses itself."""

    name: str
    owner: nn.Module
    attribute: str
    calls: frozenset[int]
    """The calls after which it is used; what is used before the first counts with it."""


@dataclass(frozen=True)
class GlueBuffer:
    """A buffer of no unit that is part of the module's state, as BART's `final_logits_bias` is."""

    name: str
    owner: nn.Module
    attribute: str
    call: int
    """The call after which it is used first; what is used before the first, or never, counts with that."""

    def tensor(self) -> torch.Tensor:
        """As the module has it now."""
        found = self.owner._buffers[self.attribute]
        assert found is not None
        return found


class UnitChain:
    """A module whose units ask `answer` what to return. Calls, cuts and what the glue uses are empty until a pass has found them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.units = dict(units_of(module))
        """By their paths."""
        self.calls: tuple[str, ...] = ()
        """Paths of the units in the order in which they are called."""
        self.cuts: tuple[CarryAt, ...] = ()
        """What crosses before call 1, 2, …"""
        self.glue_weights: tuple[GlueWeight, ...] = ()
        self.glue_buffers: tuple[GlueBuffer, ...] = ()
        self.has_functions = False
        """Whether the glue calls functions with a backward pass of their own."""
        self.weights = list(_state_of(module, "_parameters"))
        self.glue_candidates = self.weights_outside_units()
        """Weights that the glue may use: of no unit, and those that are lent."""
        self.lent: list[Owned] = []
        """Weights of units that the glue uses too."""
        self.answer: Answer | None = None
        """Gives what a unit returns, as the pass that is under way decides; without one units run as they are."""
        self.path_of = {id(unit): path for path, unit in self.units.items()}
        """By the id of a unit."""
        kinds: dict[Any, UnitShapes] = {}
        self.shapes_of = {id(unit): kinds.setdefault(kind_of(unit), UnitShapes()) for unit in self.units.values()}
        """By the id of a unit; units of one kind share what is learnt."""
        self.buffers_of = {path: ChangingBuffers(unit) for path, unit in self.units.items()}
        self.in_place_of: dict[str, Callable[..., Any]] = {}
        """What runs in place of units' own forward passes, by path: compiled ones, or such as are timed."""
        self._before = [(unit, unit.__dict__.get("forward")) for unit in self.units.values()]
        self.plain = {path: unit.forward for path, unit in self.units.items()}
        """Units' own forward passes, by path."""
        for unit in self.units.values():
            unit.forward = self._wrapped(unit, unit.forward)  # type: ignore[method-assign]

    def _wrapped(self, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            answer = self.answer
            return forward(*args, **kwargs) if answer is None else answer(unit, forward, args, kwargs)

        return wrapped

    def close(self) -> None:
        """Gives the module back as it was."""
        for unit, before in self._before:
            del unit.__dict__["forward"]
            if before is not None:
                unit.__dict__["forward"] = before

    def compile(self) -> None:
        """Units run compiled from now on, for any length, where that spares anything: a lookup is one kernel as it is."""
        plain = ((path, unit) for path, unit in self.units.items() if not isinstance(unit, nn.Embedding))
        self.in_place_of = {path: torch.compile(self.plain[path], dynamic=True) for path, _ in plain}

    def tell_apart(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Makes a unit a kind of its own that returns something else than others that look like it: what is chosen by an attribute is not
        seen from outside."""
        if not self.shapes_of[id(unit)].are_those_of(unit, forward, args, kwargs):
            self.shapes_of[id(unit)] = UnitShapes()

    def weights_outside_units(self) -> list[Owned]:
        """Weights that no unit has."""
        inside = {id(p) for unit in self.units.values() for p in unit.parameters()}
        return [one for one in self.weights if id(one.owner._parameters[one.attribute]) not in inside]

    def buffers_outside_units(self) -> list[Owned]:
        """Buffers of no unit that are part of the module's state."""
        inside = {id(part) for unit in self.units.values() for part in unit.modules()}
        found = (one for one in _state_of(self.module, "_buffers") if id(one.owner) not in inside)
        return [one for one in found if one.attribute not in one.owner._non_persistent_buffers_set]

    def names_lent(self, first: int, last: int) -> set[str]:
        """Of the weights that are lent, those that units called in [first, last) have."""
        if not self.lent:
            return set()
        inside = {id(part) for path in self.calls[first:last] for part in self.units[path].modules()}
        return {name for name, part, _ in self.lent if id(part) in inside}

    @contextmanager
    def stand_ins(self, here: Callable[[str], bool], device: torch.device) -> Iterator[dict[str, nn.Parameter]]:
        """Weights that the glue may use and that are not `here` are absent meanwhile."""
        saved, made = [], {}
        for name, part, attribute in self.glue_candidates:
            real = part._parameters[attribute]
            if real is not None and not here(name):
                saved.append((part, attribute, real))
                made[name] = nn.Parameter(absent(real.shape, real.dtype, device), requires_grad=False)
                part._parameters[attribute] = made[name]
        try:
            yield made
        finally:
            for part, attribute, real in saved:
                part._parameters[attribute] = real

    @contextmanager
    def without_backward_hooks(self) -> Iterator[dict[int, tuple[Any, Any]]]:
        """Calls of units set no backward hooks meanwhile: gradients meet those where a unit runs, and nowhere else. What the hooks are, by
        the id of a unit."""
        hooked = [unit for unit in self.units.values() if unit._backward_hooks or unit._backward_pre_hooks]
        before = {id(unit): (unit._backward_hooks, unit._backward_pre_hooks) for unit in hooked}
        for unit in hooked:
            unit._backward_hooks, unit._backward_pre_hooks = OrderedDict(), OrderedDict()
        try:
            yield before
        finally:
            for unit in hooked:
                unit._backward_hooks, unit._backward_pre_hooks = before[id(unit)]


def _state_of(module: nn.Module, store: str) -> Iterator[Owned]:
    """What all parts have in their `_parameters` or `_buffers`."""
    return (
        Owned(f"{path}.{name}" if path else name, part, name)
        for path, part in module.named_modules()
        for name, x in getattr(part, store).items()
        if x is not None
    )
