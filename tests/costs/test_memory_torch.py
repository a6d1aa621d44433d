"""The replay of a micro-batch against the storages that torch really holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.costs.memory import activation_timeline
from penstock.models import resolve_model
from penstock.models.modules.batch import random_batch
from penstock.models.modules.build import build_chain


class Storages(TorchDispatchMode):
    """Counts the bytes of all storages that ops create, until they are freed."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.level = self.peak = 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in known}

    def _free(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.level -= size

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                storage = tensor.untyped_storage()
                self._alive.add(storage._cdata)
                self.level += storage.nbytes()
                self.peak = max(self.peak, self.level)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result


LAYERS = (1, 33)
"""The four layers of gpt-tiny."""


@pytest.mark.parametrize("recompute", [(), range(32), [i for i in range(32) if i % 3], [*range(8, 16), 20, 21]])
def test_a_gpt_holds_what_the_replay_says(recompute: Iterable[int]) -> None:
    model, flags = resolve_model("gpt-tiny"), frozenset(recompute)
    batch = random_batch([128, 128], 512)
    chain = build_chain(model, *LAYERS)
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sides = batch.own
    assert sides is not None
    known = [*chain.parameters(), *(p.grad for p in chain.parameters() if p.grad is not None), sides.ids, sides.positions, sides.bounds]
    with Storages(known) as storages:
        carry = {spec.name: torch.randn(spec.shape(batch.shape)).requires_grad_() for spec in model.carry_before(LAYERS[0])}
        inputs = list(carry.values())
        output = chain(batch, carry, flags)["hidden"]
        del carry
        held, forward_peak, storages.peak = storages.level, storages.peak, storages.level
        output.backward(torch.ones_like(output))
    expected = activation_timeline(model, *LAYERS, batch.shape, recompute=flags)
    hidden = inputs[0].nbytes
    # The test still holds the output, which a stage has sent away by then, and the last sum of a layer needs a moment for both terms.
    assert held == pytest.approx(expected.held_bytes + hidden, rel=0.01)
    assert expected.forward_peak_bytes * 0.99 <= forward_peak <= expected.forward_peak_bytes * 1.01 + hidden
    # Products that are not recomputed add to weight gradients in place; the replay counts the largest as made first.
    spared = max(parameter.nbytes for parameter in chain.parameters())
    assert expected.backward_peak_bytes * 0.99 - spared <= storages.peak <= expected.backward_peak_bytes * 1.01 + hidden


def test_the_mask_of_a_window_is_made_and_held_as_the_replay_says() -> None:
    """Of rows so long that it is nearly all there is; one of 512 × 512 for both of them."""
    model = small_model("llama", window=100, seq_length=512)
    (index,) = (place.index for place in model.ops[:9] if place.op.kind == "attention")
    batch, chain = random_batch([512, 512], 64), build_chain(model, index, index + 1)
    carry = {spec.name: torch.randn(spec.shape(batch.shape)).requires_grad_() for spec in model.carry_before(index)}
    chain(batch, carry)  # makes the rotary angles
    with Storages(carry.values()) as storages:
        output = chain(batch, carry)
    shape, taken = batch.shape, sum(x.nbytes for x in carry.values())
    found, plain = (activation_timeline(one, index, index + 1, shape) for one in (model, small_model("llama", seq_length=512)))
    assert found.held_bytes - plain.held_bytes == 4 * 512**2
    assert storages.level + taken == pytest.approx(found.held_bytes, rel=0.1)
    assert storages.peak + taken == pytest.approx(found.forward_peak_bytes, rel=0.1)
    packed = replace(shape, layout="packed")
    assert activation_timeline(model, index, index + 1, packed) == activation_timeline(small_model("llama"), index, index + 1, packed)
    del output
