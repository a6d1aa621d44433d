"""Two tensor-parallel ranks compute what one rank computes: loss, and the gradient of every weight put together again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from distributed import run_ranks
from live_bytes import as_on_cpu, measured_bytes
from oracles.kept import kept_bytes
from small_models import loud_chain, small_batch, small_model

from penstock.models.modules import Chain, TensorParallel
from penstock.models.ops import Model

CASES = [
    ("gpt", {"dropout": 0.2, "attention_dropout": 0.2, "fused_attention": False}),
    ("gpt", {"tied": False}),
    ("llama", {"qkv_bias": True}),
    ("llama", {"qk_norm": True}),
    ("bert", {}),
    ("t5", {"dropout": 0.2}),
    ("t5", {"gated": True, "activation": "gelu_tanh", "tied": False}),
]
WAYS = ("algo0", "algo1", "mixed")


def algos_of(model: Model, way: str) -> list[int]:
    """A split for each op; only linear ops have a second one."""
    wanted = {"algo0": [0], "algo1": [1], "mixed": [0, 1, 1]}[way]
    return [min(wanted[index % len(wanted)], len(placed.op.splits) - 1) for index, placed in enumerate(model.ops)]


def train(model: Model, tp: TensorParallel, algos: Sequence[int]) -> tuple[torch.Tensor, Chain]:
    chain = loud_chain(model, tp=tp, algos=algos)
    layout: Any = "packed" if "packed" in model.layouts else "padded"
    loss = chain(small_batch(model, [7, 12, 3], layout))["loss"]
    loss.backward()
    return loss.detach(), chain


def grads(chain: Chain) -> dict[str, torch.Tensor]:
    return {f"{op.name}.{name}": p.grad for op in chain.ops for name, p in op.named_parameters() if p.grad is not None}


def expected_shards(whole: Chain, part: Chain) -> dict[str, torch.Tensor]:
    """What this rank's gradients must be: its shard of the whole gradient, or all of it where the weight is repeated."""
    found = {}
    for one, mine in zip(whole.ops, part.ops, strict=True):
        for name, parameter in one.named_parameters():
            if parameter.grad is not None:
                shard = mine.shards[name]
                found[f"{one.name}.{name}"] = parameter.grad if shard is None else shard(parameter.grad)
    return found


def compare_on_rank(rank: int, family: str, changes: dict[str, Any]) -> None:
    """Every way to divide the model against the model in one piece."""
    model = small_model(family, **changes)
    loss, whole = train(model, TensorParallel(), algos_of(model, "algo0"))
    for way in WAYS:
        found, part = train(model, TensorParallel(rank, 2), algos_of(model, way))
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-6)
        expected, grad = expected_shards(whole, part), grads(part)
        assert grad.keys() == expected.keys()
        for name, value in expected.items():
            worst = float((grad[name] - value).abs().max() / value.abs().max())
            assert worst < 1e-3, f"{way} {name}: differs by {worst:.1e} of the largest gradient"


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_two_ranks_equal_one(family: str, changes: dict[str, Any]) -> None:
    run_ranks(compare_on_rank, 2, family, changes)


def describe_on_rank(rank: int, family: str, changes: dict[str, Any]) -> None:
    """Shapes of every carry and bytes kept, as the description tells them for one of two ranks."""
    model = small_model(family, vocab=62, **changes)  # The description divides evenly.
    batch = small_batch(model, [12, 12, 12])
    shape = batch.shape
    for way in WAYS:
        algos = algos_of(model, way)
        chain, carry = loud_chain(model, tp=TensorParallel(rank, 2), algos=algos), {}
        for op in chain.ops:
            carry = op(carry, batch)
            assert {name: tuple(x.shape) for name, x in carry.items()} == {spec.name: spec.shape(shape, 2) for spec in op.op.carry}, op.name
        told = as_on_cpu(model, batch)
        for start, stop, recompute in ((0, model.num_ops, []), (2, model.num_ops, range(0, model.num_ops - 2, 3))):
            # Of each token an embedding keeps its index in this rank's part, and whether it is in it.
            embedded = sum(9 * batch.side(placed.op.config["side"]).ids.numel()
                           for position, placed in enumerate(model.ops[start:stop])
                           if placed.op.kind == "embedding" and position not in recompute)  # fmt: skip
            kept = kept_bytes(told, start, stop, shape, 2, algos[start:stop], recompute) + embedded
            assert measured_bytes(chain, model, batch, start, stop, recompute, 2, kept) == kept, (way, start, recompute)


@pytest.mark.parametrize(("family", "changes"), [("gpt", {}), ("llama", {"qk_norm": True}), ("bert", {}), ("t5", {})])
def test_a_rank_is_as_described(family: str, changes: dict[str, Any]) -> None:
    run_ranks(describe_on_rank, 2, family, changes)


def gather_sizes(rank: int) -> dict[str, list[int]]:
    model = small_model("gpt")
    chain = loud_chain(model, tp=TensorParallel(rank, 2))
    return {name: list(p.shape) for name, p in chain.ops[0].named_parameters()} | {"logits": list(chain.ops[-2].weight.shape)}


def test_an_odd_vocabulary_is_divided_unevenly() -> None:
    first, second = run_ranks(gather_sizes, 2)
    assert (first["weight"], second["weight"]) == ([31, 32], [30, 32])
    assert (first["logits"], second["logits"]) == ([31, 32], [30, 32])
    assert first["positions"] == second["positions"] == [24, 32]


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one objects")
    torch.distributed.barrier()


def test_a_failing_rank_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 failed:.*rank one objects"):
        run_ranks(fail_on_one, 2)


def hang(rank: int) -> None:
    torch.distributed.barrier()
    if rank == 0:
        torch.distributed.recv(torch.zeros(1), src=1)


def test_a_hanging_rank_is_killed() -> None:
    with pytest.raises((TimeoutError, AssertionError)):
        run_ranks(hang, 2, timeout_s=4)
