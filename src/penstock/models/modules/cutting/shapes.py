"""What a skipped unit returns: learnt from the unit itself on the meta device, then by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from penstock.models.modules.cutting.absent import absent

__all__ = ["UnitShapes", "weights_on_meta"]

_LEARNT = 3
"""Rules are asked once so many different inputs were seen."""

_Dim = frozenset[tuple[str, int]]
"""What one size of an output may be, by all that was seen: a constant, or the i-th of all sizes that the unit is given."""
_Shape = tuple[int, ...]


class UnitShapes:
    """Shapes of the outputs of units of one kind.

    The unit runs on the meta device, which takes a millisecond, until all that its output sizes may still be says the same of new inputs.
    """

    def __init__(self) -> None:
        self._seen: dict[_Shape, list[_Shape | None]] = {}
        self._rules: dict[int, list[list[_Dim] | None] | None] = {}
        """By the number of input sizes; None where sizes follow no rule. In a rule, None stands for an output that is no tensor."""
        self._spec: Any = None
        self._kinds: list[Any] = []
        """Of each output its dtype, or, where it is no tensor, the value itself."""

    def outputs(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
        """What `forward` of the unit would return, with absent tensors."""
        sizes = tuple(size for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor) for size in x.shape)
        shapes = self._seen.get(sizes) or self._foretold(sizes)
        if shapes is None:
            shapes = self._learn(sizes, *tree_flatten(_on_meta(unit, forward, args, kwargs)))
        made = [kind if shape is None else absent(shape, kind, device) for shape, kind in zip(shapes, self._kinds, strict=True)]
        return tree_unflatten(made, self._spec)

    def _foretold(self, sizes: _Shape) -> list[_Shape | None] | None:
        """By the rules, where they are sure."""
        rule = self._rules.get(len(sizes))
        if rule is None or len(self._seen) < _LEARNT:
            return None
        found: list[_Shape | None] = []
        for dims in rule:
            if dims is None:
                found.append(None)
                continue
            said = [{value if how == "is" else sizes[value] for how, value in dim} for dim in dims]
            if any(len(values) != 1 for values in said):
                return None
            found.append(tuple(values.pop() for values in said))
        return found

    def _learn(self, sizes: _Shape, got: list[Any], spec: Any) -> list[_Shape | None]:
        self._spec, self._kinds = spec, [x.dtype if isinstance(x, torch.Tensor) else x for x in got]
        shapes: list[_Shape | None] = [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in got]
        self._seen[sizes] = shapes
        now: list[list[_Dim] | None] = [
            None if shape is None else [frozenset({("is", n), *(("as", i) for i, size in enumerate(sizes) if size == n)}) for n in shape]
            for shape in shapes
        ]
        before = self._rules.get(len(sizes), now)
        self._rules[len(sizes)] = None if before is None else _both(before, now)
        return shapes


def _both(before: list[list[_Dim] | None], now: list[list[_Dim] | None]) -> list[list[_Dim] | None] | None:
    """What both allow; None where nothing is left."""
    found: list[list[_Dim] | None] = []
    for a, b in zip(before, now, strict=False):
        if a is None or b is None:
            found.append(None)
            continue
        dims = [x & y for x, y in zip(a, b, strict=False)]
        if not all(dims) or len(a) != len(b):
            return None
        found.append(dims)
    return found if len(before) == len(now) else None


def _on_meta(unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The unit's outputs on the meta device; in bf16 where torch's shape function of grouped products knows no other."""
    try:
        return _attempt(unit, forward, args, kwargs, half=False)
    except RuntimeError as error:
        if "BF16" not in str(error):
            raise
        out = _attempt(unit, forward, args, kwargs, half=True)
        return tree_map_only(torch.Tensor, lambda x: x.float() if x.dtype == torch.bfloat16 else x, out)


def _attempt(unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, half: bool) -> Any:
    def kind(dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if half and dtype == torch.float32 else dtype

    def bare(x: torch.Tensor) -> torch.Tensor:
        return torch.empty(x.shape, dtype=kind(x.dtype), device="meta")

    with torch.no_grad(), torch.device("meta"), weights_on_meta(unit, kind):
        return forward(*tree_map_only(torch.Tensor, bare, args), **tree_map_only(torch.Tensor, bare, kwargs))


@contextmanager
def weights_on_meta(unit: nn.Module, kind: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype) -> Iterator[None]:
    """The unit's weights and buffers are on meta meanwhile, in the dtypes that `kind` says."""
    saved: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for part in unit.modules():
        for store in (part._parameters, part._buffers):
            for name, x in store.items():
                if x is not None and (not x.is_meta or kind(x.dtype) != x.dtype):
                    saved.append((store, name, x))  # type: ignore[arg-type]
    for store, name, x in saved:
        bare = torch.empty(x.shape, dtype=kind(x.dtype), device="meta")
        store[name] = nn.Parameter(bare, requires_grad=False) if isinstance(x, nn.Parameter) else bare
    try:
        yield
    finally:
        for store, name, x in saved:
            store[name] = x
