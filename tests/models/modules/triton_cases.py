"""Compares own GPU kernels with torch's ops, on a CPU by Triton's interpreter; each part prints its name when it agrees."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from penstock.models.modules import fused
from penstock.models.modules import triton_kernels as kernels
from penstock.models.modules.batch import Sequences
from penstock.models.modules.ragged_attention import ragged_attention


def norms() -> None:
    for (rows, width), rms, added in itertools.product(((7, 96), (13, 256), (1, 1000)), (False, True), (False, True)):
        x, grad, other = (torch.randn(rows, width) for _ in range(3))
        weight, bias = torch.randn(width, requires_grad=True), None if rms else torch.randn(width, requires_grad=True)
        source = x.clone().requires_grad_()
        y = F.rms_norm(source, (width,), weight, 1e-5) if rms else F.layer_norm(source, (width,), weight, bias, 1e-5)
        y.backward(grad)
        found, mean, rstd = kernels.norm(x, weight.detach(), None if bias is None else bias.detach(), 1e-5, rms)
        torch.testing.assert_close(found, y.detach())
        dx, parts = kernels.norm_gradient(grad, x, weight.detach(), mean, rstd, other if added else None)
        assert source.grad is not None
        torch.testing.assert_close(dx, source.grad + other if added else source.grad)
        wanted = [weight.grad] if bias is None else [weight.grad, bias.grad, dx.sum(0)]
        for found, one in zip(parts.sum(1), wanted, strict=True):
            torch.testing.assert_close(found, one, rtol=1e-4, atol=1e-4)
    print("norm")


def gradients_of_norms() -> None:
    """Added where they are kept, once a pass, with hooks told; handed on where nothing is kept."""
    fused.has_kernels, fused.is_busy = (lambda *sizes: True), (lambda *sizes: True)
    for rms, kept in itertools.product((False, True), (False, True)):
        x, grad = torch.randn(70, 40), torch.randn(70, 40)
        start = torch.randn(2 - rms, 40)
        ours, theirs = ([nn.Parameter(one.clone()) for one in start] for _ in range(2))
        told: list[torch.Tensor] = []
        for parameter in ours:
            if kept:
                parameter.grad = torch.zeros(40)
                parameter.register_post_accumulate_grad_hook(told.append)
        for _ in range(2):
            y, residual = fused.norm(x.clone().requires_grad_(), ours[0], ours[1] if len(ours) > 1 else None, 1e-5, rms)
            torch.autograd.backward([y, residual], [grad, torch.zeros_like(grad)])
            wanted = F.rms_norm(x, (40,), theirs[0], 1e-5) if rms else F.layer_norm(x, (40,), theirs[0], theirs[1], 1e-5)
            wanted.backward(grad)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
        assert not kept or {id(one) for one in told} == {id(one) for one in ours}
    print("gradients")


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
        found = torch.ones(width)
        kernels.add_column_sums(kernels.column_parts(x), found)
        torch.testing.assert_close(found, x.sum(0) + 1, rtol=1e-4, atol=1e-4)
    print("columns")


def gelus() -> None:
    for (rows, width), approximate in itertools.product(((1, 5), (300, 200)), ("none", "tanh")):
        x, grad = 3 * torch.randn(rows, width), torch.randn(rows, width)
        source = x.clone().requires_grad_()
        y = F.gelu(source, approximate=approximate)
        y.backward(grad)
        torch.testing.assert_close(kernels.gelu(x, approximate == "tanh"), y.detach())
        found, parts = kernels.gelu_gradient(grad, x, approximate == "tanh")
        assert source.grad is not None
        torch.testing.assert_close(found, source.grad)
        torch.testing.assert_close(parts.sum(0), source.grad.sum(0), rtol=1e-4, atol=1e-4)
    print("gelu")


def carried_sums() -> None:
    """A bias before a GELU gets the sums that come with the gradient, unless that was changed on its way."""
    fused.has_kernels, fused.is_busy = (lambda *sizes: True), (lambda *sizes: True)
    for changed in (False, True):
        x, bias = torch.randn(40, 16), torch.zeros(16)
        source = x.clone().requires_grad_()
        fused.gelu(source).backward(torch.ones(40, 16))
        dx, parts = kernels.gelu_gradient(torch.ones(40, 16), x, False)
        fused._bring_sums(dx, parts)
        if changed:
            dx.add_(1.0)
        fused._add_column_sums(dx, bias, at_once=False)
        assert source.grad is not None
        torch.testing.assert_close(bias, source.grad.sum(0) + 40.0 * changed, rtol=1e-4, atol=1e-4)
    print("carried")


def plain_attention(
    parts: list[torch.Tensor], counts: tuple[int, int, int], lengths: list[int], causal: bool, window: int
) -> torch.Tensor:
    """Each sample alone, in fp64."""
    results = []
    for one in torch.cat(parts, 1).double().split(lengths):
        query, key, value = one.transpose(0, 1).split(list(counts))
        key, value = (x.repeat_interleave(counts[0] // counts[1], 0) for x in (key, value))
        distance = torch.arange(len(one[:, 0]))[:, None] - torch.arange(len(one[:, 0]))[None, :]
        hidden = (distance < 0) & causal | (distance >= (window or len(one)))
        scores = (query @ key.transpose(1, 2) * 0.2).masked_fill(hidden, -float("inf"))
        results.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(results)


def attention() -> None:
    cases = (
        ([5, 3, 40, 1, 130, 17], (1, 1, 1), True, 0, [3]),
        ([5, 70, 1, 130], (4, 2, 2), True, 0, [4, 2, 2]),
        ([100, 1, 1, 60], (2, 1, 1), False, 0, [3, 1]),
        ([150], (1, 1, 1), True, 70, [3]),
        ([33] * 5, (2, 2, 2), True, 9, [4, 2]),
        ([126, 4, 2], (1, 1, 1), True, 0, [3]),
        ([64, 64, 1], (1, 1, 1), False, 0, [3]),
    )
    for lengths, counts, causal, window, cuts in cases:
        joint = torch.randn(sum(lengths), sum(counts), 16)
        ours, theirs = ([part.clone().requires_grad_() for part in joint.split(cuts, 1)] for _ in range(2))
        ids = torch.zeros(sum(lengths), dtype=torch.int64)
        pieces = Sequences(ids, tuple(lengths), "packed", max(lengths), torch.arange(len(lengths))).pieces(causal=causal)
        found = ragged_attention(ours, counts, pieces, scale=0.2, causal=causal, window=window)
        wanted = plain_attention(theirs, counts, lengths, causal, window)
        grad = torch.randn_like(found)
        found.backward(grad)
        wanted.backward(grad.double())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    print("attention")


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
    gradients_of_norms()
    losses()
    columns()
    gelus()
    carried_sums()
    attention()
    updates()
