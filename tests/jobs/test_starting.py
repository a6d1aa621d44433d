"""What the fields of a job tell the runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.jobs.job_file import job_from, parse_changes
from penstock.jobs.starting import _kept_plan, training_request
from penstock.plans.build import uniform_plan
from penstock.plans.references import model_of
from penstock.plans.schema import write_plan
from penstock.runtime.request import PlanningSettings
from penstock.runtime.settings import LearningRate, OptimizerSettings, TrainingSettings

LEAST = {"out": "run", "model": {"source": "gpt-tiny"}, "data": {"path": "a.jsonl"}}


def settings_of(*changes: str) -> TrainingSettings:
    job = job_from(LEAST, parse_changes(changes), "the job")
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=4, micro_batch=4)
    return training_request(plan, "data", 100, "run", job.train, job.save).settings


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        ((), LearningRate(3e-4, 0, 100, "constant", 0.1)),
        (("train.warmup=5",), LearningRate(3e-4, 5, 100, "cosine", 0.1)),
        (("train.warmup=5", "train.decay=constant"), LearningRate(3e-4, 5, 100, "constant", 0.1)),
        (("train.decay=linear", "train.end_share=0", "train.lr=0.01"), LearningRate(0.01, 0, 100, "linear", 0.0)),
    ],
)
def test_the_learning_rate_falls_as_asked(changes: tuple[str, ...], rate: LearningRate) -> None:
    assert settings_of(*changes).rate == rate


def test_a_plan_is_kept_for_its_own_model_alone(tmp_path: Path) -> None:
    """Somebody may have changed the file that a job names."""
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=4, micro_batch=4)
    write_plan(tmp_path / "plan.json", plan)
    model = model_of(plan)
    deeper = model_of(replace(plan, model={"base": "gpt-tiny", "layers": int(model.config["layers"]) + 1}))
    assert _kept_plan(str(tmp_path), [], "1xcpu", model) is not None
    assert _kept_plan(str(tmp_path), [], "1xcpu", deeper) is None
    assert _kept_plan(str(tmp_path), [], "2xcpu", model) is None and _kept_plan(str(tmp_path), None, "1xcpu", model) is None


def test_the_update_rule_has_its_numbers() -> None:
    found = settings_of("train.betas=[0.8, 0.95]", "train.eps=1e-6", "train.momentum=0.5", "train.weight_decay=0.2")
    assert found.optimizer == OptimizerSettings("adamw", 0.2, (0.8, 0.95), 1e-6, 0.5)


def test_every_field_of_a_job_reaches_the_run() -> None:
    """None of them is as it would be if it were forgotten."""
    job = job_from(LEAST, parse_changes((
        "train.clip=0", "train.seed=7", "train.on_nan=skip", "train.deterministic=true", "train.no_decay=[vectors]", "train.optimizer=lamb",
        "train.device=cpu", "train.eval_every=3", "save.every=11", "save.keep=5", "train.torch_profile='3,4'", "train.share_gpus=true",
        "train.reserve_memory=0.25", "train.on_death=recover", "train.copies=4", "train.planners=2", "train.store=file:s.json",
        "train.store_timeout=9", "train.budget_steps=13",
    )), "the job")  # fmt: skip
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=4, micro_batch=4)
    found = training_request(plan, "data", 100, "run", job.train, job.save, resume="there", weights="hf:x", prompt_loss=True, spares=2)
    rate = LearningRate(3e-4, 0, 100, "constant", 0.1)
    assert found.settings == TrainingSettings(rate, OptimizerSettings("lamb", no_decay=("vectors",)), None, 7, "skip", True)
    assert found.plan == replace(plan, optimizer="lamb")
    assert (found.device, found.eval_every, found.checkpoint_every, found.keep) == ("cpu", 3, 11, 5)
    assert (found.resume, found.weights, found.prompt_loss, found.profile_steps) == ("there", "hf:x", True, (3, 4))
    assert (found.share_gpus, found.reserve_memory, found.on_death, found.copies, found.spares) == (True, 0.25, "recover", 4, 2)
    assert found.planning == PlanningSettings(2, "file:s.json", 9.0, search_steps=13)
    kept = training_request(replace(plan, optimizer="sgd"), "data", 100, "run", job_from(LEAST, {}, "the job").train, job.save)
    assert kept.plan.optimizer == kept.settings.optimizer.kind == "sgd"
