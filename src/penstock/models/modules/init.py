"""Initial weights that depend on the op's name alone, never on where or how it is placed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["init_parameter", "stable_hash"]


def stable_hash(*parts: object) -> int:
    """The same 63-bit number for the same parts in every process."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def init_parameter(
    shape: tuple[int, ...],
    op_name: str,
    param_name: str,
    *,
    seed: int = 0,
    std: float = 0.02,
    fill: float | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shard: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> nn.Parameter:
    """The whole weight is drawn in fp32 by (seed, op, parameter), then `shard` cuts this rank's part out of it."""
    whole = torch.empty(shape, device=device)
    if fill is not None:
        whole.fill_(fill)
    elif device == "meta" or whole.is_meta:
        pass
    else:
        generator = torch.Generator(device=whole.device)
        generator.manual_seed(stable_hash(seed, op_name, param_name))
        whole.normal_(0.0, std, generator=generator)
    part = whole if shard is None else shard(whole).contiguous().clone()
    return nn.Parameter(part.to(dtype))
