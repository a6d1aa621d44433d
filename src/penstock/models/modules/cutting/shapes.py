"""What a skipped unit returns: learnt from the unit itself on the meta device, then by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_iter, tree_map_only, tree_unflatten

from penstock.models.modules.cutting.absent import absent

__all__ = ["PLAIN", "UnitShapes", "weights_on_meta"]

PLAIN = int, float, bool, str
"""Kinds of arguments and results that are known by their values."""

_LEARNT = 3
"""Rules are asked once so many different inputs were seen."""

_Dim = frozenset[tuple[str, int]]
"""What one size of an output may be, by all that was seen: a constant, or the i-th of all sizes that the unit is given."""
_Shape = tuple[int, ...]
_Plain = tuple[int | float | bool | str, ...]


class _Outputs(NamedTuple):
    """What a unit returns, flattened."""

    shapes: tuple[_Shape | None, ...]
    """None for an output that is no tensor."""
    kinds: tuple[Any, ...]
    """Of each output its dtype, or, where it is no tensor, the value itself."""
    spec: Any
    """How they are put together."""

    def is_like(self, other: _Outputs) -> bool:
        """Whether all but sizes is the same."""
        ours, theirs = (self.kinds, self.spec), (other.kinds, other.spec)
        return ours[1] == theirs[1] and all(map(_is_same, ours[0], theirs[0]))


def _is_same(value: Any, other: Any) -> bool:
    """Objects that nobody can compare are taken to be."""
    return value == other if isinstance(value, (*PLAIN, torch.dtype)) else type(value) is type(other)


class UnitShapes:
    """Shapes of the outputs of units of one kind.

    The unit runs on the meta device, which takes a millisecond, until all that its output sizes may still be says the same of new inputs.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[_Shape, _Plain], _Outputs] = {}
        self._rules: dict[tuple[int, _Plain], _Rule] = {}
        """By the number of input sizes, and what else the unit is given."""

    def outputs(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
        """What `forward` of the unit would return, with absent tensors."""
        sizes, plain = _asked(args, kwargs)
        found = self._seen.get((sizes, plain)) or self._foretold(sizes, plain)
        if found is None:
            found = self._learn(sizes, plain, _outputs(unit, forward, args, kwargs))
        made = [kind if shape is None else absent(shape, kind, device) for shape, kind in zip(found.shapes, found.kinds, strict=True)]
        return tree_unflatten(made, found.spec)

    def are_those_of(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Whether this unit returns what others of its kind have returned, so far as this was asked before."""
        sizes, plain = _asked(args, kwargs)
        own, known = _outputs(unit, forward, args, kwargs), self._seen.get((sizes, plain))
        if known is None:
            known = self._learn(sizes, plain, own)
        return own.shapes == known.shapes and own.is_like(known)

    def _foretold(self, sizes: _Shape, plain: _Plain) -> _Outputs | None:
        """By the rules, where they are sure."""
        rule = self._rules.get((len(sizes), plain))
        if rule is None or rule.dims is None or rule.count < _LEARNT:
            return None
        found: list[_Shape | None] = []
        for dims in rule.dims:
            if dims is None:
                found.append(None)
                continue
            said = [{value if how == "is" else sizes[value] for how, value in dim} for dim in dims]
            if any(len(values) != 1 for values in said):
                return None
            found.append(tuple(values.pop() for values in said))
        return rule.last._replace(shapes=tuple(found))

    def _learn(self, sizes: _Shape, plain: _Plain, found: _Outputs) -> _Outputs:
        self._seen[sizes, plain] = found
        now: list[list[_Dim] | None] = [
            None if shape is None else [frozenset({("is", n), *(("as", i) for i, size in enumerate(sizes) if size == n)}) for n in shape]
            for shape in found.shapes
        ]
        before = self._rules.get((len(sizes), plain), _Rule(now, 0, found))
        follows = before.dims is not None and found.is_like(before.last)  # a length as a number is no rule of sizes
        self._rules[len(sizes), plain] = _Rule(_both(before.dims or [], now) if follows else None, before.count + 1, found)
        return found


class _Rule(NamedTuple):
    """What all that was seen allows."""

    dims: list[list[_Dim] | None] | None
    """Of each output; None where they follow no rule. None of an output that is no tensor."""
    count: int
    last: _Outputs


def _asked(args: Any, kwargs: Any) -> tuple[_Shape, _Plain]:
    """All sizes of tensors that a unit is given, and the numbers and words."""
    leaves = list(tree_iter((args, kwargs)))
    sizes = tuple(size for x in leaves if isinstance(x, torch.Tensor) for size in x.shape)
    return sizes, tuple(x for x in leaves if type(x) in PLAIN)


def _outputs(unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> _Outputs:
    leaves, spec = tree_flatten(_on_meta(unit, forward, args, kwargs))
    return _Outputs(
        tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in leaves),
        tuple(x.dtype if isinstance(x, torch.Tensor) else x for x in leaves), spec,
    )  # fmt: skip


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
