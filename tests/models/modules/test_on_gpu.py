"""What only a GPU can show: own kernels there, in bf16, against each sample alone in doubles."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.models.modules.batch import Sequences
from penstock.models.modules.fused import has_triton

if not torch.cuda.is_available() or not has_triton():
    pytest.skip("needs a GPU and triton", allow_module_level=True)

LENGTHS = ([96] * 8, [31, 76, 200, 12, 55, 90, 130, 77], [511, 3], [1], [2048, 7, 1, 1000])


@pytest.mark.parametrize(("lengths", "width"), list(itertools.product(LENGTHS, (16, 32, 64, 128))))
@pytest.mark.parametrize(("counts", "causal", "window"), [((4, 4, 4), True, 0), ((4, 2, 2), True, 50), ((2, 1, 1), False, 0)])
def test_ragged_attention(lengths: list[int], width: int, counts: tuple[int, int, int], causal: bool, window: int) -> None:
    from penstock.models.modules.ragged_attention import ragged_attention

    torch.manual_seed(0)
    joint = torch.randn(sum(lengths), sum(counts), width, device="cuda", dtype=torch.bfloat16)
    ours, theirs = joint.clone().requires_grad_(), joint.double().requires_grad_()
    ids = torch.zeros(sum(lengths), dtype=torch.int64, device="cuda")
    pieces = Sequences(ids, tuple(lengths), "packed", max(lengths), torch.arange(len(lengths))).pieces(causal=causal)
    found = ragged_attention([ours], counts, pieces, scale=width**-0.5, causal=causal, window=window)
    wanted = torch.cat([_alone(part, counts, width**-0.5, causal, window) for part in theirs.split(lengths)])
    grad = torch.randn_like(found)
    found.backward(grad)
    wanted.backward(grad.double())
    assert ours.grad is not None and theirs.grad is not None
    for one, other in ((found, wanted), (ours.grad, theirs.grad)):
        assert torch.isfinite(one).all()
        assert (one.double() - other).norm() < 1e-2 * other.norm()


def _alone(sample: torch.Tensor, counts: tuple[int, int, int], scale: float, causal: bool, window: int) -> torch.Tensor:
    query, key, value = sample.transpose(0, 1).split(list(counts))
    key, value = (x.repeat_interleave(counts[0] // counts[1], 0) for x in (key, value))
    place = torch.arange(len(sample), device=sample.device)
    distance = place[:, None] - place[None, :]
    hidden = (distance < 0) & causal | (distance >= (window or len(sample)))
    return ((query @ key.transpose(1, 2) * scale).masked_fill(hidden, -float("inf")).softmax(-1) @ value).transpose(0, 1)
