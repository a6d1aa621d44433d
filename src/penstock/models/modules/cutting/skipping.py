"""A module runs as it is, on every stage; calls of its units that other stages have are skipped.

    units      embed      layers.0 … layers.k-1    layers.k … layers.n    norm, head
    stage 1    skipped    skipped                  run                    not reached
    glue       code between units runs everywhere: on the micro-batch it makes real tensors (masks, rotary angles, positions), on what
               skipped units return it makes absent ones, which have a shape and no values

What crosses a cut are the absent tensors that are made before it and used after it. Each is known by its site: output j of call k, or the
n-th torch call of the glue after call k, not counting those on the micro-batch alone: masks are made in one way or another. One pass
with all units skipped finds the calls and every cut's sites, and takes milliseconds.
"""

from __future__ import annotations

import contextvars
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook, RemovableHandle

from penstock.errors import InputError
from penstock.models.modules.attention import cudnn_attention
from penstock.models.modules.cutting.absent import Absent, NeedsValues, absent, tensors_in
from penstock.models.modules.cutting.buffers import ChangingBuffers, Met
from penstock.models.modules.cutting.own_recomputation import Recomputed, left_out
from penstock.models.modules.cutting.shapes import PLAIN, UnitShapes
from penstock.models.modules.cutting.units import kind_of, units_of

__all__ = ["Call", "CarryAt", "GlueWeight", "Site", "Skipping", "Through"]

Call = Callable[[nn.Module], Any]
"""Runs a module on one micro-batch, and may go on with what it returns (a loss)."""


Answer = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]
"""What a call of a unit returns: the unit, its own forward pass, arguments, named arguments."""


Through = Callable[[Any, Any, Any, object], Any]
"""Makes a torch call (function, arguments, named arguments); the last is its number in the module, the same however that is cut."""


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
    """A weight or a buffer by the place where the module has it, as the tensor that stands there is another one now and then."""

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


class _Stop(BaseException):
    """The stage is done: the next unit is another's."""


class Skipping:
    """A module whose forward pass can be run in parts.

    >>> chain = Skipping(module)                      # doctest: +SKIP
    >>> chain.trace(call)
    >>> carry = chain.run(call, 0, 3, {})             # calls 0 to 2; what crosses the cut before call 3
    >>> loss = chain.run(call, 3, len(chain.calls), carry)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.units = dict(units_of(module))
        self.calls: tuple[str, ...] = ()
        """Paths of the units in the order in which they are called."""
        self.cuts: tuple[CarryAt, ...] = ()
        """What crosses before call 1, 2, …"""
        self.glue_weights: tuple[GlueWeight, ...] = ()
        self.glue_buffers: tuple[GlueBuffer, ...] = ()
        self.has_functions = False
        """Whether code between units calls functions with a backward pass of their own."""
        self.weights = [
            Owned(f"{path}.{name}" if path else name, part, name)
            for path, part in module.named_modules()
            for name, p in part._parameters.items()
            if p is not None
        ]
        self.glue_candidates = self.weights_outside_units()
        """Weights that code between units may use: of no unit, and those that are lent."""
        self.lent: list[Owned] = []
        """Weights of units that code between units uses too."""
        self.answer: Answer | None = None
        """The pass that is under way; without one units run as they are."""
        self._begun: list[str] = []
        self.path_of = {id(unit): path for path, unit in self.units.items()}
        """By the id of a unit."""
        kinds: dict[Any, UnitShapes] = {}
        self.shapes_of = {id(unit): kinds.setdefault(kind_of(unit), UnitShapes()) for unit in self.units.values()}
        """By the id of a unit; units of one kind share them."""
        self.buffers_of = {path: ChangingBuffers(unit) for path, unit in self.units.items()}
        self.in_place_of: dict[str, Callable[..., Any]] = {}
        """What runs in place of units' own forward passes, by path: compiled ones, or such as are timed."""
        self._before = [(unit, unit.__dict__.get("forward")) for unit in self.units.values()]
        self.plain = {path: unit.forward for path, unit in self.units.items()}
        for unit in self.units.values():
            unit.forward = self._wrapped(unit, unit.forward)  # type: ignore[method-assign]

    def tell_apart(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Makes a unit a kind of its own that returns something else than others that look like it: what is chosen by an attribute is not
        seen from outside."""
        if not self.shapes_of[id(unit)].are_those_of(unit, forward, args, kwargs):
            self.shapes_of[id(unit)] = UnitShapes()

    def compile(self) -> None:
        """Units run compiled from now on, for any length, where that spares anything: a lookup is one kernel as it is."""
        plain = ((path, unit) for path, unit in self.units.items() if not isinstance(unit, nn.Embedding))
        self.in_place_of = {path: torch.compile(self.plain[path], dynamic=True) for path, _ in plain}

    def close(self) -> None:
        """Gives the module back as it was."""
        for unit, before in self._before:
            del unit.__dict__["forward"]
            if before is not None:
                unit.__dict__["forward"] = before

    def weights_outside_units(self) -> list[Owned]:
        """Weights that no unit has."""
        inside = {id(p) for unit in self.units.values() for p in unit.parameters()}
        return [one for one in self.weights if id(one.owner._parameters[one.attribute]) not in inside]

    def buffers_outside_units(self) -> list[Owned]:
        """Buffers of no unit that are part of the module's state."""
        inside = {id(part) for unit in self.units.values() for part in unit.modules()}
        return [
            Owned(f"{path}.{name}" if path else name, part, name)
            for path, part in self.module.named_modules()
            for name, b in part._buffers.items()
            if b is not None and id(part) not in inside and name not in part._non_persistent_buffers_set
        ]

    def _wrapped(self, unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            answer = self.answer
            return forward(*args, **kwargs) if answer is None else answer(unit, forward, args, kwargs)

        return wrapped

    def trace(self, call: Call, device: torch.device | str = "cpu") -> None:
        """Finds the order of calls and what crosses each cut, with all units skipped."""
        self.glue_candidates = self.weights_outside_units()
        run = self._traced(call, device)
        if len(called := {path: unit for path, unit in self.units.items() if path in run.calls}) < len(self.units):
            # What is never called (a `ParameterList`, a head whose weight alone is used) is no unit: its weights are the glue's.
            self.units = called
            self.glue_candidates = self.weights_outside_units()
            run = self._traced(call, device)
        self.lent = [one for one in self.weights if one.name in run.used_after and one not in self.glue_candidates]
        if self.lent:  # what the glue makes of units' weights crosses cuts too; it may use them before their unit is called
            self.glue_candidates = [*self.glue_candidates, *self.lent]
            run = self._traced(call, device)
        self.calls, self.cuts = tuple(run.calls), tuple(run.cuts())
        self.glue_weights = tuple(
            GlueWeight(*one, frozenset(max(0, k) for k in run.used_after[one.name])) for one in self.weights if one.name in run.used_after
        )
        self.glue_buffers = tuple(
            GlueBuffer(*one, max(0, min(run.used_after.get(one.name, {0})))) for one in self.buffers_outside_units()
        )

    def _traced(self, call: Call, device: torch.device | str) -> _Trace:
        run = _Trace(self, torch.device(device))
        self._begun = run.calls
        run.go(call)
        return run

    def run(
        self, call: Call, first: int, last: int, carry: Mapping[Site, torch.Tensor], recompute: Collection[int] = (),
        device: torch.device | str = "cpu", through: Through | None = None,
    ) -> Any:  # fmt: skip
        """Runs calls [first, last). The tensors that cross the cut before `last`, by site; what `call` returns if that is the end.

        `carry` has the tensors that cross before `first`. Units in `recompute` run again in the backward pass in place of keeping what
        they need for it. `through` makes the module's torch calls in its place.
        """
        return _Part(self, first, last, carry, recompute, torch.device(device), through).go(call)

    def watch(self, call: Call, found: dict[Site, torch.Tensor]) -> Any:
        """Runs everything; `found` gets the tensors that cross any cut."""
        part = _Part(self, 0, len(self.calls), {}, (), torch.device("cpu"))
        part.take({site for cut in self.cuts for site in cut.sites})
        out = part.go(call)
        found |= part.got
        return out

    @property
    def last_begun(self) -> str | None:
        """The unit that was called last while the order of calls was found; None before the first."""
        return self._begun[-1] if self._begun else None

    def names_inside(self, first: int, last: int) -> set[str]:
        """Of the weights that code between units uses, those that units called in [first, last) have too."""
        if not self.lent:
            return set()
        inside = {id(part) for path in self.calls[first:last] for part in self.units[path].modules()}
        return {name for name, part, _ in self.lent if id(part) in inside}

    @contextmanager
    def stand_ins(self, here: Callable[[str], bool], device: torch.device) -> Iterator[dict[str, nn.Parameter]]:
        """Weights of the glue that are not `here` are absent meanwhile."""
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
        """Calls of units set no backward hooks meanwhile: gradients meet those where a unit runs, and nowhere else. What the hooks are."""
        hooked = [unit for unit in self.units.values() if unit._backward_hooks or unit._backward_pre_hooks]
        before = {id(unit): (unit._backward_hooks, unit._backward_pre_hooks) for unit in hooked}
        for unit in hooked:
            unit._backward_hooks, unit._backward_pre_hooks = OrderedDict(), OrderedDict()
        try:
            yield before
        finally:
            for unit in hooked:
                unit._backward_hooks, unit._backward_pre_hooks = before[id(unit)]


def _other_order(pair: tuple[str, str]) -> str:
    return f"'{pair[0]}' was called where '{pair[1]}' was: every micro-batch must call the same parts in the same order."


class _Entering(torch.autograd.Function):
    """A leaf as something computed, without a copy: the module may go on with it in place, as it may with what its own units return."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _asked(argument: Any) -> Any:
    """What decides the shapes that a unit returns, as far as it is seen at once."""
    return argument.shape if isinstance(argument, torch.Tensor) else argument if type(argument) in PLAIN else None


def _hooked_there(hook: Callable[..., Any]) -> RemovableHandle:
    """In place of `register_hook` where the stage that made a tensor has it: a gradient must not meet it on both."""
    return RemovableHandle(OrderedDict())


def _entering(given: torch.Tensor, site: torch.Tensor) -> torch.Tensor:
    """What crossed, perhaps laid flat and with something behind it, in the shape and dtype that it has here."""
    if given.requires_grad:
        given = _Entering.apply(given)
    if given.shape != site.shape:
        given = given.reshape(-1)[: site.numel()].view(site.shape)
    return given.to(site.dtype)


_FROM_UNIT = "_penstock_from_unit"
_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


def _in_function() -> bool:
    """Whether the forward pass of a `torch.autograd.Function` is what calls."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None


def _mark(tree: Any) -> None:
    """These tensors depend on what units gave, and what the glue makes of them does."""
    for x in tensors_in(tree):
        if not isinstance(x, Absent):
            setattr(x, _FROM_UNIT, True)


class _Glue(TorchFunctionMode):
    """Sees every torch call of the code between units. One mode for all that is watched: a stack of modes costs each call again."""

    def __init__(self, run: _Pass) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.run.quiet:
            return func(*args, **(kwargs or {}))
        out = self.run.called(func, args, kwargs or {})
        return self.run.glue((args, kwargs), out)


class _Inside(TorchFunctionMode):
    """Sees every torch call of a unit, where somebody else is to make them."""

    def __init__(self, through: Through, call: int) -> None:
        super().__init__()
        self.through, self.call, self.count = through, call, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return self.through(func, args, kwargs or {}, ("unit", self.call, self.count))


class _Pass:
    """One run of the module's forward pass."""

    def __init__(self, chain: Skipping, device: torch.device) -> None:
        self.chain, self.device = chain, device
        self.begun = 0
        """Units called so far."""
        self.count = 0
        """Tensors that torch calls of the glue since then made of what units gave."""
        self.quiet = 0
        """Above 0 what runs is not the module's own code between units."""

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Units ask this pass while it lasts."""
        before, self.chain.answer = self.chain.answer, self.unit
        try:
            with left_out():
                yield
        except NeedsValues as error:
            after = self.calls_so_far()
            where = f"after '{after[-1]}'" if after else "before the first part"
            raise NeedsValues(f"{error} {where}, which another stage may have. Move it into a block, or allow one stage.") from None
        finally:
            self.chain.answer = before

    def calls_so_far(self) -> tuple[str, ...]:
        return self.chain.calls[: self.begun]

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch call of the code between units."""
        return func(*args, **kwargs)

    def skipped(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.unwatched():
            return self.chain.shapes_of[id(unit)].outputs(unit, forward, args, kwargs, self.device)

    def unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called."""
        raise TypeError(f"{type(self).__name__} calls no units")

    def glue(self, given: Any, out: Any) -> Any:
        """Code between units has called torch."""
        raise TypeError(f"{type(self).__name__} has no code between units")


class _Trace(_Pass):
    """All units are skipped; where each absent tensor is made, and when it is used last."""

    def __init__(self, chain: Skipping, device: torch.device) -> None:
        super().__init__(chain, device)
        self.calls: list[str] = []
        self.site: dict[int, Site] = {}
        self.kept: list[Any] = []
        """Tensors stay alive, so that the id of one is not given to another."""
        self.made: dict[Site, torch.Tensor] = {}
        self.last_use: dict[Site, int] = {}
        """Moments: call k is 2k, the glue after it 2k + 1."""
        self.of_function: dict[int, set[Site]] = {}
        """What functions with a backward pass of their own return, and the sites that they made it of."""
        self.weights: dict[int, str] = {}
        self.used_after: dict[str, set[int]] = {}

    def go(self, call: Call) -> None:
        with self.chain.stand_ins(lambda name: False, self.device) as made, self.running():
            own = {id(part._parameters[attribute]): name for name, part, attribute in self.chain.weights}
            own |= {id(part._buffers[attribute]): name for name, part, attribute in self.chain.buffers_outside_units()}
            self.weights = own | {id(p): name for name, p in made.items()}
            with torch.no_grad(), _Glue(self):
                out = call(self.chain.module)
            self.use(out)

    def calls_so_far(self) -> tuple[str, ...]:
        return tuple(self.calls)

    def use(self, tree: Any, by_unit: bool = False, values: bool = True) -> None:
        """These tensors are used: their `values`, or what is known of them without."""
        when = 2 * self.begun if by_unit else 2 * self.begun - 1
        for x in tree_iter(tree):
            if id(x) in self.weights:
                if not values:
                    continue
                self.used_after.setdefault(self.weights[id(x)], set()).add(self.begun - 1)
            for site in self.sites_of(x):
                self.last_use[site] = when

    def sites_of(self, x: Any) -> Collection[Site]:
        return (self.site[id(x)],) if id(x) in self.site else self.of_function.get(id(x), ())

    def mark(self, out: Any, kind: str, number: int) -> None:
        for j, x in enumerate(tensors_in(out)):
            if isinstance(x, Absent) and id(x) not in self.weights:
                site = Site(self.begun, kind, number + j)
                self.kept.append(x)
                # In place: the same tensor is made anew here, and what was before is used no more.
                self.site[id(x)] = site
                self.made[site] = x

    def unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.unwatched():
            self.use((args, kwargs), by_unit=True)
            self.kept.append((args, kwargs))
        self.calls.append(self.chain.path_of[id(unit)])
        with self.unwatched():
            self.chain.tell_apart(unit, forward, args, kwargs)
        out = self.skipped(unit, forward, args, kwargs)
        self.begun, self.count = self.begun + 1, 0
        self.mark(out, "out", 0)
        return out

    def glue(self, given: Any, out: Any) -> Any:
        with self.unwatched():
            number = len(tensors_in(out))
            self.use(given, values=number > 0)
            if _in_function():
                # No gradient reaches what crosses in there: what it is given crosses, and it runs on both sides.
                self.chain.has_functions = True
                self.kept.append(out)
                sites = {site for x in tree_iter(given) for site in self.sites_of(x)}
                self.of_function |= {id(x): sites for x in tensors_in(out) if isinstance(x, Absent)}
            elif number and any(isinstance(x, Absent) for x in tree_iter(given)):
                self.mark(out, "glue", self.count)
                self.count += number
        return out

    def cuts(self) -> Iterator[CarryAt]:
        for k in range(1, len(self.calls)):
            sites = [site for site in self.made if site.begun <= k and self.last_use.get(site, -1) >= 2 * k]
            yield CarryAt(
                tuple(sites), tuple(tuple(self.made[site].shape) for site in sites), tuple(self.made[site].dtype for site in sites)
            )


class _Part(_Pass):
    """Units [first, last) run; those before are skipped, and the first after them ends the pass."""

    def __init__(
        self, chain: Skipping, first: int, last: int, carry: Mapping[Site, torch.Tensor], recompute: Collection[int], device: torch.device,
        through: Through | None = None,
    ) -> None:  # fmt: skip
        super().__init__(chain, device)
        self.through = through
        self.first, self.last, self.recompute = first, last, recompute
        self.into = carry
        self.same: dict[Any, Any] = {}
        """Of one pass, units of one kind that are given the same shape return the same."""
        self.entered = False
        """Whether something that other stages have made is here."""
        self.hooks: Mapping[int, tuple[Any, Any]] = {}
        """Of units on their gradients, by id."""
        self.deaf: list[Any] = []
        """What they have made, and have set the hooks of that the code before this stage's first unit sets."""
        self.take(chain.cuts[last - 1].sites if last < len(chain.calls) else ())

    def take(self, wanted: Collection[Site]) -> None:
        """Tensors at these sites are kept when they are made."""
        self.wanted = frozenset(wanted)
        self.got = {site: self.into[site] for site in wanted if site in self.into}
        self.watched = {site.begun for site in (*self.into, *wanted)}
        """Between which calls something is put in or taken out."""
        self.sees_glue = any(site.kind == "glue" for site in (*self.into, *wanted))

    def go(self, call: Call) -> Any:
        here = {weight.name for weight in self.chain.glue_weights if any(self.first <= k < self.last for k in weight.calls)}
        here |= self.chain.names_inside(self.first, self.last)
        watching: AbstractContextManager[Any] = _Glue(self) if self.sees_glue or self.through is not None else self.unwatched()
        with self.chain.stand_ins(here.__contains__, self.device), self.chain.without_backward_hooks() as self.hooks, self.running():
            try:
                with watching:
                    out = call(self.chain.module)
            except _Stop:
                if missing := self.wanted - self.got.keys():
                    raise InputError(f"nothing was made at {sorted(missing)}: a micro-batch must call what others call.") from None
                return {site: self.got[site] for site in self.chain.cuts[self.last - 1].sites}
        if self.begun < self.last:
            raise InputError(_other_order(("nothing", self.chain.calls[self.begun])))
        return out

    def unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        k, chain = self.begun, self.chain
        path = chain.path_of[id(unit)]
        expected = chain.calls[k] if k < len(chain.calls) else "nothing"
        if path != expected:
            raise InputError(_other_order((path, expected)))
        if k >= self.last:
            raise _Stop
        if k < self.first:
            out = self._skipped_once(unit, forward, args, kwargs)
        else:
            self._hear_again()
            if any(isinstance(x, Absent) for x in tree_iter((args, kwargs))):
                raise InputError(f"'{path}' is given an activation that did not cross the cut before '{chain.calls[self.first]}'.")
            with self.unwatched():
                around = BackwardHook(unit, *(list(own.values()) for own in self.hooks[id(unit)])) if id(unit) in self.hooks else None
                args = args if around is None else around.setup_input_hook(args)
                out = self._computed(k, chain.in_place_of.get(path, forward), args, kwargs)
                out = out if around is None else around.setup_output_hook(out)
                if self.sees_glue or self.through is not None:
                    _mark(out)
        self.begun, self.count = k + 1, 0
        if self.begun in self.watched:
            with self.unwatched():
                return self._exchanged(out, "out", 0)
        return out

    def _hear_again(self) -> None:
        """Code behind this stage's first unit is run by no stage before it, which would have set the same hooks."""
        for x in self.deaf:
            x.__dict__.pop("register_hook", None)
        self.deaf.clear()

    def _skipped_once(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = tuple(map(_asked, (*args, *kwargs.values())))
        key = (self.chain.shapes_of[id(unit)], given, len(args))
        if not any(isinstance(x, torch.Tensor) for x in args) or key not in self.same:
            self.same[key] = self.skipped(unit, forward, args, kwargs)
        return self.same[key]

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if self.through is None else self.through(func, args, kwargs, ("glue", self.begun, self.count))

    def _computed(self, k: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if (through := self.through) is not None:
            plain = forward

            def forward(*a: Any, **kw: Any) -> Any:
                with _Inside(through, k):
                    return plain(*a, **kw)

        if k not in self.recompute or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # It runs again between other micro-batches; what is ambient (which samples lie where, and which kernels run) must then be its own,
        # and so must running statistics.
        ambient, allowed = contextvars.copy_context(), torch.backends.cuda.cudnn_sdp_enabled()
        buffers, met = self.chain.buffers_of[self.chain.calls[k]], Met()

        def again(*a: Any, **kw: Any) -> Any:
            with cudnn_attention(allowed), buffers.run(met):
                return ambient.copy().run(forward, *a, **kw)

        return checkpoint(Recomputed(again), *args, use_reentrant=False, **kwargs)

    def _on_units(self, given: Any) -> bool:
        """Whether any of these tensors depends on weights."""
        loose = {id(part._parameters[name]) for _, part, name in self.chain.glue_candidates}  # a tracer may have put others there
        return any(isinstance(x, Absent) or hasattr(x, _FROM_UNIT) or id(x) in loose for x in tree_iter(given))

    def _exchanged(self, out: Any, kind: str, number: int) -> Any:
        """Puts in what came from other stages, and takes what goes to others."""
        leaves, spec = tree_flatten(out)
        j, changed = number, False
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                site = Site(self.begun, kind, j)
                j += 1
                if site in self.into:
                    leaves[i], changed, self.entered = _entering(self.into[site], x), True, True
                    self.deaf.append(leaves[i])
                    leaves[i].register_hook = _hooked_there
                    _mark(leaves[i])
                elif site in self.wanted:
                    self.got[site] = x
        return tree_unflatten(leaves, spec) if changed else out

    def glue(self, given: Any, out: Any) -> Any:
        if self.begun not in self.watched and self.through is None and self.begun < self.first and not self.entered:
            return out  # nobody asks how many calls there were, and what units gave is absent
        with self.unwatched():
            if (number := len(tensors_in(out))) and self._on_units(given):
                _mark(out)
                if self.chain.has_functions and _in_function():
                    return out
                if self.begun in self.watched:
                    out = self._exchanged(out, "glue", self.count)
                self.count += number
        return out
