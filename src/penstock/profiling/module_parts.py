"""Measuring the units of somebody's module: runs of them, each with the code before it, as every stage runs them.

    embed layers.0 layers.1 layers.2 │ layers.3 … layers.31 │ norm head, loss
    ── a window: three of a kind ────                        ─ another ──────      what is alike is measured once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter

from penstock.models.modules import Batch, Carry, TensorParallel, run_backward
from penstock.models.ops import Model
from penstock.profiling.marks import Marks
from penstock.profiling.measure import Passed
from penstock.runtime.parallel.module_chain import CutModule, ModuleChain

__all__ = ["run_units", "window_chain", "windows"]


def windows(model: Model, copies: int) -> Iterator[tuple[int, int]]:
    """Ranges of ops that together have each kind of them, at most `copies` times in a row or in turn."""
    kinds = [place.op.signature for place in model.ops]
    wanted = set(kinds)
    first = 0
    while wanted:
        first = next(at for at in range(first, len(kinds)) if kinds[at] in wanted)
        last, seen = first, Counter[str]()
        while last < len(kinds) and (seen[kinds[last]] < copies and (seen[kinds[last]] or kinds[last] in wanted)):
            seen[kinds[last]] += 1
            last += 1
        yield first, last
        wanted -= seen.keys()
        first = last


def window_chain(cut: CutModule, first: int, last: int) -> ModuleChain:
    """The units of a window with their weights here, and no others."""
    alone = TensorParallel()
    cut.hold(dict.fromkeys(range(first, last), alone))
    places = cut.model.ops[first:last]
    return cut.chain([cut.op(place, alone) for place in places], places)


def run_units(chain: ModuleChain, carry: Carry, batch: Batch, marks: Marks, whole: bool = False) -> Passed:
    """One forward and backward pass of a window, with marks after each unit; the loss counts with the last, code before the first unit of
    the module with that, and before that of any other window with none."""
    forward, backward, last = [marks.mark()], dict[int, Any](), chain.last - chain.first - 1

    def note(index: int, gradient: torch.Tensor) -> None:
        backward.setdefault(index, marks.mark())

    def timed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if len(forward) == 1 and chain.first:
            forward[0] = marks.mark()
        out = plain(*args, **kwargs)
        index = len(forward) - 1
        forward.append(marks.mark())
        produced = next((x for x in tree_iter(out) if isinstance(x, torch.Tensor) and x.requires_grad), None)
        if produced is not None and index < last:
            produced.register_hook(partial(note, index))
        return out

    skipping = chain.cut.skipping
    paths = [] if whole else skipping.calls[chain.first : chain.last]
    skipping.in_place_of = {path: partial(timed, skipping.plain[path]) for path in paths}
    try:
        out = chain(batch, carry)
    finally:
        skipping.in_place_of = {}
    outputs = [x for x in out.values() if x.requires_grad]
    forward[1 if whole else len(forward) - 1 :] = [marks.mark()]
    backward[0 if whole else last] = marks.mark()
    carry.clear()
    run_backward(outputs, [torch.ones_like(x) for x in outputs])
    del out, outputs
    return Passed(forward, backward, marks.mark())
