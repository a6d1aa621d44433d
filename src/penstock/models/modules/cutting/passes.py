"""A forward pass of a module that decides what calls of its units return, and sees torch calls of the code between them (the glue).

    the module calls     embed        x * 2        layers.0     torch.cat    …
    the pass is asked    on_unit      on_glue      on_unit      on_glue      and what it gives is what the module goes on with
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from penstock.models.modules.cutting.absent import NeedsValues
from penstock.models.modules.cutting.chain import UnitChain
from penstock.models.modules.cutting.own_recomputation import left_out

__all__ = ["GlueCalls", "ModulePass", "inside_function"]

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]


class ModulePass(ABC):
    """Base of the passes: where in the module one is, and how calls of units and of torch reach it."""

    def __init__(self, chain: UnitChain, device: torch.device) -> None:
        self.chain, self.device = chain, device
        self.begun = 0
        """Units called so far."""
        self.count = 0
        """Tensors that torch calls of the glue since then made of what units gave."""
        self.quiet = 0
        """Above 0 what runs is not the module's own code between units."""

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Torch calls are none of the glue's meanwhile."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Units ask this pass while it lasts."""
        before, self.chain.answer = self.chain.answer, self.on_unit
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
        """Paths of the units that were called."""
        return self.chain.calls[: self.begun]

    def skipped(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a unit would return, without values."""
        with self.unwatched():
            return self.chain.shapes_of[id(unit)].outputs(unit, forward, args, kwargs, self.device)

    @abstractmethod
    def on_unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called; what it returns."""

    def call_torch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes a torch call of the glue."""
        return func(*args, **kwargs)

    @abstractmethod
    def on_glue(self, given: Any, out: Any) -> Any:
        """The glue has called torch; what it goes on with in place of `out`."""


class GlueCalls(TorchFunctionMode):
    """Shows a pass every torch call of the glue. One mode for all that is watched: a stack of modes costs each call again."""

    def __init__(self, run: ModulePass) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls torch through the pass."""
        if self.run.quiet:
            return func(*args, **(kwargs or {}))
        out = self.run.call_torch(func, args, kwargs or {})
        return self.run.on_glue((args, kwargs), out)


def inside_function() -> bool:
    """Whether the forward pass of a `torch.autograd.Function` is what called torch."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not _APPLY:
        frame = frame.f_back
    return frame is not None
