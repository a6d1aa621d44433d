"""Initial weights: by seed, op and name, and by nothing else."""

from __future__ import annotations

import pytest
import torch

from penstock.models.modules.init import init_parameter


@pytest.mark.parametrize(
    ("op", "name", "seed"), [("layers.1.qkv", "weight", 1), ("layers.0.qkv", "bias", 1), ("layers.0.qkv", "weight", 2)]
)
def test_weights_of_equal_shape_start_apart(op: str, name: str, seed: int) -> None:
    first = init_parameter((64, 64), "layers.0.qkv", "weight", seed=1)
    assert torch.equal(first, init_parameter((64, 64), "layers.0.qkv", "weight", seed=1))
    assert not torch.equal(first, init_parameter((64, 64), op, name, seed=seed))
    assert abs(first.std().item() - 0.02) < 1e-3
