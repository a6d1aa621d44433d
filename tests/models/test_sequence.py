"""The description under sequence parallelism against what two ranks really hold and send, and against the one without it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from live_bytes import Made, as_on_cpu
from oracles.kept import kept_bytes
from small_models import loud_chain, small_batch, small_model

from penstock.models import resolve_model
from penstock.models.modules import TORCH_DTYPES, TensorParallel
from penstock.models.ops import Model, Op
from penstock.models.sequence import by_rows, divides_tokens, with_sequence_parallelism
from penstock.models.shapes import Shape
from penstock.runtime.parallel.sequence import SequenceChain

FAMILIES = ("gpt", "llama", "bert", "t5")


def rows_chain(chain: Any, model: Model, start: int, stop: int) -> SequenceChain:
    places = model.ops[start:stop]
    return SequenceChain(chain.ops[start:stop], places, [model.carry_before(place.index) for place in places])


def entering(model: Model, start: int, shape: Shape) -> dict[str, torch.Tensor]:
    """Leaves for a stage of one of two ranks that begins at op `start`."""
    found = {}
    for spec in model.carry_before(start):
        sizes = list(spec.shape(shape, 2))
        if by_rows(spec):
            sizes[0] //= 2
        found[spec.name] = torch.ones(sizes, dtype=TORCH_DTYPES[model.dtype], requires_grad=True)
    return found


def held_on_rank(rank: int) -> None:
    for family in FAMILIES:
        check_held(rank, family)


def check_held(rank: int, family: str) -> None:
    """Bytes that the graph of a slice holds, with and without recomputation."""
    model = small_model(family, vocab=62)  # The description divides evenly.
    batch = small_batch(model, [12, 12, 12])
    told = with_sequence_parallelism(as_on_cpu(model, batch))
    chain = loud_chain(model, tp=TensorParallel(rank, 2))
    for start, stop, recompute in (
        (0, model.num_ops, []),
        (1, 9, []),
        (2, model.num_ops, range(0, model.num_ops - 2, 3)),
        (1, 9, range(8)),
    ):
        part, leaves = rows_chain(chain, model, start, stop), entering(model, start, batch.shape)

        def run(part: SequenceChain = part, leaves: dict[str, torch.Tensor] = leaves, recompute: Any = recompute) -> list[Any]:
            carry = {name: leaf * 1 for name, leaf in leaves.items()}
            return [(x * 1).grad_fn for x in part(batch, carry, recompute).values()]

        run()  # Makes the micro-batch's own tables.
        made = Made()
        with made:
            graph = run()
        embedded = sum(9 * batch.side(place.op.config["side"]).ids.numel()
                       for position, place in enumerate(model.ops[start:stop])
                       if place.op.kind == "embedding" and position not in recompute)  # fmt: skip
        expected = kept_bytes(told, start, stop, batch.shape, 2, recompute=recompute) + embedded
        deadline = time.monotonic() + 100
        while made.alive_bytes() != expected and time.monotonic() < deadline:
            time.sleep(0.02)  # The threads of a collective let go of its tensors a moment after it is done.
        assert made.alive_bytes() == expected, (start, stop, list(recompute))
        del graph


def test_a_rank_holds_what_is_described() -> None:
    run_ranks(held_on_rank, 2)


def sent_on_rank(rank: int) -> dict[str, list[tuple[str, str, int]]]:
    return {family: sent_by(rank, family) for family in FAMILIES}


def sent_by(rank: int, family: str) -> list[tuple[str, str, int]]:
    """The collectives of each op but the first, as (op, kind, bytes of the whole tensor); gloo sums and cuts to reduce-scatter."""
    model = small_model(family, vocab=62)
    batch = small_batch(model, [12, 12, 12])
    seen: list[tuple[str, int]] = []
    all_reduce, all_gather = dist.all_reduce, dist.all_gather

    def reduced(x: torch.Tensor, *more: Any, **named: Any) -> Any:
        seen.append(("sum", x.nbytes))
        return all_reduce(x, *more, **named)

    def gathered(parts: list[torch.Tensor], *more: Any, **named: Any) -> Any:
        seen.append(("gather", sum(part.nbytes for part in parts)))
        return all_gather(parts, *more, **named)

    dist.all_reduce, dist.all_gather = reduced, gathered  # type: ignore[assignment]
    try:
        chain, found = loud_chain(model, tp=TensorParallel(rank, 2)), []
        for place in model.ops[1:]:
            part, leaves = rows_chain(chain, model, place.index, place.index + 1), entering(model, place.index, batch.shape)
            seen.clear()
            carry = part(batch, {name: leaf * 1 for name, leaf in leaves.items()}, [])
            found += [(place.name, f"forward {kind}", size) for kind, size in seen]
            seen.clear()
            sum((x.float().sum() for x in carry.values() if x.requires_grad), torch.zeros(())).backward()
            found += [(place.name, f"backward {kind}", size) for kind, size in seen]
    finally:
        dist.all_reduce, dist.all_gather = all_reduce, all_gather  # type: ignore[assignment]
    return found


def test_a_rank_sends_what_is_described() -> None:
    found, _ = run_ranks(sent_on_rank, 2)
    names = {"all_reduce": "sum", "reduce_scatter": "sum", "all_gather": "gather"}
    for family in FAMILIES:
        model = small_model(family, vocab=62)
        told, shape = with_sequence_parallelism(model), small_batch(model, [12, 12, 12]).shape
        ops = [place for place in told.ops[1:] if place.op.kind not in ("loss", "attention")]  # as without sequence parallelism
        expected = [
            (place.name, f"{c.when} {names[c.kind]}", int(c.size_bytes(shape))) for place in ops for c in place.op.splits[0].collectives
        ]
        known = {place.name for place in ops}
        assert sorted(entry for entry in found[family] if entry[0] in known) == sorted(expected)


def test_one_layer_by_hand() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(2, 64)
    told, width = with_sequence_parallelism(model), 2048 * 2
    # Without: hidden and norm of both halves whole, the other twelve widths divided. With: both hidden states by rows, both norms gathered.
    saved = kept_bytes(model, 1, 9, shape, 4) - kept_bytes(told, 1, 9, shape, 4)
    statistics = 2 * 2 * 4
    assert saved == shape.tokens * (2 * width + statistics) * 3 / 4


def test_what_is_gathered_takes_room_while_an_op_runs() -> None:
    model, shape = resolve_model("t5-tiny"), Shape.padded(3, 10, 7)
    more: dict[str, list[tuple[float, float]]] = {}
    for plain, rows in zip(model.ops, with_sequence_parallelism(model).ops, strict=True):
        before, now = ((place.op.workspace.at(shape, 2), place.op.backward_workspace.at(shape, 2)) for place in (plain, rows))
        more.setdefault(plain.op.name, []).append((now[0] - before[0], now[1] - before[1]))
    width = model.config["hidden"] * 4
    own, decoder, layers = 30 * width, 21 * width, model.config["layers"]
    for name in ("qkv", "up"):  # the input of a product by column
        assert more[name] == [(own, own)] * layers + [(decoder, decoder)] * layers
    for name in ("out", "down"):  # the result of a product by row
        assert more[name] == [(own, own)] * layers + [(decoder, decoder)] * layers
    assert more["cross_kv"] == [(own, own)] * layers and more["cross_q"] == [(decoder, decoder)] * layers
    assert more["embedding"] == [(own, own), (decoder, decoder)] and more["logits"] == [(decoder, 0)]
    assert set(more["norm1"] + more["act"] + more["attention"]) == {(0, 0)}


def test_products_that_divide_the_other_way_gather_what_they_need_whole() -> None:
    model, shape = resolve_model("gpt-1.3b"), Shape.padded(2, 64)
    plain, rows = ({place.op.name: place.op for place in m.ops[1:9]} for m in (model, with_sequence_parallelism(model)))

    def sent(op: Op) -> list[tuple[str, str, float]]:
        return [(c.kind, c.when, c.size_bytes(shape)) for c in op.splits[1].collectives]

    hidden = 128 * 2048 * 2
    assert sent(rows["qkv"]) == [("all_gather", "forward", hidden), *sent(plain["qkv"])]
    assert rows["qkv"].splits[1].kept.at(shape, 4) == hidden
    assert sent(rows["out"]) == [("all_gather", "forward", hidden), *sent(plain["out"]), ("all_gather", "backward", hidden)]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_grows_and_one_rank_notices_nothing_but_copies(family: str) -> None:
    model = small_model(family)
    told, shape = with_sequence_parallelism(model), small_batch(model, [12, 12, 12]).shape
    for plain, rows in zip(model.distinct_ops, told.distinct_ops, strict=True):
        assert plain.signature == rows.signature
        for amount in ("flops", "backward_flops", "parameters"):
            assert getattr(rows, amount).at(shape, 1) == getattr(plain, amount).at(shape, 1)
        for amount in ("flops", "traffic", "backward_traffic"):
            assert getattr(rows, amount).at(shape, 2) <= getattr(plain, amount).at(shape, 2)
    for cut in range(model.num_ops):
        assert told.boundary_bytes(cut).at(shape, 2) <= model.boundary_bytes(cut).at(shape, 2)


def large_sends(op: Op, shape: Shape) -> float:
    """Bytes that an op's collectives move, an all-reduce being both of the others."""
    return sum(
        (2 if c.kind == "all_reduce" else 1) * c.size_bytes(shape) for c in op.splits[0].collectives if "one" not in c.size_bytes.terms()
    )


def test_a_layer_sends_the_same_bytes() -> None:
    model, shape = resolve_model("llama-8b"), Shape.padded(2, 64)
    told = with_sequence_parallelism(model)
    plain, rows = ([large_sends(place.op, shape) for place in m.ops[1:10]] for m in (model, told))
    assert sum(plain) == sum(rows) > 0


def test_models_without_tokens_have_no_rows() -> None:
    assert not divides_tokens(resolve_model("resnet-tiny")) and not divides_tokens(resolve_model("vgg-tiny"))
    assert all(divides_tokens(resolve_model(f"{family}-tiny")) for family in FAMILIES)
