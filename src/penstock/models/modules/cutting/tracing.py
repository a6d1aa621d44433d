"""The pass that finds which units a module calls and what crosses each cut: it skips all of them, and follows absent tensors.

    moment     2k              2k + 1                2k + 2
    runs       call k          the glue after it     call k + 1
    a cut before call k is crossed by what is made before moment 2k and used then or later
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from penstock.models.modules.cutting.absent import Absent, tensors_in
from penstock.models.modules.cutting.chain import Call, CarryAt, Site, UnitChain
from penstock.models.modules.cutting.passes import GlueCalls, ModulePass, inside_function

__all__ = ["TracingPass"]


class TracingPass(ModulePass):
    """Notes where each absent tensor is made, when it is used last, and after which calls the glue uses which weights."""

    def __init__(self, chain: UnitChain, device: torch.device) -> None:
        super().__init__(chain, device)
        self.calls: list[str] = []
        self.has_functions = False
        """Whether the glue called functions with a backward pass of their own."""
        self.used_after: dict[str, set[int]] = {}
        """Of weights and buffers that the glue uses, the calls after which it does; -1 before the first."""
        self._site_of: dict[int, Site] = {}
        """By the id of a tensor."""
        self._alive: list[Any] = []
        """Tensors stay alive, so that the id of one is not given to another."""
        self._made: dict[Site, torch.Tensor] = {}
        self._last_use: dict[Site, int] = {}
        """Moments, as above."""
        self._of_function: dict[int, set[Site]] = {}
        """What functions with a backward pass of their own return, and the sites that they made it of."""
        self._names: dict[int, str] = {}
        """Of weights and buffers, by the ids of their tensors in this pass."""

    def go(self, call: Call) -> None:
        """Runs the module once."""
        with self.chain.stand_ins(lambda name: False, self.device) as stand_ins, self.running():
            own = {id(part._parameters[attribute]): name for name, part, attribute in self.chain.weights}
            own |= {id(part._buffers[attribute]): name for name, part, attribute in self.chain.buffers_outside_units()}
            self._names = own | {id(p): name for name, p in stand_ins.items()}
            with torch.no_grad(), GlueCalls(self):
                out = call(self.chain.module)
            self._use(out)

    def cuts(self) -> Iterator[CarryAt]:
        """What crosses before call 1, 2, …"""
        for k in range(1, len(self.calls)):
            sites = [site for site in self._made if site.begun <= k and self._last_use.get(site, -1) >= 2 * k]
            made = [self._made[site] for site in sites]
            yield CarryAt(tuple(sites), tuple(tuple(x.shape) for x in made), tuple(x.dtype for x in made))

    def calls_so_far(self) -> tuple[str, ...]:
        """The chain does not know them yet."""
        return tuple(self.calls)

    def on_unit(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Skips it, whichever it is."""
        with self.unwatched():
            self._use((args, kwargs), by_unit=True)
            self._alive.append((args, kwargs))
        self.calls.append(self.chain.path_of[id(unit)])
        with self.unwatched():
            self.chain.tell_apart(unit, forward, args, kwargs)
        out = self.skipped(unit, forward, args, kwargs)
        self.begun, self.count = self.begun + 1, 0
        self._note_made(out, "out", 0)
        return out

    def on_glue(self, given: Any, out: Any) -> Any:
        """Notes what is used, and what is made of what units gave."""
        with self.unwatched():
            number = len(tensors_in(out))
            self._use(given, values=number > 0)
            if inside_function():
                # No gradient reaches what crosses in there: what it is given crosses, and it runs on both sides.
                self.has_functions = True
                self._alive.append(out)
                sites = {site for x in tree_iter(given) for site in self._sites_of(x)}
                self._of_function |= {id(x): sites for x in tensors_in(out) if isinstance(x, Absent)}
            elif number and any(isinstance(x, Absent) for x in tree_iter(given)):
                self._note_made(out, "glue", self.count)
                self.count += number
        return out

    def _use(self, tree: Any, by_unit: bool = False, values: bool = True) -> None:
        """These tensors are used: their `values`, or what is known of them without."""
        when = 2 * self.begun if by_unit else 2 * self.begun - 1
        for x in tree_iter(tree):
            if id(x) in self._names:
                if not values:
                    continue
                self.used_after.setdefault(self._names[id(x)], set()).add(self.begun - 1)
            for site in self._sites_of(x):
                self._last_use[site] = when

    def _sites_of(self, x: Any) -> Collection[Site]:
        return (self._site_of[id(x)],) if id(x) in self._site_of else self._of_function.get(id(x), ())

    def _note_made(self, out: Any, kind: str, number: int) -> None:
        for j, x in enumerate(tensors_in(out)):
            if isinstance(x, Absent) and id(x) not in self._names:
                site = Site(self.begun, kind, number + j)
                self._alive.append(x)
                # In place: the same tensor is made anew here, and what was before is used no more.
                self._site_of[id(x)] = site
                self._made[site] = x
