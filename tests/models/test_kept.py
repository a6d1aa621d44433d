"""Kept bytes by the rule of the union, worked out by hand for one layer; the additive view agrees with it."""

from __future__ import annotations

from collections import Counter

import pytest
from oracles.kept import kept_bytes

from penstock.models.catalog import resolve_model
from penstock.models.kept import kept_per_op, shortened
from penstock.models.segments import segments
from penstock.models.shapes import Shape

NAMES = ("gpt-tiny", "llama-tiny", "bert-tiny", "t5-tiny")
SHAPE = Shape.padded(3, 10, 6)


def test_one_layer_of_a_gpt() -> None:
    model = resolve_model("gpt-1.3b")
    width, heads, item = 2048, 32, 2
    statistics = 2 * 2 * 4
    tensors = 1 + 1 + 3 + 1 + 1 + 1 + 4 + 4  # hidden, norm1, qkv, context, hidden, norm2, ffn, act; each residual is a hidden.
    layer = tensors * width * item + heads * 4 + statistics
    assert kept_bytes(model, 1, 9, SHAPE) == SHAPE.tokens * layer
    whole = 2 + 2  # hidden and norm of both halves
    per_rank = (whole + (tensors - whole) / 4) * width * item + heads * 4 / 4 + statistics
    assert kept_bytes(model, 1, 9, SHAPE, tp=4) == SHAPE.tokens * per_rank


def test_a_recomputed_segment_keeps_its_input_alone() -> None:
    model = resolve_model("gpt-1.3b")
    size = SHAPE.tokens * 2048 * 2
    assert kept_bytes(model, 1, 9, SHAPE, recompute=range(8)) == size
    # From `up` (position 5) on: hidden and residual enter, and the residual is what norm2 saves anyway.
    before = kept_bytes(model, 1, 6, SHAPE)
    assert kept_bytes(model, 1, 9, SHAPE, recompute=[5, 6, 7]) == before + size
    # Attention alone: qkv enters, its result is kept because `out` saves it; only the log-sums go.
    assert kept_bytes(model, 1, 9, SHAPE, recompute=[2]) == kept_bytes(model, 1, 9, SHAPE) - SHAPE.tokens * 32 * 4


def test_the_row_split_by_outputs_keeps_a_gathered_input() -> None:
    model = resolve_model("gpt-1.3b")
    algos = [0, 0, 0, 1, 0, 0, 0, 0]
    more = kept_bytes(model, 1, 9, SHAPE, tp=2, algos=algos) - kept_bytes(model, 1, 9, SHAPE, tp=2)
    assert more == SHAPE.tokens * 2048 * 2


@pytest.mark.parametrize("name", NAMES)
def test_per_op_bytes_add_up(name: str) -> None:
    model = resolve_model(name)
    per_op = kept_per_op(model)
    for tp in (1, 2):
        amounts = [amount.at(SHAPE, tp) for amount in per_op]
        assert sum(amounts) == kept_bytes(model, 0, model.num_ops, SHAPE, tp)
        for start in range(model.num_ops):
            for stop in range(start + 1, model.num_ops + 1, 3):
                missing = kept_bytes(model, start, stop, SHAPE, tp) - sum(amounts[start:stop])
                assert -1e-6 <= missing <= model.boundary_bytes(start).at(SHAPE, tp)


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_everything_keeps_what_enters_each_block(name: str) -> None:
    model = resolve_model(name)
    for start in range(1, model.num_ops):
        parts = segments(model.ops[start:], range(model.num_ops - start))
        entering = sum(model.boundary_bytes(start + part.start).at(SHAPE) for part in parts)
        kept = kept_bytes(model, start, model.num_ops, SHAPE, recompute=range(model.num_ops - start))
        # T5's encoder output and bias tables enter many blocks, but are held once.
        assert kept <= entering if model.family == "t5" else kept == entering


@pytest.mark.parametrize("name", ["gpt-1.3b", "t5-770m", "gpt-tiny"])
def test_a_shortened_model_stands_for_every_op_of_the_whole(name: str) -> None:
    model = resolve_model(name)
    short, weights = shortened(model)
    stands = Counter[str]()
    for place, weight in zip(short.ops, weights, strict=True):
        stands[place.op.signature] += weight  # type: ignore[assignment]
    assert stands == Counter(place.op.signature for place in model.ops)
