"""Plans for the lengths that are there: one answer for one question, batches from tokens, and whose plan it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import find_plans
from penstock.batching.plan import SampleLengths
from penstock.errors import InfeasibleError, InputError
from penstock.jobs import planning
from penstock.jobs.planning import FoundPlan, FoundPlans, PlanQuestion, batch_of, job_cluster, plans_for, require_plan_of
from penstock.models.catalog import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan


def test_the_best_plans_for_these_lengths_are_kept(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = find_plans("gpt-tiny", "2xcpu", data=rows, tokens_per_batch=600)
    times = [plan.predicted.time_s for plan in plans if plan.predicted]
    assert len(times) == len(plans) > 1 and times[0] <= min(times) * 1.1
    assert {plan.micro_batching.policy for plan in plans} == {"dynamic"}
    mean = sum(len(row["input_ids"]) - 1 for row in rows) / len(rows)
    assert plans[0].global_batch == round(600 / mean) and plans[0].seq_length == 59
    told = str(plans[0])
    for words in ("plan of gpt-tiny for 2 devices", "the next best, ", "padded to the longest sample, would take", "at most ", "tokens/s"):
        assert words in told
    plans[0].write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plans[0]

    monkeypatch.setattr(planning, "search_for_lengths", None)  # nobody searches for what is known
    assert find_plans("gpt-tiny", "2xcpu", data=rows, tokens_per_batch=600) == plans
    with pytest.raises(TypeError):
        find_plans("gpt-tiny", "2xcpu", data=rows[1:], tokens_per_batch=600)


QUESTION = PlanQuestion(resolve_model("gpt-tiny"), "gpt-tiny", "2xcpu", "roofline", 8, 64)
OTHERS: dict[str, dict[str, Any]] = {
    "ops": {"model": resolve_model("llama-tiny")},
    "sizes": {"model": replace(QUESTION.model, config={**QUESTION.model.config, "seq_length": 64})},
    "source": {"source": "other"}, "cluster": {"cluster": "3xcpu"}, "costs": {"costs": "profile:h200-141gb"}, "batch": {"global_batch": 4},
    "longest": {"longest": 32}, "precision": {"precision": "fp32"}, "memory": {"memory_limit_gb": 2.0}, "time": {"time_budget_s": 3.0},
}  # fmt: skip


def test_another_question_gets_an_answer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever decides a plan is part of the name under which it is kept."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    asked: list[PlanQuestion] = []
    found = FoundPlan(uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=8), 1.0, 2.0, 3.0, 0.5, 4.0, 5.0, 0.75)

    def searched(question: PlanQuestion, *others: Any) -> FoundPlans:
        asked.append(question)
        return FoundPlans((found,), 2.5, 0.06)

    monkeypatch.setattr(planning, "_searched", searched)
    samples = [SampleLengths(number, 10) for number in range(3)]
    for _ in range(2):
        assert plans_for(QUESTION, samples) == FoundPlans((found,), 2.5, 0.06) and len(asked) == 1
    for number, (name, other) in enumerate(OTHERS.items(), 2):
        for _ in range(2):
            plans_for(replace(QUESTION, **other), samples)
            assert len(asked) == number, name
    count = len(asked)
    for other_samples in ([*samples[:2], SampleLengths(2, 11)], [*samples[:2], SampleLengths(2, 10, 1)], samples[:2]):
        plans_for(QUESTION, other_samples)
    monkeypatch.setenv("WORLD_SIZE", "2")
    plans_for(QUESTION, samples)
    assert len(asked) == count + 4
    profile = tmp_path / "own.json"
    for number, content in enumerate(("measured", "measured", "measured anew"), 5):
        profile.write_text(content, encoding="utf-8")
        plans_for(replace(QUESTION, costs=f"profile:{profile}"), samples)
        assert len(asked) == count + number - (number > 5)


def test_a_search_is_asked_for_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes are 10⁹ bytes."""
    asked: list[Any] = []
    monkeypatch.setattr(planning, "search_for_lengths", lambda request, samples, **more: asked.append((request, more)) or ())
    monkeypatch.setenv("WORLD_SIZE", "2")
    question = replace(QUESTION, cluster="2xa100-40gb", precision="bf16", memory_limit_gb=2.0, time_budget_s=3.0)
    with pytest.raises(InfeasibleError, match="all 2 processes"):
        planning._searched(question, [SampleLengths(0, 10)], lambda text: None)
    ((request, more),) = asked
    assert (request.memory_limit_bytes, request.model.dtype, more["time_budget_s"]) == (2e9, "bf16", 3.0)
    assert (request.frame.global_batch, request.frame.seq_length, request.cluster.num_devices) == (8, 64, 2)


def test_under_torchrun_every_process_gets_work(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert job_cluster("local") == "2xcpu" and job_cluster("4xa100-40gb") == "4xa100-40gb"
    assert {len(plan.ranks) for plan in find_plans("gpt-tiny", data=rows, tokens_per_batch=600)} == {2}
    monkeypatch.setattr(planning, "resolve_cluster", lambda text: __import__("penstock.clusters").clusters.resolve_cluster("4xa100-40gb"))
    with pytest.raises(InputError, match=r"2 processes were started, but the cluster 'local' is .*--cluster 2xa100-40gb"):
        job_cluster("local")


def test_batches_of_tokens() -> None:
    assert batch_of(100, [10] * 50, True) == 10
    assert batch_of(None, [10] * 50, True) == 50  # all that there are, since 65,536 tokens are not
    assert batch_of(None, [1000] * 500, True) == 66
    assert batch_of(None, [1] * 500, False) == 256  # images
    with pytest.raises(InputError, match=r"is about 100 samples of 10 tokens, but the data has 50\..*--tokens-per-batch 500 at most"):
        batch_of(1000, [10] * 50, True)


@pytest.mark.parametrize(
    ("other", "message"),
    [("gpt-small", "'gpt-small', not 'gpt-tiny' .layers"), ("bert-tiny", "'bert-tiny', not 'gpt-tiny' .family bert in place of gpt")],
)
def test_plans_of_other_models(other: str, message: str) -> None:
    model = resolve_model("gpt-tiny")
    require_plan_of(uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=8), model)
    with pytest.raises(InputError, match=f"the plan is of another model: {message}"):
        require_plan_of(uniform_plan(other, "1xcpu", global_batch=8, micro_batch=8), model)


def test_a_model_that_is_no_text(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="a model is named by text, and int was given"):
        find_plans(3, data=rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [("top", 0), ("tokens_per_batch", 0), ("memory_limit_gb", -3), ("time_budget_s", -1), ("over_long", "cut")],
)
def test_settings_that_no_search_can_have(name: str, value: Any, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(InputError, match=rf"{name}.*{value}"):
        find_plans("gpt-tiny", "1xcpu", data=rows, **{name: value})


def test_a_module_that_only_this_process_has(rows: list[dict[str, Any]]) -> None:
    """It says nothing of positions: samples may be longer than those that it was traced with."""
    from torch import nn

    def make() -> Any:
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)]
        return nn.Sequential(nn.Embedding(300, 16), *blocks, nn.Linear(16, 300))

    longer = [*rows, [1] * 200]
    plan, again = (find_plans(model, "1xcpu", data=longer, tokens_per_batch=600)[0] for model in (make, make()))
    assert plan == again and str(plan.model).endswith(".json") and plan.seq_length == 199

    class Pair(nn.Sequential):
        def forward(self, ids: Any) -> Any:
            return super().forward(ids), None

    own_loss = find_plans(lambda: (Pair(*make()), None, lambda module, one: one.loss(module(one.ids)[0])), "1xcpu", data=longer)
    assert own_loss[0].seq_length == 199
    with pytest.raises(InputError, match="model makes a int"):
        find_plans(lambda: 3, data=rows)


def test_rows_longer_than_the_model_has_positions() -> None:
    with pytest.raises(InputError, match="1 of 2 samples are longer than the 128 positions"):
        find_plans("gpt-tiny", data=[[1, 2, 3], [1] * 130])
    with pytest.raises(InputError, match="has a vocabulary of 901, model 'gpt-tiny' of 512 only"):
        find_plans("gpt-tiny", data=[[1, 2, 3], [900, 2]])
