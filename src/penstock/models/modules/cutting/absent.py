"""Tensors that another stage has: a shape, a dtype and a device, but no values."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from penstock.errors import InputError

__all__ = ["Absent", "NeedsValues", "absent", "tensors_in"]

_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default}
_PLAIN = int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format
_KNOWN: dict[Any, torch.Tensor] = {}
"""What torch calls on absent tensors gave before, on meta: asking torch again takes ten times as long."""
_CHANGED = torch.empty(0, device="meta")
"""Stands there for what changes its first argument."""
_MOST_KNOWN = 4096
_LIBRARIES = tuple(str(Path(module.__file__).parent) for module in (torch, sys.modules["penstock"]) if module.__file__)


class NeedsValues(InputError):
    """Code between the units of a module reads values that only another stage has."""


class Absent(torch.Tensor):
    """What operations on it return is absent too; reading its values is refused."""

    meta: torch.Tensor
    """The same without a device: what torch computes shapes with."""

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Absent:
        """Stands for a tensor like `meta` on `device`."""
        made = torch.Tensor._make_wrapper_subclass(cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device)  # type: ignore[attr-defined]
        made.meta = meta
        return made  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        """Its shape and dtype, all that there is."""
        return f"Absent({tuple(self.shape)}, {self.dtype})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation on shapes alone."""
        key = _asked(func, args, kwargs)
        known = None if key is None else _KNOWN.get(key)
        if known is not None:
            return args[0] if known is _CHANGED else cls(known, _device_of(args, kwargs))
        kwargs = dict(kwargs or {})
        if func in _READS:
            raise NeedsValues(_told("reads an activation"))
        changed = args[0] if func._schema.is_mutable and args else None
        if isinstance(changed, torch.Tensor) and not isinstance(changed, Absent):
            raise NeedsValues(_told("writes an activation into a tensor"))
        device = _device_of(args, kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        out = func(*tree_map_only(torch.Tensor, _bare, args), **tree_map_only(torch.Tensor, _bare, kwargs))
        if key is not None and isinstance(out, torch.Tensor):
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[key] = out if changed is None else _CHANGED
        if isinstance(changed, Absent):
            return changed
        return tree_map_only(torch.Tensor, lambda x: cls(x, device), out)


def absent(shape: Any, dtype: torch.dtype, device: torch.device) -> Absent:
    """A tensor of this shape that is elsewhere."""
    return Absent(torch.empty(shape, dtype=dtype, device="meta"), device)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Tensors of nested lists, tuples, dicts and what else torch can take apart, in order."""
    return [x for x in tree_iter(tree) if isinstance(x, torch.Tensor)]


def _device_of(args: Any, kwargs: Any) -> torch.device:
    for x in args:  # nearly always the first or the second
        if isinstance(x, Absent):
            return x.device
    return next(x.device for x in tree_iter((args, kwargs)) if isinstance(x, Absent))


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    """All that the shape of a result depends on; None where that cannot be told."""
    try:
        return func, tuple(map(_fact, args)), tuple((name, _fact(x)) for name, x in kwargs.items()) if kwargs else ()
    except TypeError:
        return None


def _fact(x: Any) -> Any:
    """What the shape of a result depends on in one argument."""
    if isinstance(x, torch.Tensor):
        return type(x), x.shape, x.stride(), x.dtype
    if isinstance(x, list | tuple):
        return tuple(map(_fact, x))
    if x is None or isinstance(x, _PLAIN):
        return type(x), x  # 1, 1.0 and True are equal, but say other dtypes
    raise TypeError


def _bare(x: torch.Tensor) -> torch.Tensor:
    return x.meta if isinstance(x, Absent) else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _told(does: str) -> str:
    """`net.py:41: 'x.mean() > 0' reads an activation`: the innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line)
    _, end, first, last = list(frame.f_code.co_positions())[frame.f_lasti // 2]  # of the very expression
    text = text[first:last] if end == line else text
    return f"{Path(path).name}:{line}: '{text.strip()}' {does}"
