"""Buffers that a unit's own forward pass changes, such as running statistics, where that pass runs again for the backward pass.

    first run                 meets mean₀, leaves mean₁
    other micro-batches       mean₂, mean₃
    the same once more        meets mean₀ as before; what it leaves is dropped, and mean₃ stays
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["ChangingBuffers", "Met"]

_Values = dict[str, torch.Tensor | None]
Met = list[tuple[_Values, _Values]]
"""For each part of a unit, where it has its buffers, and what the first run met there."""


class ChangingBuffers:
    """Those of one unit. Its first run of all shows which parts have any: masks and other constants are not copied after it."""

    def __init__(self, unit: nn.Module) -> None:
        self._parts = [part for part in unit.modules() if part._buffers]
        self._is_known = not self._parts

    @contextmanager
    def run(self, met: Met) -> Iterator[None]:
        """One of a micro-batch's runs; `met` is its own, and empty before the first."""
        if met:
            with _in_place(met):
                yield
            return
        met += [(part._buffers, _copied(part._buffers)) for part in self._parts]
        yield
        if not self._is_known:
            changed = [_have_changed(*one) for one in met]
            self._parts = [part for part, is_changed in zip(self._parts, changed, strict=True) if is_changed]
            met[:] = [one for one, is_changed in zip(met, changed, strict=True) if is_changed]
            self._is_known = True


@contextmanager
def _in_place(met: Met) -> Iterator[None]:
    """What was met is there meanwhile. Afterwards the tensors themselves are put back, not their values: autograd holds some of them."""
    now = [dict(store) for store, _ in met]
    for store, values in met:
        store.update(_copied(values))
    try:
        yield
    finally:
        for (store, _), own in zip(met, now, strict=True):
            store.update(own)


def _copied(values: _Values) -> _Values:
    return {name: None if value is None else value.clone() for name, value in values.items()}


def _have_changed(now: _Values, before: _Values) -> bool:
    """By their values: batch norm counts no version of what it changes."""
    return any(value is not None and not torch.equal(value, before[name]) for name, value in now.items())
