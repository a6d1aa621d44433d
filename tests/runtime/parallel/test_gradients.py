"""Gradients in buckets: many that fill give what one does, and what plain torch gives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bucket_jobs import train_in_small_buckets
from runtime_cases import Case, Choice, largest_difference, make_case, reference
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_jobs import RandomSource, rank_of, train_programs

from penstock.models.modules import build_chain
from penstock.plans.references import model_of
from penstock.programs.instructions import ReduceStart
from penstock.runtime.parallel import gradients
from penstock.runtime.parallel.gradients import Bucket, BucketedGradients, Gradients
from penstock.runtime.parallel.sharding import Done
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.source import load_share
from penstock.runtime.transport.world import ProcessGroups
from penstock.runtime.workers import WorkerPool

SGD = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"))
BUCKET_BYTES = 2**13
TOLERANCE = 1e-5
TWO: Choice = {"family": "llama", "pp": 1, "tp": 1, "dp": 1, "replicas": 2, "schedule": "1f1b", "layout": "packed", "recompute": "none",
               "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


class CountedCasts(TorchDispatchMode):
    """Counts tensors of half precision that are copied into tensors of fp32."""

    to_fp32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.to_fp32 += args[0].dtype == torch.bfloat16 and result.dtype == torch.float32
        return result


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, timeout_s=200) as workers:
        yield workers


def test_weights_go_into_buckets_until_one_is_full() -> None:
    """Every weight lies in one bucket, last op first; all but the last of a run would overflow with the first weight of the next."""
    case = make_case(TWO | {"replicas": 1}, 3)
    rank = rank_of(case.plan, ProcessGroups(), SGD)
    (stage,) = rank.stages.values()
    buckets = BucketedGradients(stage, rank.world, BUCKET_BYTES).buckets
    found = [held for bucket in buckets for held in bucket.held]
    assert sorted(id(held.parameter) for held in found) == sorted(id(held.parameter) for held in stage.held) and len(buckets) > 5
    assert [held.place.index for held in found] == sorted((held.place.index for held in found), reverse=True)
    for bucket, following in pairwise(buckets):
        assert bucket.flat.nbytes + following.held[0].parameter.nbytes > BUCKET_BYTES
        assert len(bucket.held) == 1 or bucket.flat.nbytes <= BUCKET_BYTES
    for bucket in buckets:
        assert all(held.parameter.grad.untyped_storage()._cdata == bucket.flat.untyped_storage()._cdata for held in bucket.held)


def test_what_a_pass_brings_is_added_as_it_is() -> None:
    """Gradients in half precision go into sums in fp32 without a copy in fp32 first: one kernel for each, and half of the traffic."""
    case = make_case(TWO | {"replicas": 1}, 3)
    plan = replace(case.plan, precision="bf16", gradients="fp32")
    rank = rank_of(plan, ProcessGroups(), SGD)
    (stage,) = rank.stages.values()
    for held in stage.held:
        assert held.parameter.grad is not None and held.parameter.grad.dtype == torch.float32
        brought = torch.full_like(held.parameter, 0.1)
        with CountedCasts() as casts:
            for _ in range(3):
                (held.parameter * brought).sum().backward()
        assert casts.to_fp32 == 0
        torch.testing.assert_close(held.parameter.grad, 3 * brought.float())


def test_every_bucket_is_summed_once_whatever_is_complete_by_then() -> None:
    """In one order on all ranks: no weight before those in front of it, and those that are left when the last backward pass is over."""
    case = make_case(TWO | {"replicas": 1}, 3)
    rank = rank_of(case.plan, ProcessGroups(), SGD)
    (stage,) = rank.stages.values()
    own, launched = BucketedGradients(stage, rank.world, BUCKET_BYTES), list[Bucket]()
    own._launch = launched.append  # type: ignore[method-assign]
    own.start(ReduceStart(0, ()))
    assert launched == own.buckets
    for complete in (0, 1, 3, len(own.buckets)):
        launched.clear()
        own.start(ReduceStart(0, (), 1))
        for bucket in [*own.buckets[1:complete], *own.buckets[: min(1, complete)]]:  # the first of them comes last
            assert not launched
            for held in bucket.held:
                own.completed(held.parameter)
        own.passed(0)
        assert launched == own.buckets[:complete]
        own.passed(1)
        assert launched == own.buckets


def test_nothing_of_a_step_is_left_for_the_next() -> None:
    """Neither sums that were waited for, nor whoever listens for weights of a step that was abandoned."""
    case = make_case(TWO | {"replicas": 1}, 3)
    rank = rank_of(case.plan, ProcessGroups(), SGD)
    (stage,) = rank.stages.values()
    own, launched, waited = BucketedGradients(stage, rank.world, BUCKET_BYTES), list[Bucket](), list[int]()

    class Work:
        def wait(self) -> None:
            waited.append(1)

    statistics = torch.zeros(2)
    own._works.append(Work())
    own._statistics.append(([statistics], torch.tensor([2.0, 6.0]), 2))
    own.wait()
    statistics.add_(1.0)  # by the passes of the next step
    own.wait()
    assert statistics.tolist() == [2.0, 4.0] and len(waited) == 1
    own._launch = launched.append  # type: ignore[method-assign]
    own.start(ReduceStart(0, (), 0))
    own.abandon()
    for held in own.buckets[0].held:
        own.completed(held.parameter)
        assert not held.parameter._post_accumulate_grad_hooks
    assert not launched


@pytest.mark.parametrize("zero", [0, 1])
def test_many_full_buckets_are_all_summed(pool: WorkerPool, zero: int) -> None:
    case = make_case(TWO | {"zero": zero}, 3)
    outcomes = pool.run(train_in_small_buckets, case.plan, case.programs(), SGD, BUCKET_BYTES)
    losses, weights = reference(case, SGD)
    assert outcomes[0].losses == pytest.approx(losses, rel=TOLERANCE)
    assert largest_difference(case, outcomes, weights)[0] <= TOLERANCE


@pytest.mark.parametrize(
    "split",
    [{"tp": 2}, {"replicas": 2}, {"replicas": 2, "zero": 1}, {"replicas": 2, "zero": 2}, {"replicas": 2, "zero": 3}, {"pp": 2}],
    ids=lambda split: " ".join(f"{name} {value}" for name, value in split.items()),
)
def test_clipping_goes_by_the_norm_of_all_gradients_each_once(pool: WorkerPool, split: Choice) -> None:
    """Of weights that are divided, alike on both ranks, owned by one of them, or shared by two stages (GPT's embedding). By plain SGD,
    which a wrong norm moves elsewhere; AdamW would hide it."""
    case = make_case(TWO | {"family": "gpt", "replicas": 1} | split, 3)
    settings = TrainingSettings(LearningRate(1.0), OptimizerSettings("sgd", weight_decay=0.0, momentum=0.0), clip_norm=0.1)
    outcomes = pool.run(train_programs, case.plan, case.programs(), settings)
    losses, weights = reference(case, settings)
    assert outcomes[0].losses == pytest.approx(losses, rel=TOLERANCE) and min(outcomes[0].norms) > 0.1
    assert largest_difference(case, outcomes, weights)[0] <= TOLERANCE


def test_running_statistics_become_the_mean_over_the_ranks(pool: WorkerPool) -> None:
    """Of two replicas, each of which has seen its own micro-batches."""
    case = make_case(TWO | {"family": "resnet", "layout": "padded"}, 3, iterations=1)
    outcomes = pool.run(train_programs, case.plan, case.programs(), SGD)
    alone = []
    for program in case.programs()[0]:
        chain = build_chain(case.model, seed=SGD.seed)
        for micro in program.micro_batches:
            bounds, needs = (0, len(micro.samples)), ("inputs", "labels")
            chain(load_share(RandomSource(case.model), program, micro, bounds, needs, torch.device("cpu"), SGD.seed))
        alone.append([buffer for op in chain.ops for buffer in op.buffers()])
    assert len(alone[0]) > 10 and not torch.equal(alone[0][0], alone[1][0])
    for outcome in outcomes:
        for found, one, other in zip(outcome.statistics, *alone, strict=True):
            torch.testing.assert_close(found, (one + other) / 2)


def test_the_mean_of_what_is_no_fraction_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that two ranks have: primes for hashing, rotations as complex numbers, flags. Counts are whole."""
    chain, mean = nn.Module(), torch.tensor([0.5])
    kept = {"mean": mean, "primes": torch.tensor([2_654_435_761, 2**53 + 1]), "turns": torch.exp(1j * torch.arange(4.0)),
            "flags": torch.tensor([True, False]), "count": torch.tensor(-7)}  # fmt: skip
    for name, value in kept.items():
        chain.register_buffer(name, value.clone())
    stage: Any = SimpleNamespace(pieces=[SimpleNamespace(chain=chain)])
    own = Gradients(stage, SimpleNamespace())  # type: ignore[arg-type]
    monkeypatch.setattr(gradients, "holders_of", lambda *_: (0, 1))
    monkeypatch.setattr(own, "_sum", lambda flat, *_: (flat.mul_(2), Done())[1])
    own._launch_statistics()
    own.wait()
    assert all(torch.equal(value, kept[name]) for name, value in chain.named_buffers())


WAYS: tuple[dict[str, Any], ...] = (
    *({"zero": zero} for zero in (0, 1, 2, 3)), {"pp": 2, "replicas": 1, "schedule": "zero-bubble"}, {"family": "vgg", "layout": "padded"},
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_gradients_of_bf16_weights_are_summed_in_the_dtype_of_the_plan(pool: WorkerPool, way: dict[str, Any]) -> None:
    """In fp32 to its last bits, over micro-batches and over ranks; in bf16 each sum loses some."""
    made = make_case(TWO | way, 5, 1)
    plan = replace(made.plan, precision="bf16")
    wide, narrow = (replace(made, plan=replace(plan, gradients=dtype), model=model_of(plan)) for dtype in ("fp32", ""))
    expected = _norm_of_sums(wide)
    found = [pool.run(train_programs, case.plan, case.programs(), SGD)[0].norms[0] for case in (wide, narrow)]
    assert found[0] == pytest.approx(expected, rel=2e-6)
    assert found[1] != pytest.approx(expected, rel=2e-6)


def _norm_of_sums(case: Case) -> float:
    """The gradients that torch makes in bf16 of each micro-batch, added in fp32."""
    chain, source = build_chain(case.model, seed=SGD.seed), RandomSource(case.model)
    sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in chain.parameters()]
    for program in {program.replica: program for program in case.programs()[0]}.values():
        for micro in program.micro_batches:
            samples = (0, len(micro.samples))
            batch = load_share(source, program, micro, samples, ("inputs", "labels"), torch.device("cpu"), SGD.seed)
            chain(batch)["loss"].backward()
            for total, parameter in zip(sums, chain.parameters(), strict=True):
                assert parameter.grad.dtype == torch.bfloat16
                total += parameter.grad
                parameter.grad = None
    return float(torch.stack([total.norm() for total in sums]).norm())
