"""What every op module is: built from a description and this rank's share, it turns one carry into the next."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from penstock.models.modules.batch import Batch
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.init import init_parameter, stable_hash
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Op

__all__ = ["Carry", "OpModule", "Shard"]

Carry = dict[str, torch.Tensor]
Shard = Callable[[torch.Tensor], torch.Tensor]


class OpModule(nn.Module):
    """An op on this rank. `shards` tells for each parameter how this rank's part is cut from the whole weight."""

    def __init__(
        self,
        op: Op,
        name: str,
        tp: TensorParallel | None = None,
        algo: int = 0,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.op, self.name, self.tp, self.algo = op, name, tp or TensorParallel(), algo
        op.check_tp(self.tp.size, algo)
        self.device, self.dtype, self.seed = device, dtype, seed
        self.config = dict(op.config)
        self.shards: dict[str, Shard | None] = {}
        self.whole_shapes: dict[str, tuple[int, ...]] = {}
        self._names = tuple(spec.name for spec in op.carry)
        self.build()

    def build(self) -> None:
        """Creates the parameters; ops without weights need not override it."""

    def add(self, name: str, shape: tuple[int, ...], *, std: float = 0.02, fill: float | None = None, shard: Shard | None = None) -> None:
        """Registers a parameter of whole shape `shape`, of which this rank holds what `shard` cuts out."""
        self.shards[name], self.whole_shapes[name] = (shard if self.tp.size > 1 else None), shape
        parameter = init_parameter(
            shape, self.name, name, seed=self.seed, std=std, fill=fill, device=self.device, dtype=self.dtype, shard=self.shards[name]
        )
        parameter.requires_grad_(self.op.trainable)
        self.register_parameter(name, parameter)

    @torch.no_grad()
    def load(self, name: str, whole: torch.Tensor) -> None:
        """Sets a parameter from the whole weight."""
        if tuple(whole.shape) != self.whole_shapes[name]:
            raise ValueError(f"{self.name}.{name}: weight has shape {tuple(whole.shape)}, expected {self.whole_shapes[name]}")
        shard = self.shards[name]
        self.get_parameter(name).copy_(whole if shard is None else shard(whole))

    def following(self, carry: Carry, **updates: torch.Tensor) -> Carry:
        """The carry this op returns: its updates, and of its input what the description passes on."""
        return {name: updates[name] if name in updates else carry[name] for name in self._names}

    def drop(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Hidden dropout with the op's probability, keyed by (seed, step, sample, op)."""
        probability = self.config.get("dropout", 0.0)
        if not probability or not batch.training:
            return x
        key = stable_hash(batch.seed, batch.step, self.name)
        return keyed_dropout(x, batch.side(self.config["side"]).row_keys(), probability, key)

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        """The op itself."""
        raise TypeError(f"{type(self).__name__} has no forward pass")
