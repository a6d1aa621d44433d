"""Compares own GPU kernels with torch's ops, on a CPU by Triton's interpreter; each part prints its name when it agrees."""

from __future__ import annotations

import itertools

import torch
from torch.nn import functional as F

from penstock.models.modules import triton_kernels as kernels


def norms() -> None:
    for (rows, width), rms, added in itertools.product(((7, 96), (13, 256), (1, 1000)), (False, True), (False, True)):
        x, grad, other = (torch.randn(rows, width) for _ in range(3))
        weight, bias = torch.randn(width, requires_grad=True), None if rms else torch.randn(width, requires_grad=True)
        source = x.clone().requires_grad_()
        y = F.rms_norm(source, (width,), weight, 1e-5) if rms else F.layer_norm(source, (width,), weight, bias, 1e-5)
        y.backward(grad)
        found, mean, rstd = kernels.norm(x, weight.detach(), None if bias is None else bias.detach(), 1e-5, rms)
        torch.testing.assert_close(found, y.detach())
        dx, for_weight, for_bias = kernels.norm_gradient(grad, x, weight.detach(), mean, rstd, other if added else None)
        assert source.grad is not None
        torch.testing.assert_close(dx, source.grad + other if added else source.grad)
        torch.testing.assert_close(for_weight, weight.grad)
        assert (for_bias is None) == rms
        if bias is not None:
            torch.testing.assert_close(for_bias, bias.grad)
    print("norm")


def losses() -> None:
    logits, scales = 30 * torch.randn(9, 5000), torch.rand(9)
    labels = torch.randint(5000, (9,))
    labels[3] = -1  # of another rank
    log_sums, picked = kernels.cross_entropy(logits, labels)
    torch.testing.assert_close(log_sums, logits.logsumexp(1))
    mine = labels >= 0
    torch.testing.assert_close(picked, torch.where(mine, logits.gather(1, labels.clamp(min=0)[:, None])[:, 0], 0.0))
    wanted = logits.softmax(1)
    wanted[mine.nonzero()[:, 0], labels[mine]] -= 1
    torch.testing.assert_close(kernels.cross_entropy_gradient(logits, labels, log_sums, scales), wanted * scales[:, None])
    print("loss")


def columns() -> None:
    for rows, width in ((1, 5), (1000, 300), (129, 128)):
        x = torch.randn(rows, width)
        torch.testing.assert_close(kernels.column_sums(x), x.sum(0), rtol=1e-4, atol=1e-4)
    print("columns")


def updates() -> None:
    start = torch.randn(500)
    reference = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([reference], lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    # The weight's state lies between others'.
    master = torch.cat([torch.full((7,), 3.0), start, torch.full((9,), 4.0)])
    average, square = torch.zeros_like(master), torch.zeros_like(master)
    weight, factor = start.clone(), torch.tensor(0.5)
    for step in range(1, 4):
        grad = torch.randn(500)
        reference.grad = grad * 0.5
        optimizer.step()
        kernels.adamw(weight, grad, master, average, square, 7, factor, lr=0.01, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1, step=step)
        torch.testing.assert_close(weight, reference.detach())
        torch.testing.assert_close(master[7:507], weight)
    assert (master[:7] == 3).all() and (master[507:] == 4).all() and not average[:7].any() and not square[507:].any()
    print("update")


if __name__ == "__main__":
    torch.manual_seed(0)
    norms()
    losses()
    columns()
    updates()
