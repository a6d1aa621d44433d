"""What a skipped unit returns: learnt from the unit itself on the meta device, then by a rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from penstock.models.modules.cutting.absent import absent

__all__ = ["UnitShapes", "weights_on_meta"]

_CONFIRMED = 2
"""A rule is believed once it has foretold so many shapes."""

_Rule = list[tuple[tuple[str, int], ...] | None]
"""For each output its sizes: a constant, or the i-th of all sizes that the unit is given. None: not a tensor."""


class UnitShapes:
    """Shapes of the outputs of units of one kind.

    The unit runs on the meta device for each new set of input sizes, which takes a millisecond, until every size of its outputs is seen to
    be a constant or one of its inputs' sizes.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, ...], list[tuple[int, ...] | None]] = {}
        self._rule: _Rule | None = None
        self._spec: Any = None
        self._kinds: list[Any] = []
        """Of each output its dtype, or, where it is no tensor, the value itself."""
        self._confirmed = 0

    def outputs(self, unit: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, device: torch.device) -> Any:
        """What `forward` of the unit would return, with absent tensors."""
        sizes = tuple(size for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor) for size in x.shape)
        if self._rule is not None and self._confirmed >= _CONFIRMED:
            shapes = [None if dims is None else tuple(v if how == "is" else sizes[v] for how, v in dims) for dims in self._rule]
        else:
            if sizes not in self._seen:
                self._learn(sizes, *tree_flatten(_on_meta(unit, forward, args, kwargs)))
            shapes = self._seen[sizes]
        made = [kind if shape is None else absent(shape, kind, device) for shape, kind in zip(shapes, self._kinds, strict=True)]
        return tree_unflatten(made, self._spec)

    def _learn(self, sizes: tuple[int, ...], got: list[Any], spec: Any) -> None:
        self._spec, self._kinds = spec, [x.dtype if isinstance(x, torch.Tensor) else x for x in got]
        self._seen[sizes] = [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in got]
        points = [(given, made) for given, made in self._seen.items() if len(given) == len(sizes) and len(made) == len(got)]
        rule = _rule_of(points) if len(points) > 1 else None
        self._confirmed = self._confirmed + 1 if rule is not None and rule == self._rule else 0
        self._rule = rule


def _rule_of(points: list[tuple[tuple[int, ...], list[tuple[int, ...] | None]]]) -> _Rule | None:
    """The rule that all points follow; None where there is none."""
    rule: _Rule = []
    for j, first in enumerate(points[0][1]):
        shapes = [made[j] for _, made in points]
        if first is None:
            rule.append(None)
            continue
        if any(shape is None or len(shape) != len(first) for shape in shapes):
            return None
        dims: list[tuple[str, int]] = []
        for values in zip(*(shape for shape in shapes if shape is not None), strict=True):
            given = list(zip(*(sizes for sizes, _ in points), strict=True))
            same = given.index(values) if values in given else None
            if len(set(values)) == 1:
                dims.append(("is", values[0]))
            elif same is not None:
                dims.append(("as", same))
            else:
                return None
        rule.append(tuple(dims))
    return rule


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
