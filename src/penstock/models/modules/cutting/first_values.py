"""Modules that are built without memory for their weights, and the first values of those that a rank then holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from penstock.errors import InputError
from penstock.models.modules.init import stable_hash

__all__ = ["FirstValues", "weights_made_on_meta"]


@contextmanager
def weights_made_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have their weights on the meta device. Buffers are real: nobody could compute them again."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    with mock.patch.object(nn.Module, "register_parameter", on_meta):
        yield


class FirstValues:
    """Values for weights on meta: what the part that has them draws, from a generator that its name and `seed` alone decide."""

    def __init__(self, module: nn.Module, seed: int, draw: Callable[[nn.Module], None] | None = None) -> None:
        """`draw` sets the weights of one part; its own `reset_parameters` if not given."""
        self._module, self._seed, self._draw = module, seed, draw

    @torch.no_grad()
    def __call__(self, name: str, weight: nn.Parameter) -> torch.Tensor:
        """The value of a weight: as it is, or drawn."""
        if not weight.is_meta:
            return weight.detach()
        path, _, attribute = name.rpartition(".")
        part = self._module.get_submodule(path)
        draw = self._draw or getattr(type(part), "reset_parameters", None)
        if draw is None:
            raise InputError(
                f"weight '{name}' was made on the meta device, and {type(part).__name__} has no reset_parameters() to give it values. "
                "Give it one, or begin with weights of a checkpoint."
            )
        before = dict(part._parameters)
        try:
            for key, p in before.items():
                if p is not None:
                    part._parameters[key] = nn.Parameter(torch.zeros(p.shape, dtype=p.dtype), requires_grad=False)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stable_hash(self._seed, path))
                draw(part)
            found = part._parameters[attribute]
            assert found is not None
            return found.detach()
        finally:
            part._parameters.update(before)
