"""Any plan trains like one process: the same losses and the same weights, whatever is split, scheduled, recomputed or replicated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from doubles import in_doubles, train_in_doubles
from runtime_cases import (
    Case,
    Choice,
    covering_choices,
    evaluation_programs,
    largest_difference,
    make_case,
    plain_evaluation,
    reference,
)
from training_jobs import train_programs

from penstock.models.modules import build_chain
from penstock.plans.references import model_of
from penstock.plans.validity import check_plan
from penstock.programs.check import check_programs
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.workers import WorkerPool
from penstock.schedules.rules import schedule_of

TOLERANCE, TOLERANCE_IN_DOUBLES = 1e-5, 1e-10
PIECES = 6
"""Of the covering set, so that processes of the test run can share it."""
SGD = TrainingSettings(LearningRate(0.05), OptimizerSettings("sgd"), clip_norm=1.0)
# With the usual eps AdamW turns the rounding noise of gradients that are exactly zero (biases of keys) into whole steps.
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
# A norm of a whole tensor is in every step, so that a part forgotten or counted twice is seen; half of the weight is decay.
LAMB = TrainingSettings(
    LearningRate(0.02, warmup_steps=2), OptimizerSettings("lamb", weight_decay=0.5, eps=1e-3, no_decay=("vectors",)), clip_norm=0.5
)
PLAIN: Choice = {"family": "gpt", "pp": 2, "tp": 2, "dp": 1, "replicas": 2, "schedule": "1f1b", "layout": "packed", "recompute": "some",
                 "cuts": "uneven", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(8, timeout_s=250) as workers:
        yield workers


def differences(
    pool: WorkerPool, case: Case, settings: TrainingSettings = SGD, *, doubles: bool = False, **more: Any
) -> tuple[float, float, str]:
    """(of losses, of weights, where): the largest relative ones."""
    outcomes = pool.run(train_in_doubles if doubles else train_programs, case.plan, case.programs(), settings)
    with in_doubles() if doubles else nullcontext():
        losses, weights = reference(case, settings, **more)
    working = [outcome for outcome in outcomes if outcome.losses]
    assert len(working) == len(case.plan.ranks)
    assert all(outcome.losses == working[0].losses for outcome in working)
    of_losses = max(abs(mine - other) / abs(other) for mine, other in zip(working[0].losses, losses, strict=True))
    return of_losses, *largest_difference(case, working, weights)


def test_the_covering_set_has_plans_of_every_kind_on_many_ranks() -> None:
    choices = covering_choices()
    for kind, value in (("schedule", "interleaved"), ("schedule", "zero-bubble"), ("degrees", "per stage")):
        sizes = [len(make_case(choice, seed).plan.ranks) for seed, choice in enumerate(choices) if choice[kind] == value]
        assert sum(size >= 4 for size in sizes) >= 4


@pytest.mark.parametrize("piece", range(PIECES))
def test_a_covering_set_of_plans(pool: WorkerPool, piece: int) -> None:
    wrong = []
    for seed, choice in list(enumerate(covering_choices()))[piece::PIECES]:
        case = make_case(choice, seed)
        assert check_plan(case.plan, case.model) == []
        assert all(check_programs(programs, case.plan, case.model) == [] for programs in case.programs())
        doubles = choice["family"] == "resnet"
        of_losses, of_weights, where = differences(pool, case, doubles=doubles)
        if max(of_losses, of_weights) > (TOLERANCE_IN_DOUBLES if doubles else TOLERANCE):
            wrong.append(f"{seed} {choice}: losses {of_losses:.1e}, weights {of_weights:.1e} ({where})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert", "t5", "vgg"])
def test_equals_the_whole_batch_at_once(pool: WorkerPool, family: str) -> None:
    layout = "padded" if family in ("t5", "vgg") else "packed"
    case = make_case(PLAIN | {"family": family, "layout": layout, "schedule": "zero-bubble", "recompute": "none"}, 11)
    assert max(differences(pool, case, whole=True)[:2]) <= TOLERANCE


def test_many_steps(pool: WorkerPool) -> None:
    assert max(differences(pool, make_case(PLAIN | {"replicas": 1}, 5, iterations=10))[:2]) <= TOLERANCE


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_adamw_with_clipping_and_warm_up(pool: WorkerPool, zero: int) -> None:
    """ZeRO-1 and 3 without decay of vectors."""
    case = make_case(PLAIN | {"zero": zero, "dp": 2, "tp": 1, "pp": 2 if zero < 2 else 1}, 7, iterations=3)
    decaying = replace(ADAMW.optimizer, weight_decay=0.5, no_decay=("vectors",))
    assert max(differences(pool, case, replace(ADAMW, optimizer=decaying) if zero % 2 else ADAMW)[:2]) <= TOLERANCE


@pytest.mark.parametrize("more", [{"zero": 0}, {"zero": 1, "dp": 2, "replicas": 1}, {"zero": 3, "dp": 2, "pp": 1, "replicas": 1}],
                         ids=["replicas", "zero 1", "zero 3"])  # fmt: skip
def test_lamb_takes_norms_of_whole_tensors(pool: WorkerPool, more: dict[str, Any]) -> None:
    """Divided over two tensor-parallel ranks, with shared embeddings on two stages, replicated or in parts on others."""
    case = make_case(PLAIN | more, 7, iterations=3)
    assert max(differences(pool, case, LAMB)[:2]) <= TOLERANCE


def test_weights_move(pool: WorkerPool) -> None:
    """The tolerance would see a weight that is not updated."""
    case = make_case(PLAIN, 5)
    still = replace(SGD, rate=LearningRate(1e-30))
    outcomes = pool.run(train_programs, case.plan, case.programs(), still)
    assert largest_difference(case, outcomes, reference(case, SGD)[1])[0] > 100 * TOLERANCE


def test_one_rank_is_exactly_plain_torch(pool: WorkerPool) -> None:
    case = make_case(PLAIN | {"pp": 1, "tp": 1, "replicas": 1, "recompute": "none"}, 3)
    settings = replace(SGD, clip_norm=None)
    assert differences(pool, case, settings)[:2] == (0.0, 0.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_is_exactly_plain_torch(pool: WorkerPool, schedule: str) -> None:
    """Cutting changes no sum: each weight's gradients are added in the order of micro-batches, as in one process."""
    case = make_case(PLAIN | {"pp": 4, "tp": 1, "replicas": 1, "schedule": schedule, "family": "llama"}, 3)
    settings = replace(SGD, clip_norm=None)
    assert differences(pool, case, settings)[:2] == (0.0, 0.0)


def test_batch_statistics_stay_exact_over_many_steps(pool: WorkerPool) -> None:
    """Two ranks add in the order of one process; any rounding would grow at the kinks of ReLU after batch norm."""
    case = make_case(PLAIN | {"family": "resnet", "layout": "padded", "pp": 3, "tp": 1, "dp": 2, "replicas": 1}, 3, iterations=8)
    assert differences(pool, case, replace(SGD, clip_norm=None, rate=LearningRate(0.02)))[1] == 0.0


@pytest.mark.parametrize(
    "split", [{"tp": 2}, {"dp": 2, "replicas": 2}, {"tp": 2, "dp": 2, "zero": 3}], ids=["tp", "dp and replicas", "tp, dp and ZeRO-3"]
)
def test_batch_statistics_follow_one_process_in_doubles(pool: WorkerPool, split: dict[str, int]) -> None:
    """Where sums are reordered, a rounding may put an activation on the other side of a ReLU's kink, which batch norm spreads over all
    samples: in fp32 one process does not even follow itself. In doubles nothing but a mistake is left to see."""
    plain = PLAIN | {"family": "resnet", "layout": "padded", "recompute": "none", "pp": 1, "tp": 1, "dp": 1, "replicas": 1}
    case = make_case(plain | split, 4711, iterations=6)
    assert max(differences(pool, case, doubles=True)[:2]) <= TOLERANCE_IN_DOUBLES
    with in_doubles():
        weights, other = (reference(case, SGD, noise=noise)[1] for noise in (0.0, 1e-7))
    assert max((values - other[name]).abs().max().item() for name, values in weights.items()) > 1e-8  # a difference would be seen


def in_precision(case: Case, precision: str) -> Case:
    plan = replace(case.plan, precision=precision)
    return replace(case, plan=plan, model=model_of(plan))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_alike_on_one_rank_and_on_eight(pool: WorkerPool, precision: str) -> None:
    split = in_precision(make_case(PLAIN | {"replicas": 1, "tp": 2, "pp": 4}, 9, 6), precision)
    alone = same_micro_batches(
        in_precision(make_case(PLAIN | {"pp": 1, "tp": 1, "replicas": 1, "recompute": "none"}, 9, 6), precision), split
    )
    one, *_ = pool.run(train_programs, alone.plan, alone.programs(), ADAMW)
    eight = pool.run(train_programs, split.plan, split.programs(), ADAMW)
    assert eight[0].losses == pytest.approx(one.losses, rel=3e-3)
    whole = {f"{weight.op}.{weight.name}": weight.values.float() for weight in one.weights}
    whole |= {f"{place.index}.weight": whole["0.weight"] for place in split.model.ops if place.op.tied_to}
    # Ten steps of the last bit: recomputed products round their weight gradients once more before they are added.
    assert largest_difference(split, eight, whole)[0] < 0.04
    start = {f"{index}.{name}": value for index, op in enumerate(build_chain(split.model).ops) for name, value in op.named_parameters()}
    assert largest_difference(split, eight, start)[0] > 0.1  # it did learn
    assert {weight.values.dtype for weight in eight[0].weights} == {torch.bfloat16 if precision == "bf16" else torch.float16}


def same_micro_batches(case: Case, other: Case) -> Case:
    """The case with the micro-batches of another, one replica each."""
    works = []
    for (own,), (its, *_) in zip(case.works, other.works, strict=True):
        schedule = schedule_of(case.plan.schedule, case.plan.num_stages, len(its.micro_batches))
        works.append((replace(own, micro_batches=its.micro_batches, schedule=schedule, patterns=()),))
    return replace(case, works=tuple(works))


def test_replicas_hold_equal_weights_and_statistics(pool: WorkerPool) -> None:
    case = make_case(PLAIN | {"family": "resnet", "layout": "padded", "pp": 2, "tp": 1, "dp": 2}, 4)
    outcomes = pool.run(train_programs, case.plan, case.programs(), SGD)
    stage = case.plan.stages[0]
    holders = [outcomes[rank] for devices in stage.devices for rank in devices]
    assert len(holders) == 4 and holders[0].statistics
    for other in holders[1:]:
        for mine, its in zip(holders[0].weights, other.weights, strict=True):
            assert torch.equal(mine.values, its.values)
        for mine_statistics, its_statistics in zip(holders[0].statistics, other.statistics, strict=True):
            assert torch.equal(mine_statistics, its_statistics)


@pytest.mark.parametrize("family", ["gpt", "vgg"])
def test_evaluation_counts_every_label_once(pool: WorkerPool, family: str) -> None:
    layout = "packed" if family == "gpt" else "padded"
    case = make_case(PLAIN | {"family": family, "layout": layout, "tp": 2, "dp": 2, "replicas": 1}, 6, iterations=1)
    alone = make_case(PLAIN | {"family": family, "layout": layout, "pp": 1, "tp": 1, "replicas": 1}, 6, iterations=1)
    found = []
    for one in (case, same_micro_batches(alone, case)):
        programs = evaluation_programs(one)
        assert check_programs(programs, one.plan, one.model) == []
        outcomes = pool.run(train_programs, one.plan, [programs], SGD)
        assert len({outcome.evaluated for outcome in outcomes if outcome.evaluated}) == 1
        found.append(outcomes[0].evaluated[0])
    loss, accuracy = plain_evaluation(case, SGD)
    assert [one.loss for one in found] == pytest.approx([loss] * 2, rel=1e-5)
    assert [one.accuracy for one in found] == pytest.approx([accuracy] * 2)
