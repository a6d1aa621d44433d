"""Dropout: what is kept makes up for what is not, forward and backward alike."""

from __future__ import annotations

import torch

from penstock.models.modules.dropout import keyed_dropout


def test_what_is_kept_makes_up_for_what_is_not() -> None:
    x = torch.rand(200, 64).add_(1.0).requires_grad_()
    found = keyed_dropout(x, torch.arange(200), 0.25, 7)
    kept = found != 0
    assert abs(kept.float().mean().item() - 0.75) < 0.02
    torch.testing.assert_close(found[kept], x[kept] / 0.75)
    found.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, kept.float() / 0.75)
