"""`penstock.Trainer` and `penstock.train`: what the command does, from Python, with callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

import penstock
from penstock.errors import InputError
from penstock.jobs.job_file import job_from, read_job
from penstock.plans.build import uniform_plan

callbacks = pytest.importorskip("transformers.trainer_callback")


class Ending(callbacks.TrainerCallback):  # type: ignore[misc, name-defined]
    """Writes down what it hears, and asks for the end after a step."""

    def __init__(self, last: int) -> None:
        self.last, self.heard, self.epochs = last, [], []  # type: ignore[var-annotated]

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(("begin", args.max_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(("step", state.global_step))
        control.should_training_stop = state.global_step >= self.last

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        assert logs["loss"] == state.log_history[-1]["loss"] > 0
        assert logs["epoch"] == state.epoch
        self.epochs.append(state.epoch)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.heard.append(("end", state.global_step))


class Counting:
    """Hears of steps alone, and may be given as a class, as transformers takes it."""

    steps: ClassVar[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.steps.append(state.global_step)


def test_a_callback_hears_and_ends_and_the_job_goes_on(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    ending = Ending(1)
    settings = {"train.lr": 1e-3, "plan.costs": "roofline"}
    own = {"callbacks": [ending, Counting], "settings": settings}
    trainer = penstock.Trainer("gpt-tiny", rows, out=tmp_path / "run", steps=5, tokens_per_batch=600, **own)  # type: ignore[arg-type]
    assert "plan of gpt-tiny" in str(trainer.plan) and trainer.job.train.lr == 1e-3
    result = trainer.train()
    done = len(result.losses)
    assert 1 <= done < 5  # the step that ran when the end was asked for is finished too
    assert ending.heard == [("begin", 5), *(("step", step) for step in range(1, done + 1)), ("end", done)]
    assert Counting.steps == [*range(1, done + 1)]
    assert ending.epochs == [step * trainer.plan.global_batch / len(rows) for step in range(1, done + 1)]

    job = job_from(read_job(tmp_path / "run" / "job.yaml"), {"train.steps": done + 1}, "the job")
    assert job.train.lr == 1e-3
    again = penstock.train(job.model_dump())
    assert (again.first_step, again.num_steps, again.ended_by) == (done, 1, 0)


def test_plans_of_ones_own(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    plan = uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=4)
    assert penstock.Trainer("gpt-tiny", rows, plan, out=tmp_path / "run").plan == plan
    with pytest.raises(InputError, match="the plan is of another model"):
        penstock.Trainer("gpt-small", rows, plan, out=tmp_path / "run")
    with pytest.raises(InputError, match=r"no field 'train\.speed'"):
        penstock.Trainer("gpt-tiny", rows, plan, out=tmp_path / "run", settings={"train.speed": 2})
    assert not (tmp_path / "run").exists()


def test_a_job_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"job file '.*' does not exist"):
        penstock.train(tmp_path / "job.yaml")
    with pytest.raises(InputError, match="job is NoneType; the path of a job file or a mapping"):
        penstock.train(None)  # type: ignore[arg-type]
