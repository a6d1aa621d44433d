"""A layout never changes the numbers: packed, padded and alone, a sample gives the same logits, gradients and dropout masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_models import loud_chain, small_batch, small_model

from penstock.errors import InputError
from penstock.models.modules import Batch, Chain, Sequences, TensorParallel, build_chain, build_op
from penstock.models.modules.dropout import keep_mask, keyed_dropout
from penstock.models.ops import Model, PlacedOp

LENGTHS = [7, 12, 1, 9]
LAYOUTS = [("gpt", "packed"), ("llama", "packed"), ("bert", "packed")] + [(name, "padded") for name in ("gpt", "llama", "bert", "t5")]
DROPPING = {
    "gpt": {"dropout": 0.3, "attention_dropout": 0.2, "fused_attention": False},
    "bert": {"dropout": 0.3, "attention_dropout": 0.2, "fused_attention": False},
    "llama": {"dropout": 0.3},
    "t5": {"dropout": 0.3},
}


def make_batch(model: Model, layout: Any, lengths: list[int] = LENGTHS, **more: Any) -> Batch:
    """A micro-batch with padding to spare where the layout pads; without BERT's second task, which weighs samples, not tokens."""
    rows = {} if layout == "packed" else {"row_length": 14, "dec_row_length": 8}
    return replace(small_batch(model, lengths, layout, **rows, **more), next_sentence=None)


def positions(side: Sequences, sample: int) -> slice:
    """Where a sample's real tokens lie."""
    spans = side.lengths if side.layout == "packed" else (side.row_length,) * side.num_rows
    start = sum(spans[:sample])
    return slice(start, start + side.lengths[sample])


def alone(batch: Batch, sample: int) -> Batch:
    """One sample of a micro-batch as a micro-batch of its own, without padding."""

    def side(whole: Sequences | None) -> Sequences | None:
        if whole is None:
            return None
        here, length = positions(whole, sample), whole.lengths[sample]
        types = None if whole.types is None else whole.types[here]
        return Sequences(whole.ids[here], (length,), "padded", length, whole.samples[sample : sample + 1], types)

    here = positions(batch.decoder or batch.own, sample)
    return replace(batch, labels=batch.labels[here], weights=batch.weights[here], own=side(batch.own), decoder=side(batch.decoder))


def run(chain: Chain, batch: Batch, recompute: Any = ()) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Logits, loss and the gradient of every parameter."""
    chain.zero_grad()
    carry = Chain(chain.ops[:-1], chain.places[:-1])(batch, recompute=recompute)
    logits = carry["logits"].detach().clone()
    loss = chain.ops[-1](carry, batch)["loss"]
    loss.backward()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in chain.parameters()]
    return logits, loss.detach(), grads


def assert_equals_alone(chain: Chain, batch: Batch) -> None:
    """Logits at real tokens, the loss, and the gradients summed over samples."""
    logits, loss, grads = run(chain, batch)
    assert logits.std() > 0.1  # Far above the tolerances.
    parts = []
    for sample in range(batch.own.num_rows):
        parts.append(run(chain, alone(batch, sample)))
        here = positions(batch.decoder or batch.own, sample)
        torch.testing.assert_close(logits[here], parts[-1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, sum(part[1] for part in parts), rtol=1e-5, atol=1e-6)
    for grad, *others in zip(grads, *(part[2] for part in parts), strict=True):
        torch.testing.assert_close(grad, sum(others), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
@pytest.mark.parametrize("dropping", [False, True], ids=["plain", "dropout"])
def test_a_micro_batch_equals_its_samples_alone(family: str, layout: Any, dropping: bool) -> None:
    model = small_model(family, **(DROPPING[family] if dropping else {}))
    batch = make_batch(model, layout)
    samples = torch.tensor([40, 3, 11, 7])
    for side in filter(None, (batch.own, batch.decoder)):
        side.samples = samples
    assert_equals_alone(loud_chain(model), batch)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_sliding_window(layout: Any) -> None:
    model = small_model("llama", window=3)
    batch = make_batch(model, layout)
    chain = loud_chain(model)
    assert_equals_alone(chain, batch)
    wide, _, _ = run(loud_chain(small_model("llama")), batch)
    narrow, _, _ = run(chain, batch)
    first = positions(batch.own, 1).start
    torch.testing.assert_close(narrow[first : first + 3], wide[first : first + 3])
    assert not torch.allclose(narrow[first + 3], wide[first + 3], atol=1e-2)


@pytest.mark.parametrize("window", [0, 3])
def test_attention_against_loops(window: int) -> None:
    """Rotation by complex numbers, grouped queries, causal window: one query and one head at a time."""
    model = small_model("llama", window=window)
    placed = next(p for p in model.ops if p.op.kind == "attention")
    heads, kv_heads, width = 4, 2, 8
    batch = make_batch(model, "packed")
    qkv = torch.randn(sum(LENGTHS), (heads + 2 * kv_heads) * width, generator=torch.Generator().manual_seed(0))
    hidden = torch.zeros(sum(LENGTHS), 32)
    found = build_op(placed)({"qkv": qkv, "residual": hidden}, batch)["context"].view(-1, heads, width)

    speeds = 500000.0 ** (-torch.arange(0, width, 2) / width)
    q, k, v = qkv.view(-1, heads + 2 * kv_heads, width).split([heads, kv_heads, kv_heads], 1)
    turns = torch.polar(torch.ones(sum(LENGTHS), width // 2), batch.own.positions[:, None] * speeds)[:, None]
    q, k = (torch.complex(x[..., : width // 2], x[..., width // 2 :]) * turns for x in (q, k))
    for sample in range(len(LENGTHS)):
        here = positions(batch.own, sample)
        for query in range(here.start, here.stop):
            first = max(here.start, query - window + 1) if window else here.start
            for head in range(heads):
                keys, values = k[first : query + 1, head // 2], v[first : query + 1, head // 2]
                chances = ((q[query, head] * keys.conj()).real.sum(-1) * width**-0.5).softmax(0)
                torch.testing.assert_close(found[query, head], chances @ values, rtol=1e-4, atol=1e-5)


def test_attention_dropout_needs_the_unfused_path() -> None:
    for family in ("gpt", "bert"):
        with pytest.raises(InputError, match=r"attention_dropout=0\.1 exists only on the unfused path"):
            small_model(family, attention_dropout=0.1)
    placed = next(p for p in small_model("gpt").ops if p.op.kind == "attention")
    op = replace(placed.op, config={**placed.op.config, "dropout": 0.1})
    with pytest.raises(InputError, match=r"layers\.0\.attention.*attention dropout 0\.1"):
        build_op(PlacedOp(placed.index, placed.name, placed.block, op))


def test_dropped_chances_follow_step_and_seed_and_not_how_heads_are_divided() -> None:
    """Nor are any dropped in an evaluation."""
    places = [next(p for p in small_model("gpt", fused_attention=False, attention_dropout=share).ops if p.op.kind == "attention")
              for share in (0.3, 0.0)]  # fmt: skip
    batch, heads, width = make_batch(small_model("gpt"), "padded"), places[0].op.config["heads"], places[0].op.config["head_width"]
    tokens = len(batch.side("own").ids)
    qkv = torch.randn(tokens, 3, heads, width, generator=torch.Generator().manual_seed(0))

    def context(of: Batch, first: int = 0, last: int = heads, tp: TensorParallel | None = None, at: int = 0) -> torch.Tensor:
        carry = {"qkv": qkv[:, :, first:last].reshape(tokens, -1), "residual": torch.zeros(tokens, heads * width)}
        return build_op(places[at], tp)(carry, of)["context"].view(tokens, -1, width)

    whole = context(batch)
    for rank in range(2):
        first, last = rank * heads // 2, (rank + 1) * heads // 2
        torch.testing.assert_close(context(batch, first, last, TensorParallel(rank, 2)), whole[:, first:last])
    others = [context(replace(batch, **change)) for change in ({"step": 1}, {"seed": 1}, {"training": False})]
    assert not any(torch.allclose(one, whole) for one in others) and not torch.allclose(others[0], others[1])
    torch.testing.assert_close(others[2], context(batch, at=1))


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_the_unfused_path_equals_the_fused_one(family: str) -> None:
    for layout in ("packed", "padded"):
        fused, unfused = (loud_chain(small_model(family, fused_attention=choice)) for choice in (True, False))
        batch = make_batch(small_model(family), layout)
        for a, b in zip(run(fused, batch)[2], run(unfused, batch)[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dropout_masks_differ_by_op_step_and_seed() -> None:
    model = small_model("gpt", dropout=0.3)
    chain = loud_chain(model)
    batch = make_batch(model, "packed")
    logits = [run(chain, replace(batch, step=step, seed=seed))[0] for step, seed in ((0, 0), (1, 0), (0, 1), (0, 0))]
    assert torch.equal(logits[0], logits[3])
    assert not torch.equal(logits[0], logits[1]) and not torch.equal(logits[0], logits[2]) and not torch.equal(logits[1], logits[2])
    still = run(chain, replace(batch, training=False))[0]
    assert torch.equal(still, run(chain, replace(batch, training=False, step=1))[0]) and not torch.equal(still, logits[0])
    ones = {"hidden": torch.ones(sum(LENGTHS), 32), "residual": torch.zeros(sum(LENGTHS), 32)}
    dropped = [op.drop(ones["hidden"], batch) for op in chain.ops if op.config.get("dropout")]
    assert len({tuple((x != 0).flatten().tolist()) for x in dropped}) == len(dropped) == 5


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_dropout_rate_and_gradient(probability: float) -> None:
    rows = torch.arange(2000) * 1_000_003
    kept = keep_mask(rows, 64, probability, key=12345)
    spread = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(1 - kept.float().mean() - probability) < 5 * spread
    for dim, count in ((0, 2000), (1, 64)):  # No column and no row is dropped unlike the others.
        limit = 6 * (probability * (1 - probability) / count) ** 0.5
        assert (1 - kept.float().mean(dim) - probability).abs().max() < limit
    x = torch.ones(2000, 64, requires_grad=True)
    y = keyed_dropout(x, rows, probability, 12345)
    y.sum().backward()
    assert torch.equal(y != 0, kept)
    assert torch.equal(x.grad, y)  # The gradient of a sum over ones is the mask, scaled alike.
    assert keyed_dropout(x, rows, 0.0, 1) is x


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5"])
def test_recomputing_changes_no_bit(family: str) -> None:
    model = small_model(family, **DROPPING[family])
    chain, batch = loud_chain(model), make_batch(model, "padded")
    plain = run(chain, batch)
    for recompute in (range(model.num_ops - 1), range(1, model.num_ops - 1, 2)):
        again = run(chain, batch, recompute)
        assert torch.equal(plain[1], again[1])
        assert all(torch.equal(a, b) for a, b in zip(plain[2], again[2], strict=True))


@pytest.mark.parametrize(("family", "layout"), LAYOUTS)
def test_training_lowers_the_loss(family: str, layout: Any) -> None:
    model = small_model(family)
    chain, batch = build_chain(model), small_batch(model, LENGTHS, layout)
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = chain(batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.97 * losses[0], losses


def test_tokens_without_a_type_are_of_the_first() -> None:
    """As BERT's own modules have it where no types are given."""
    model = small_model("bert")
    chain, batch = loud_chain(model), make_batch(model, "packed")
    own = batch.side("own")
    assert own.types is not None and own.types.any()
    given = None, torch.zeros_like(own.types), own.types
    losses = [chain(replace(batch, own=replace(own, types=types)))["loss"].item() for types in given]
    assert losses[0] == losses[1] != losses[2]
