"""The pass of one stage: units [first, last) run, those before are skipped, and the first call after them ends it.

    units before first    skipped: absent tensors, but for those that crossed the cut, which are put in where they would be made
    units of the stage    run, perhaps once more in the backward pass
    glue                  runs; what it or units make that crosses the next cut is taken out
"""

from __future__ import annotations

import contextvars
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import BackwardHook, RemovableHandle

from penstock.errors import InputError
from penstock.models.modules.attention import cudnn_attention
from penstock.models.modules.cutting.absent import Absent, tensors_in
from penstock.models.modules.cutting.buffers import Met
from penstock.models.modules.cutting.chain import Call, Site, UnitChain
from penstock.models.modules.cutting.own_recomputation import Recomputed
from penstock.models.modules.cutting.passes import GlueCalls, ModulePass, inside_function
from penstock.models.modules.cutting.shapes import PLAIN

__all__ = ["StagePass", "Through"]

Through = Callable[[Any, Any, Any, object], Any]
"""Makes a torch call (function, arguments, named arguments); the last is its number in the module, the same however that is cut."""
_FROM_UNIT = "_penstock_from_unit"


class _Stop(BaseException):
    """The stage is done: the next unit is another's."""


class StagePass(ModulePass):
    """Runs calls [first, last) of a chain on tensors that crossed the cut before `first`, see `Skipping.run`."""

    def __init__(
        self, chain: UnitChain, first: int, last: int, carry: Mapping[Site, torch.Tensor], recompute: Collection[int], device: torch.device,
        through: Through | None = None,
    ) -> None:  # fmt: skip
        super().__init__(chain, device)
        self._through = through
        self._first, self._last, self._recompute = first, last, recompute
        self._carry = carry
        self._skipped: dict[Any, Any] = {}
        """Of one pass, units of one kind that are given the same shape return the same."""
        self._has_entered = False
        """Whether something that other stages have made is here."""
        self._hooks: Mapping[int, tuple[Any, Any]] = {}
        """Of units on their gradients, by id."""
        self._hookless: list[Any] = []
        """What other stages have made, and have set the hooks of that the code before this stage's first unit sets."""
        self.take(chain.cuts[last - 1].sites if last < len(chain.calls) else ())

    def take(self, wanted: Collection[Site]) -> None:
        """Tensors at these sites are kept when they are made."""
        self._wanted = frozenset(wanted)
        self.taken = {site: self._carry[site] for site in wanted if site in self._carry}
        self._exchanging = {site.begun for site in (*self._carry, *wanted)}
        """After how many calls something is put in or taken out."""
        self._sees_glue = self._through is not None or any(site.kind == "glue" for site in (*self._carry, *wanted))

    def go(self, call: Call) -> Any:
        """What crosses the cut before `last`, by site; what `call` returns if that is the end."""
        chain = self.chain
        here = {weight.name for weight in chain.glue_weights if any(self._first <= k < self._last for k in weight.calls)}
        here |= chain.names_lent(self._first, self._last)
        watching: AbstractContextManager[Any] = GlueCalls(self) if self._sees_glue else self.unwatched()
        with chain.stand_ins(here.__contains__, self.device), chain.without_backward_hooks() as self._hooks, self.running():
            try:
                with watching:
                    out = call(chain.module)
            except _Stop:
                if missing := self._wanted - self.taken.keys():
                    raise InputError(f"nothing was made at {sorted(missing)}: a micro-batch must call what others call.") from None
                return {site: self.taken[site] for site in chain.cuts[self._last - 1].sites}
        if self.begun < self._last:
            raise InputError(_other_order("nothing", chain.calls[self.begun]))
        return out

    def on_unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Skips it or runs it; leaves the module where the stage is done."""
        k, chain = self.begun, self.chain
        path = chain.path_of[id(unit)]
        expected = chain.calls[k] if k < len(chain.calls) else "nothing"
        if path != expected:
            raise InputError(_other_order(path, expected))
        if k >= self._last:
            raise _Stop
        if k < self._first:
            out = self._skipped_once(unit, forward, args, kwargs)
        else:
            out = self._run(unit, chain.in_place_of.get(path, forward), args, kwargs)
        self.begun, self.count = k + 1, 0
        if self.begun in self._exchanging:
            with self.unwatched():
                return self._exchanged(out, "out", 0)
        return out

    def _skipped_once(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given = tuple(map(_asked, (*args, *kwargs.values())))
        key = (self.chain.shapes_of[id(unit)], given, len(args))
        if not any(isinstance(x, torch.Tensor) for x in args) or key not in self._skipped:
            self._skipped[key] = self.skipped(unit, forward, args, kwargs)
        return self._skipped[key]

    def _run(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # Code behind this stage's first unit is run by no stage before it, which would have set the same hooks.
        for x in self._hookless:
            x.__dict__.pop("register_hook", None)
        self._hookless.clear()
        calls = self.chain.calls
        if any(isinstance(x, Absent) for x in tree_iter((args, kwargs))):
            raise InputError(f"'{calls[self.begun]}' is given an activation that did not cross the cut before '{calls[self._first]}'.")
        with self.unwatched():
            hooks = self._hooks.get(id(unit))
            around = None if hooks is None else BackwardHook(unit, *(list(own.values()) for own in hooks))
            args = args if around is None else around.setup_input_hook(args)
            out = self._computed(forward, args, kwargs)
            out = out if around is None else around.setup_output_hook(out)
            if self._sees_glue:
                _mark(out)
        return out

    def _computed(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        k = self.begun
        if (through := self._through) is not None:
            plain = forward

            def forward(*a: Any, **kw: Any) -> Any:
                with _UnitCalls(through, k):
                    return plain(*a, **kw)

        if k not in self._recompute or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # It runs again between other micro-batches; what is ambient (which samples lie where, and which kernels run) must then be its own,
        # and so must running statistics.
        ambient, allowed = contextvars.copy_context(), torch.backends.cuda.cudnn_sdp_enabled()
        buffers, met = self.chain.buffers_of[self.chain.calls[k]], Met()

        def again(*a: Any, **kw: Any) -> Any:
            with cudnn_attention(allowed), buffers.run(met):
                return ambient.copy().run(forward, *a, **kw)

        return checkpoint(Recomputed(again), *args, use_reentrant=False, **kwargs)

    def call_torch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes a torch call of the glue, or has it made."""
        return func(*args, **kwargs) if self._through is None else self._through(func, args, kwargs, ("glue", self.begun, self.count))

    def on_glue(self, given: Any, out: Any) -> Any:
        """Counts what is made of what units gave, which is how its site is known."""
        if self.begun not in self._exchanging and self._through is None and self.begun < self._first and not self._has_entered:
            return out  # nobody asks how many calls there were, and what units gave is absent
        with self.unwatched():
            if (number := len(tensors_in(out))) and self._on_units(given):
                _mark(out)
                if self.chain.has_functions and inside_function():
                    return out
                if self.begun in self._exchanging:
                    out = self._exchanged(out, "glue", self.count)
                self.count += number
        return out

    def _on_units(self, given: Any) -> bool:
        """Whether any of these tensors depends on weights."""
        weights = {id(part._parameters[name]) for _, part, name in self.chain.glue_candidates}  # a tracer may have put others there
        return any(isinstance(x, Absent) or hasattr(x, _FROM_UNIT) or id(x) in weights for x in tree_iter(given))

    def _exchanged(self, out: Any, kind: str, number: int) -> Any:
        """Puts in what came from other stages, and takes what goes to others."""
        leaves, spec = tree_flatten(out)
        j, changed = number, False
        for i, x in enumerate(leaves):
            if isinstance(x, torch.Tensor):
                site = Site(self.begun, kind, j)
                j += 1
                if site in self._carry:
                    leaves[i], changed, self._has_entered = _entering(self._carry[site], x), True, True
                    self._hookless.append(leaves[i])
                    leaves[i].register_hook = _hooked_there
                    _mark(leaves[i])
                elif site in self._wanted:
                    self.taken[site] = x
        return tree_unflatten(leaves, spec) if changed else out


class _UnitCalls(TorchFunctionMode):
    """Has every torch call of a unit made by somebody else."""

    def __init__(self, through: Through, call: int) -> None:
        super().__init__()
        self.through, self.call, self.count = through, call, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return self.through(func, args, kwargs or {}, ("unit", self.call, self.count))


class _Entering(torch.autograd.Function):
    """A leaf as something computed, without a copy: the module may go on with it in place, as it may with what its own units return."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


def _entering(given: torch.Tensor, site: torch.Tensor) -> torch.Tensor:
    """What crossed, perhaps laid flat and with something behind it, in the shape and dtype that it has here."""
    if given.requires_grad:
        given = _Entering.apply(given)
    if given.shape != site.shape:
        given = given.reshape(-1)[: site.numel()].view(site.shape)
    return given.to(site.dtype)


def _hooked_there(hook: Callable[..., Any]) -> RemovableHandle:
    """In place of `register_hook` where the stage that made a tensor has it: a gradient must not meet it on both."""
    return RemovableHandle(OrderedDict())


def _mark(tree: Any) -> None:
    """These tensors depend on what units gave, and what the glue makes of them does."""
    for x in tensors_in(tree):
        if not isinstance(x, Absent):
            setattr(x, _FROM_UNIT, True)


def _asked(argument: Any) -> Any:
    """What decides the shapes that a unit returns, as far as it is seen at once."""
    return argument.shape if isinstance(argument, torch.Tensor) else argument if type(argument) in PLAIN else None


def _other_order(called: str, expected: str) -> str:
    return f"'{called}' was called where '{expected}' was: every micro-batch must call the same parts in the same order."
