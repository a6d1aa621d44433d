"""A unit of somebody's module as the runtime sees an op: its weights, by their names in the unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from penstock.models.modules.base import OpModule, Shard
from penstock.models.modules.cutting.dividing import divided_weights

__all__ = ["UnitOp"]


class UnitOp(OpModule):
    """Weights and buffers that `bind` names; before it they have shapes alone."""

    def build(self) -> None:
        """Shapes as the description has them."""
        self._own: dict[str, nn.Parameter] = {}
        self._kept = {name: torch.empty(shape, device="meta") for name, shape in self.config.get("buffers", {}).items()}
        self.whole_shapes = {name: tuple(shape) for name, shape in self.config.get("weights", {}).items()}
        dims = {name: dim for part, style in self.config.get("tp", {}).items() for name, dim in divided_weights(part, style).items()}
        self.shards = {name: self._shard(dims[name]) if self.tp.size > 1 and name in dims else None for name in self.whole_shapes}

    def _shard(self, dim: int) -> Shard:
        def own(whole: torch.Tensor) -> torch.Tensor:
            here = self.tp.shard(whole.shape[dim])
            return whole.narrow(dim, here.start, here.stop - here.start)

        return own

    def bind(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, torch.Tensor]) -> None:
        """The module's own tensors."""
        self._own, self._kept = dict(parameters), dict(buffers)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By their names in the unit."""
        return iter(self._own.items())

    def get_parameter(self, target: str) -> nn.Parameter:
        """One of them."""
        return self._own[target]

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that a checkpoint keeps."""
        return iter(self._kept.items())

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """Those that a checkpoint keeps."""
        return iter(self._kept.values())
