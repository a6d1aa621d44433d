"""Which parts of a module are units: the smallest that a stage has or has not.

    model            Net
    ├─ embed         Embedding          embed                    what has weights and stands beside a list
    ├─ blocks        ModuleList         blocks.0, blocks.1 …     the blocks of an outermost list
    ├─ rotary        Rotary, no weights  (glue)                  runs on every stage, as all code between units does
    └─ head          Sequential         head.0, head.2           what has weights in a sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

__all__ = ["kind_of", "units_of"]


def units_of(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, part) of every unit, once however often it stands in lists. A module without such parts is one unit, with an empty path."""
    found = dict[int, tuple[str, nn.Module]]()
    for path, part in _parts(module, prefix):
        found.setdefault(id(part), (path, part))
    return iter(found.values()) if found or prefix else iter([("", module)])


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not _has_weights(child):
            continue
        if isinstance(child, nn.ModuleList):
            yield from ((f"{path}.{index}", block) for index, block in enumerate(child) if _has_weights(block))
        elif isinstance(child, nn.Sequential) or any(isinstance(part, nn.ModuleList) for part in child.modules()):
            yield from _parts(child, f"{path}.")
        else:
            yield path, child


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def kind_of(unit: nn.Module) -> Any:
    """Equal for units that return the same shapes when they are given the same: their class, their parts and their weights."""
    return repr(unit), tuple((name, tuple(p.shape), p.dtype) for name, p in unit.named_parameters())
