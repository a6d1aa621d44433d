"""What the fields of a job tell the runtime."""

from __future__ import annotations

import pytest

from penstock.jobs.job_file import job_from, parse_changes
from penstock.jobs.starting import training_request
from penstock.plans.build import uniform_plan
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


def test_the_update_rule_has_its_numbers() -> None:
    found = settings_of("train.betas=[0.8, 0.95]", "train.eps=1e-6", "train.momentum=0.5", "train.weight_decay=0.2")
    assert found.optimizer == OptimizerSettings("adamw", 0.2, (0.8, 0.95), 1e-6, 0.5)
