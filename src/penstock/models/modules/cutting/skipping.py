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

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from penstock.models.modules.cutting.chain import Call, GlueBuffer, GlueWeight, Site, UnitChain
from penstock.models.modules.cutting.stage_pass import StagePass, Through
from penstock.models.modules.cutting.tracing import TracingPass

__all__ = ["Call", "Skipping"]


class Skipping(UnitChain):
    """A module whose forward pass can be run in parts.

    >>> chain = Skipping(module)                      # doctest: +SKIP
    >>> chain.trace(call)
    >>> carry = chain.run(call, 0, 3, {})             # calls 0 to 2; what crosses the cut before call 3
    >>> loss = chain.run(call, 3, len(chain.calls), carry)
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._begun: list[str] = []

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
        self.glue_buffers = tuple(GlueBuffer(*one, max(0, min(run.used_after.get(one.name, {0})))) for one in self.buffers_outside_units())

    def _traced(self, call: Call, device: torch.device | str) -> TracingPass:
        run = TracingPass(self, torch.device(device))
        self._begun = run.calls
        run.go(call)
        self.has_functions |= run.has_functions
        return run

    @property
    def last_begun(self) -> str | None:
        """The unit that was called last while the order of calls was found; None before the first."""
        return self._begun[-1] if self._begun else None

    def run(
        self, call: Call, first: int, last: int, carry: Mapping[Site, torch.Tensor], recompute: Collection[int] = (),
        device: torch.device | str = "cpu", through: Through | None = None,
    ) -> Any:  # fmt: skip
        """Runs calls [first, last). The tensors that cross the cut before `last`, by site; what `call` returns if that is the end.

        `carry` has the tensors that cross before `first`. Units in `recompute` run again in the backward pass in place of keeping what
        they need for it. `through` makes the module's torch calls in its place.
        """
        return StagePass(self, first, last, carry, recompute, torch.device(device), through).go(call)

    def watch(self, call: Call, found: dict[Site, torch.Tensor]) -> Any:
        """Runs everything; `found` gets the tensors that cross any cut."""
        run = StagePass(self, 0, len(self.calls), {}, (), torch.device("cpu"))
        run.take({site for cut in self.cuts for site in cut.sites})
        out = run.go(call)
        found |= run.taken
        return out
