"""Activations that a module recomputes by itself, with `torch.utils.checkpoint`: here it keeps them, as the plan decides what runs again.

What torch runs again in the backward pass it would run without what is ambient: attention would leave its samples, dropout draw other
masks, and code between units call them outside of any stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from torch.utils import checkpoint as torchs

__all__ = ["Recomputed", "left_out"]

_GENERATOR, _FUNCTION = "_checkpoint_without_reentrant_generator", "CheckpointFunction"
"""Where `torch.utils.checkpoint.checkpoint` looks up its two ways; modules may have a reference to that itself."""
_WITHOUT_REENTRANT, _REENTRANT = getattr(torchs, _GENERATOR), getattr(torchs, _FUNCTION)


class Recomputed:
    """A function that the plan recomputes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same in the forward pass and in the backward pass."""
        with left_out():
            return self._function(*args, **kwargs)


@contextmanager
def left_out() -> Iterator[list[str]]:
    """What the module would recompute itself runs once meanwhile; names of what that was."""
    found = list[str]()
    if getattr(torchs, _GENERATOR) is not _WITHOUT_REENTRANT:  # it is already
        yield found
        return

    def at_once(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if isinstance(function, Recomputed):
            yield from _WITHOUT_REENTRANT(function, *args, **kwargs)
            return
        found.append(getattr(function, "__qualname__", type(function).__name__))
        yield

    def applied(function: Callable[..., Any], _: bool, *args: Any) -> Any:
        found.append(getattr(function, "__qualname__", type(function).__name__))
        return function(*args)

    setattr(torchs, _GENERATOR, at_once)
    setattr(torchs, _FUNCTION, SimpleNamespace(apply=applied))
    try:
        yield found
    finally:
        setattr(torchs, _GENERATOR, _WITHOUT_REENTRANT)
        setattr(torchs, _FUNCTION, _REENTRANT)
