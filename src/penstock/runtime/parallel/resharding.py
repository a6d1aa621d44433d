"""Between ops of one stage that are split differently: each rank hands over what others go on with.

The parts are those that would cross a cut between two such stages (`programs.routing`), gradients going back included.
"""

from __future__ import annotations

import torch

from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.base import Carry
from penstock.models.ops import Model
from penstock.programs.routing import Cut, Side, TensorLayout, carried
from penstock.runtime.transport.slices import DTYPES, outgoing, prepare
from penstock.runtime.transport.transport import RESHARD, Transport

__all__ = ["Reshard"]


class Reshard:
    """Hands the carry before op `op` from ranks divided as `before` to the same ranks divided as `after`."""

    def __init__(
        self, model: Model, op: int, before: Side, after: Side, ranks: tuple[int, ...], index: int, transport: Transport,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._cut = Cut(before, after, carried(model, op))
        self._ranks, self._index, self._transport, self._device = ranks, index, transport, device

    def forward(self, carry: Carry, micro: MicroBatch) -> Carry:
        """The carry as the ops after need it."""
        return self._move(carry, micro, gradient=False)

    def backward(self, gradients: Carry, micro: MicroBatch) -> Carry:
        """Gradients as the ops before left the carry; zero where another rank has the gradient of the same weights."""
        cut = self._cut
        found = self._move(gradients, micro, gradient=True)
        layout = TensorLayout(cut.before, micro)
        share, place = divmod(self._index, cut.before.tp)
        for tensor in cut.gradients:
            if tensor.name not in found:
                found[tensor.name] = torch.zeros(layout.shape(tensor, share, place), dtype=DTYPES[tensor.dtype], device=self._device)
        return found

    def _move(self, tensors: Carry, micro: MicroBatch, gradient: bool) -> Carry:
        result: Carry = {}
        sends, receives, landings = [], [], []
        for message in self._cut.messages(TensorLayout(self._cut.before, micro), TensorLayout(self._cut.after, micro), gradient):
            mine = outgoing(tensors, message.sent) if message.sender == self._index else []
            if message.receiver == self._index:
                arriving = prepare(result, message.received, self._device)
                landings += arriving
                if message.sender == self._index:
                    for landing, tensor in zip(arriving, mine, strict=True):
                        landing.arrives.copy_(tensor)
                else:
                    receives.append((self._ranks[message.sender], [landing.arrives for landing in arriving]))
            elif mine:
                sends.append((self._ranks[message.receiver], mine))
        self._transport.exchange(sends, receives, RESHARD)
        for landing in landings:
            landing.finish()
        return result
