"""Somebody's module trains like a plain loop of torch: whatever is cut, recomputed, replicated, divided or tied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from module_cases import described, module_case, plain_statistics, plain_training, weights_apart
from torch.nn import functional as F
from training_jobs import rank_of, train_programs

from penstock.models.modules import TensorParallel, random_batch
from penstock.plans.validity import check_plan
from penstock.programs.check import check_programs
from penstock.runtime.parallel.module_chain import cut_module
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings
from penstock.runtime.transport.world import ProcessGroups
from penstock.runtime.workers import WorkerPool

TOLERANCE = 1e-5
ADAMW = TrainingSettings(LearningRate(3e-3, warmup_steps=2), OptimizerSettings("adamw", eps=1e-3), clip_norm=0.5)
SPLIT: dict[str, Any] = {"schedule": "zero-bubble", "recompute": "none"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tp": 2, "recompute": "none"}),
    ("qwen3", {"tp": 2, "pp": 2, "cuts": "uneven", "degrees": "per stage"}),
    ("gemma3", {"pp": 4, "schedule": "gpipe"}),
    ("mixtral", {"pp": 2, "replicas": 2}),
    ("long_skips", {"pp": 4}),
    ("long_skips", {"pp": 2, "tp": 2, "degrees": "per stage"}),
    ("llama", {"pp": 2, "dp": 2, "zero": 1}),
    ("qwen3", {"dp": 2, "zero": 3}),
    ("vit", {"dp": 2, "replicas": 2, "zero": 2, "recompute": "all"}),
    ("vit", {"pp": 3}),
    ("t5", {"pp": 2, "cuts": "uneven"}),
    ("plain_gpt", {"pp": 2, "dp": 2, "layout": "packed"}),
    ("packed_gemma3", {"pp": 3, "layout": "packed", "recompute": "all"}),
    ("odd", {"pp": 2, "recompute": "all"}),
    ("odd", {"dp": 2, "replicas": 2, "zero": 1}),
    ("odd", {"dp": 2, "zero": 3}),
    ("odd", {"pp": 2} | SPLIT),
    ("odd", {"pp": 2, "dp": 2} | SPLIT),
    ("plain_gpt", {"pp": 2, "dp": 2, "layout": "packed"} | SPLIT),
    ("llama", {"pp": 2, "tp": 2} | SPLIT),
    ("long_skips", {"pp": 4} | SPLIT),
    ("vit", {"pp": 2, "replicas": 2} | SPLIT),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(4, timeout_s=250) as workers:
        yield workers


@pytest.mark.parametrize(("name", "choice"), CASES, ids=[f"{name}-{'-'.join(map(str, c.values()))}" for name, c in CASES])
def test_steps_equal_a_plain_loop(pool: WorkerPool, name: str, choice: dict[str, Any]) -> None:
    case = module_case(name, **choice)
    assert check_plan(case.plan, case.model) == []
    assert all(check_programs(programs, case.plan, case.model) == [] for programs in case.programs())
    outcomes = [outcome for outcome in pool.run(train_programs, case.plan, case.programs(), ADAMW) if outcome.losses]
    losses, weights = plain_training(name, case, ADAMW)
    assert len(outcomes) == len(case.plan.ranks)
    assert max(abs(mine - other) / abs(other) for mine, other in zip(outcomes[0].losses, losses, strict=True)) <= TOLERANCE
    assert weights_apart(case, outcomes, weights) <= TOLERANCE


@pytest.mark.parametrize("choice", [{"recompute": "all"}, {"pp": 2, "recompute": "all"}, {"pp": 2, "dp": 2, "recompute": "some"},
                                    {"pp": 2, "dp": 2} | SPLIT], ids=lambda choice: "-".join(map(str, choice.values())))  # fmt: skip
def test_running_statistics_are_those_of_a_plain_loop(pool: WorkerPool, choice: dict[str, Any]) -> None:
    case = module_case("conv_net", **choice)
    settings = TrainingSettings(LearningRate(0.1), OptimizerSettings("sgd", weight_decay=0.0), clip_norm=None)
    outcomes = [outcome for outcome in pool.run(train_programs, case.plan, case.programs(), settings) if outcome.losses]
    losses, statistics = plain_statistics("conv_net", case, settings)
    assert outcomes[0].losses == pytest.approx(losses, rel=TOLERANCE)
    dp = case.plan.stages[0].degrees.dp
    found = [one for outcome in outcomes[::dp] for one in outcome.statistics]
    assert len(found) == len(statistics) == 9
    for mine, its in zip(found, statistics, strict=True):
        assert (mine - its).abs().max() <= TOLERANCE * its.abs().max()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_images_come_in_the_precision_of_the_weights(precision: str) -> None:
    case = module_case("plain_conv_net", precision=precision)
    rank = rank_of(case.plan, ProcessGroups(), ADAMW)
    losses = [rank.train(program).loss.item() for (program,) in case.programs()]
    assert losses == pytest.approx(plain_training("plain_conv_net", case, ADAMW)[0], rel=2e-2)


def test_weights_move_a_hundred_times_further(pool: WorkerPool) -> None:
    case = module_case("llama", pp=2)
    outcomes = pool.run(train_programs, case.plan, case.programs(), replace(ADAMW, rate=LearningRate(1e-30)))
    assert weights_apart(case, [one for one in outcomes if one.losses], plain_training("llama", case, ADAMW)[1]) > 100 * TOLERANCE


@pytest.mark.parametrize("repeats", [False, True])
def test_attention_plans_for_no_shape_that_never_comes_again(monkeypatch: pytest.MonkeyPatch, repeats: bool) -> None:
    model, plain, allowed = described("plain_gpt"), F.scaled_dot_product_attention, list[bool]()
    cut = cut_module(model, torch.device("cpu"), 0)
    assert cut is not None
    cut.hold(dict.fromkeys(range(model.num_ops), TensorParallel()))
    chain = cut.chain([cut.op(place, TensorParallel()) for place in model.ops], model.ops)
    batch = random_batch([9, 7], model.config["vocab"], layout="padded")
    batch.repeats = repeats

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    chain(batch, recompute=range(model.num_ops))["loss"].backward()
    layers = sum("layers" in place.name or "blocks" in place.name for place in model.ops)
    assert allowed == [repeats] * 2 * layers  # once more on the way back
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
