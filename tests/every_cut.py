"""Modules run in two parts, cut in each place in turn, beside the same module as it is: loss and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.models.modules.cutting.chain import Call
from penstock.models.modules.cutting.skipping import Skipping

torch.set_num_threads(1)  # Tensors this small only wait for a second thread.


def loss_of(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.loss


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    module.zero_grad()
    return found


def plain(module: nn.Module, call: Call) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = loss_of(call(module))
    loss.backward()
    return loss.detach(), gradients(module)


def in_two(chain: Skipping, call: Call, cut: int, recompute: Any = ()) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The second stage on leaves, then the first from their gradients."""
    sent = chain.run(call, 0, cut, {}, recompute)
    leaves = {site: x.detach().requires_grad_(x.requires_grad) for site, x in sent.items()}
    loss = loss_of(chain.run(call, cut, len(chain.calls), leaves, recompute))
    loss.backward()
    back = [(sent[site], leaf.grad) for site, leaf in leaves.items() if leaf.grad is not None]
    torch.autograd.backward([x for x, _ in back], [grad for _, grad in back])
    return loss.detach(), gradients(chain.module)


def assert_every_cut(module: nn.Module, call: Call, recompute: Any = ()) -> None:
    loss, wanted = plain(module, call)
    chain = Skipping(module)
    chain.trace(call)
    assert len(chain.calls) > 2 and all(cut.sites for cut in chain.cuts)
    for cut in range(1, len(chain.calls)):
        got, found = in_two(chain, call, cut, recompute)
        assert torch.equal(got, loss), f"cut before {chain.calls[cut]}"
        for name, gradient in wanted.items():
            scale = max(gradient.abs().max().item(), 1e-6)
            assert (found[name] - gradient).abs().max().item() <= 1e-6 * scale, f"{name}, cut before {chain.calls[cut]}"
    chain.close()
    assert torch.equal(plain(module, call)[0], loss)


class Net(nn.Module):
    """Blocks with something between them."""

    def __init__(self, between: Callable[[Net, int, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 11)
        self.between = between

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = self.between(self, index, x, block(x))
        return self.head(x).logsumexp(-1).sum()


def net_call(module: nn.Module) -> torch.Tensor:
    return module(torch.arange(10).view(2, 5))  # type: ignore[no-any-return]
