"""Token losses over logits that may be divided over the vocabulary, in pieces, keeping nothing but the logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from penstock.models.modules.base import Carry, OpModule
from penstock.models.modules.batch import Batch
from penstock.models.modules.fused import has_kernels
from penstock.models.modules.parallel import TensorParallel
from penstock.models.transformer import LOSS_CHUNK_ELEMENTS

__all__ = ["Loss", "weighted_cross_entropy"]


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, LOSS_CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, min(start + rows, logits.shape[0])) for start in range(0, logits.shape[0], rows)]


def _combine(log_sum: torch.Tensor, picked: torch.Tensor, tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sums and picked logits over all parts of the vocabulary."""
    parts = [torch.empty_like(log_sum) for _ in range(tp.size)]
    dist.all_gather(parts, log_sum, group=tp.group)
    dist.all_reduce(picked, group=tp.group)
    return torch.logsumexp(torch.stack(parts), 0), picked


class _CrossEntropy(torch.autograd.Function):
    """sum over tokens of weight × (log-sum-exp − logit of the label), in fp32.

    Each pass reads the logits once per piece: torch's (log-)softmax kernels convert to fp32 on the way.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, first: int, tp: TensorParallel
    ) -> torch.Tensor:
        local = labels - first
        mine = (local >= 0) & (local < logits.shape[-1])
        index = (local * mine)[:, None]
        log_sum, picked = _log_sums(logits, index, mine)
        whole = log_sum
        if tp.size > 1 and not tp.lone:
            whole, picked = _combine(log_sum, picked, tp)
        kept = whole if has_kernels(logits) else (log_sum - whole).exp_()
        ctx.save_for_backward(logits, kept, index, mine, weights)
        return ((whole - picked) * weights).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, kept, index, mine, weights = ctx.saved_tensors
        return _gradient(logits, kept, index, mine, weights * grads[0]), None, None, None, None


def _log_sums(logits: torch.Tensor, index: torch.Tensor, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of each row, and the logit at `index` where that is this rank's."""
    if has_kernels(logits):
        from penstock.models.modules import triton_kernels

        return triton_kernels.cross_entropy(logits.contiguous(), torch.where(mine, index[:, 0], -1))
    log_sum = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for rows in _chunks(logits):
        log_chance = torch.log_softmax(logits[rows], -1, dtype=torch.float32)
        torch.sub(logits[rows, 0], log_chance[:, 0], out=log_sum[rows])
        del log_chance
    return log_sum, logits.gather(1, index)[:, 0].float() * mine


def _gradient(logits: torch.Tensor, kept: torch.Tensor, index: torch.Tensor, mine: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """scale × (chance - 1 at the label); `kept` are log-sums over the whole vocabulary for own kernels, else this rank's share of them."""
    if has_kernels(logits):
        from penstock.models.modules import triton_kernels

        return triton_kernels.cross_entropy_gradient(logits.contiguous(), torch.where(mine, index[:, 0], -1), kept, scale)
    grad, factor = torch.empty_like(logits), (scale * kept)[:, None]
    for rows in _chunks(logits):
        chance = torch.softmax(logits[rows], -1, dtype=torch.float32)
        torch.mul(chance, factor[rows], out=grad[rows])
        del chance
    # Not scatter_add_: on a GPU it adds in any order, which torch refuses where bits are to be the same.
    grad[torch.arange(len(grad), device=grad.device), index[:, 0]] -= (scale * mine).to(grad.dtype)
    return grad


def weighted_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, tp: TensorParallel, first: int = 0
) -> torch.Tensor:
    """The weighted sum of token losses; `first` is the vocabulary index of this rank's first column."""
    return _CrossEntropy.apply(logits, labels, weights, first, tp)


class Loss(OpModule):
    """Cross entropy of the labels, weighted per token, plus BERT's next-sentence loss where the model has it."""

    def forward(self, carry: Carry, batch: Batch) -> Carry:
        assert batch.labels is not None and batch.weights is not None
        first = self.tp.shard(self.config["vocab"]).start
        loss = weighted_cross_entropy(carry["logits"], batch.labels, batch.weights, self.tp, first)
        if self.config["next_sentence"] and batch.next_sentence is not None:
            assert batch.sample_weights is not None
            losses = F.cross_entropy(carry["next_sentence"].float(), batch.next_sentence, reduction="none")
            loss = loss + (losses * batch.sample_weights).sum()
        return self.following(carry, loss=loss)
