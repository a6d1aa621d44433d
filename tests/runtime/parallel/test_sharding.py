"""ZeRO-2 and 3: equal to one process, with less memory on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from runtime_cases import Case, Choice, evaluation_programs, largest_difference, make_case, plain_evaluation, reference
from sharding_jobs import count_bytes
from torch import nn
from training_jobs import train_programs

from penstock.models.modules import build_chain
from penstock.plans.references import model_of
from penstock.programs.check import check_programs
from penstock.runtime.parallel.held import Held
from penstock.runtime.parallel.sharding import Done, ShardedWeights, _Pending
from penstock.runtime.rank import Evaluated
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool

TOLERANCE = 1e-5
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
PLAIN: Choice = {"family": "gpt", "pp": 1, "tp": 1, "dp": 2, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "some",
                 "cuts": "even", "degrees": "equal", "zero": 3, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=200) as workers:
        yield workers


def differences(pool: WorkerPool, case: Case, settings: TrainingSettings) -> float:
    working = [outcome for outcome in pool.run(train_programs, case.plan, case.programs(), settings) if outcome.losses]
    losses, weights = reference(case, settings)
    assert len(working) == len(case.plan.ranks)
    of_losses = max(abs(mine - other) / abs(other) for mine, other in zip(working[0].losses, losses, strict=True))
    return max(of_losses, largest_difference(case, working, weights)[0])


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5", "vgg"])
def test_two_ranks_equal_one_process(pool: WorkerPool, family: str, zero: int) -> None:
    layout = "padded" if family in ("t5", "vgg") else "packed"
    assert differences(pool, make_case(PLAIN | {"family": family, "layout": layout, "zero": zero}, 3), ADAMW) <= TOLERANCE


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"replicas": 2, "schedule": "gpipe", "recompute": "all"},
        {"tp": 2, "sequence_parallel": True},
        {"tp": 2, "degrees": "per op", "family": "bert"},
        {"family": "resnet", "layout": "padded"},
    ],
    ids=["replicas of unequal work", "sequence parallel", "degrees of each op", "batch statistics"],
)
def test_other_splits(pool: WorkerPool, zero: int, more: dict[str, Any]) -> None:
    settings = ADAMW if more.get("family") != "resnet" else TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"))
    case = make_case(PLAIN | {"zero": zero} | more, 5)
    if more.get("replicas") == 2:
        assert any(len({len(one.micro_batches) for one in work}) == 2 for work in case.works)
    assert differences(pool, case, settings) <= TOLERANCE


@pytest.mark.parametrize("zero", [2, 3])
def test_weights_that_do_not_divide(pool: WorkerPool, zero: int) -> None:
    """Three ranks: the last part of most weights is shorter, and padded where parts lie end to end. One that is smaller than the number
    of ranks leaves the last without any."""
    odd = {"num_classes": 2, "widths": [7, 11], "classifier_width": 25}
    case = make_case(PLAIN | {"dp": 3, "family": "vgg", "layout": "padded", "zero": zero}, 3, **odd)
    sizes = [math.prod(shape) for op in build_chain(case.model).ops for shape in op.whole_shapes.values()]
    assert sum(size % 3 > 0 for size in sizes) > 5 and min(sizes) < 3
    assert differences(pool, case, ADAMW) <= TOLERANCE


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_may_stand_in_any_order(pool: WorkerPool, zero: int) -> None:
    """Process groups have them in theirs: whoever counted parts in the order of the plan would take the other's."""
    case = make_case(PLAIN | {"zero": zero}, 3)
    stages = tuple(replace(stage, devices=tuple(ranks[::-1] for ranks in stage.devices)) for stage in case.plan.stages)
    assert differences(pool, replace(case, plan=replace(case.plan, stages=stages)), ADAMW) <= TOLERANCE


class Alone(ShardedWeights):
    """Weights of the first of two ranks, the other of which has nothing but zeros."""

    def __init__(self, zero: int, *pieces: nn.Parameter) -> None:
        super().__init__(SimpleNamespace(rank=0, plan=SimpleNamespace(gradients="")), zero)  # type: ignore[arg-type]
        self.calls: list[str] = []
        for number, whole in enumerate(pieces):
            self.add((1, 0), [whole], [Held(None, str(number), whole, None, number)])  # type: ignore[arg-type]

    def _gather(self, own: torch.Tensor, ranks: tuple[int, ...]) -> _Pending:
        self.calls.append("gather")
        return _Pending(Done(), torch.cat([own, torch.zeros_like(own)]), own)

    def _scatter(self, table: torch.Tensor, ranks: tuple[int, ...]) -> _Pending:
        self.calls.append("scatter")
        return _Pending(Done(), table[0], table)


def test_what_is_divided_is_there_around_its_piece_alone_and_the_next_is_on_its_way() -> None:
    wholes = [nn.Parameter(torch.arange(1.0, 6.0) * 10**number) for number in range(3)]
    own = Alone(3, *wholes)
    assert [shard.part.tolist() for shard in own.shards.values()] == [[one, 2 * one, 3 * one] for one in (1.0, 10.0, 100.0)]
    assert [whole.untyped_storage().nbytes() for whole in wholes] == [0, 0, 0]  # from the first moment on: all at once would not fit
    for number, gathered in enumerate((2, 3, 3)):
        with own.around(number, backward=False):
            assert len(own.calls) == gathered
            assert wholes[number].tolist() == [10.0**number, 2 * 10.0**number, 3 * 10.0**number, 0, 0]
            assert [whole.untyped_storage().nbytes() > 0 for whole in wholes] == [one == number for one in range(3)]


@pytest.mark.parametrize("zero", [2, 3])
def test_nothing_of_an_abandoned_step_is_learned(zero: int) -> None:
    wholes = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    own = Alone(zero, *wholes)
    with own.around(1, backward=True):
        wholes[1].grad = torch.ones(4)
    with suppress(ZeroDivisionError), own.around(0, backward=True):
        wholes[0].grad = torch.ones(4)
        raise ZeroDivisionError
    own.abandon()
    own.finish()
    parts = [shard.part.grad for shard in own.shards.values()]
    assert all(part is not None and not part.any() for part in parts) and [whole.grad for whole in wholes] == [None, None]


def test_both_levels_give_the_same_bits(pool: WorkerPool) -> None:
    cases = [make_case(PLAIN | {"zero": zero}, 3) for zero in (2, 3)]
    two, three = (pool.run(train_programs, case.plan, case.programs(), ADAMW) for case in cases)
    assert two[0].losses == three[0].losses and two[0].norms == three[0].norms
    for mine, its in zip(two[0].weights, three[1].weights, strict=True):
        assert torch.equal(mine.values, its.values)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_like_without(pool: WorkerPool, precision: str) -> None:
    cases = []
    for zero in (0, 2, 3):
        made = make_case(PLAIN | {"zero": zero}, 9, 5)
        plan = replace(made.plan, precision=precision)
        cases.append(replace(made, plan=plan, model=model_of(plan)))
    plain, *others = (pool.run(train_programs, case.plan, case.programs(), ADAMW)[0] for case in cases)
    for other in others:
        assert other.losses == pytest.approx(plain.losses, rel=3e-3)
        assert {weight.values.dtype for weight in other.weights} == {torch.bfloat16 if precision == "bf16" else torch.float16}
    assert plain.losses[-1] < plain.losses[0]


def test_memory_falls_level_by_level(pool: WorkerPool) -> None:
    """Without: weights, gradients and two moments, 4 units of fp32. Two ranks halve the moments (1), gradients (2) and weights (3)."""
    found, weights, units = {}, 0, {0: 4.0, 1: 3.0, 2: 2.5, 3: 2.0}
    for zero in units:
        case = make_case(PLAIN | {"zero": zero, "recompute": "none"}, 3, 2, hidden=128, layers=6, heads=4, vocab=64)
        weights = 4 * case.model.num_parameters
        found[zero] = max(pool.run(count_bytes, case.plan, case.programs(), ADAMW, (units[zero] + 0.15) * weights)[:2])
    assert {zero: at_rest / weights for zero, (at_rest, _) in found.items()} == pytest.approx(units, abs=0.15)
    # While it runs, two blocks of six and their gradients come on top of what lasts, and a bit for the micro-batches.
    assert found[3][1] < 2.9 * weights < found[1][1]


def test_evaluation_with_unequal_work(pool: WorkerPool) -> None:
    found = []
    for zero in (0, 3):
        case = make_case(PLAIN | {"zero": zero, "replicas": 2}, 5, iterations=1)
        assert len({len(work.micro_batches) for work in case.works[0]}) == 2
        programs = evaluation_programs(case)
        assert check_programs(programs, case.plan, case.model) == []
        outcomes = pool.run(train_programs, case.plan, [programs], ADAMW)
        assert len({outcome.evaluated for outcome in outcomes}) == 1
        found.append(outcomes[0].evaluated[0])
    loss, accuracy = plain_evaluation(case, ADAMW)
    assert found[0] == found[1] == Evaluated(pytest.approx(loss, rel=1e-5), pytest.approx(accuracy))
