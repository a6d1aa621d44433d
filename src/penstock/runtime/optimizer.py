"""AdamW for weights in half precision: fp32 master weights and moments, worked through in pieces of bounded size.

The fp32 copy of one piece's gradients is the only extra memory that a step takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from penstock.costs.memory import OPTIMIZER_CHUNK

__all__ = ["MasterAdamW", "make_adamw"]



@dataclass
class _Piece:
    """A run of weights that one fused step updates, spread over parts of some parameters."""

    spans: list[tuple[nn.Parameter, int, int]]
    master: nn.Parameter
    optimizer: torch.optim.Optimizer

    def views(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of `tensors` (weights or gradients, one per span) that belong to this piece."""
        return [tensor.view(-1)[start:stop] for tensor, (_, start, stop) in zip(tensors, self.spans, strict=True)]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """A flat fp32 tensor of this piece cut like its spans."""
        return list(flat.split([stop - start for _, start, stop in self.spans]))


class MasterAdamW:
    """Keeps per weight: fp32 master, two fp32 moments. Weights and gradients stay in their own dtype."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float, chunk: int = OPTIMIZER_CHUNK) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._pieces = [self._piece(spans, lr, weight_decay) for spans in _spans(self.parameters, chunk)]

    def _piece(self, spans: list[tuple[nn.Parameter, int, int]], lr: float, weight_decay: float) -> _Piece:
        master = nn.Parameter(torch.cat([p.detach().view(-1)[start:stop].float() for p, start, stop in spans]))
        fused = master.device.type in ("cuda", "cpu")
        return _Piece(spans, master, torch.optim.AdamW([master], lr=lr, weight_decay=weight_decay, fused=fused))

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients in place."""
        for piece in self._pieces:
            grads = [p.grad for p, _, _ in piece.spans]
            if any(grad is None for grad in grads):
                missing = next(tuple(p.shape) for p, _, _ in piece.spans if p.grad is None)
                raise RuntimeError(f"a weight of shape {missing} has no gradient; was the backward pass run?")
            scratch = torch.empty_like(piece.master)
            torch._foreach_copy_(piece.split(scratch), piece.views(g for g in grads if g is not None))
            piece.master.grad = scratch
            piece.optimizer.step()
            piece.master.grad = None
            torch._foreach_copy_(piece.views(p.detach() for p, _, _ in piece.spans), piece.split(piece.master.detach()))
            del scratch

    def zero_grad(self) -> None:
        """Sets the gradients to zero in place: their memory stays."""
        torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])


class _PlainAdamW:
    """AdamW directly on fp32 weights, with gradients kept in place."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self._inner = torch.optim.AdamW(self.parameters, lr=lr, weight_decay=weight_decay, fused=True)

    def step(self) -> None:
        self._inner.step()

    def zero_grad(self) -> None:
        self._inner.zero_grad(set_to_none=False)


def make_adamw(parameters: Iterable[nn.Parameter], *, lr: float = 1e-4, weight_decay: float = 0.01) -> MasterAdamW | _PlainAdamW:
    """AdamW as the weights' dtype needs it: with fp32 masters for half precision, plain for fp32."""
    own = list(parameters)
    if own and own[0].dtype == torch.float32:
        return _PlainAdamW(own, lr=lr, weight_decay=weight_decay)
    return MasterAdamW(own, lr=lr, weight_decay=weight_decay)


def _spans(parameters: list[nn.Parameter], chunk: int) -> Iterator[list[tuple[nn.Parameter, int, int]]]:
    """Cuts the concatenation of all parameters into runs of at most `chunk` elements."""
    spans: list[tuple[nn.Parameter, int, int]] = []
    room = chunk
    for parameter in parameters:
        start = 0
        while start < parameter.numel():
            stop = min(parameter.numel(), start + room)
            spans.append((parameter, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield spans
                spans, room = [], chunk
    if spans:
        yield spans
