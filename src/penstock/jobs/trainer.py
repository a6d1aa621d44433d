"""`penstock.Trainer` and `penstock.train`: a whole training from Python, as the command does it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError
from penstock.jobs.cache import cache_folder, digest
from penstock.jobs.finding import named_model
from penstock.jobs.job_file import JobFile, anywhere, job_from, read_job
from penstock.jobs.rows import folder_of_rows, is_path
from penstock.jobs.starting import ReadyJob, ready
from penstock.plans.plan import Plan
from penstock.plans.schema import plan_to_dict, write_plan

if TYPE_CHECKING:
    from penstock.runtime.request import StepReport, TrainResult

__all__ = ["Trainer", "train"]


def train(job: str | Path | Mapping[str, Any], *, callbacks: Sequence[Any] = ()) -> TrainResult:
    """Trains the job of a file, or of a mapping with the same fields; goes on where its run was.

    >>> train({"model": {"source": "gpt-tiny"}, "data": {"path": "chats.jsonl"}, "out": "run"})   # doctest: +SKIP
    """
    if isinstance(job, Mapping):
        return _run(ready(job_from(job, {}, "the job")), callbacks)
    if not isinstance(job, str | Path):
        raise InputError(f"job is {type(job).__name__}; the path of a job file or a mapping of its fields was expected.")
    return _run(ready(job_from(read_job(job), {}, f"job file '{job}'")), callbacks)


class Trainer:
    """All in one: prepares data, finds costs and a plan, and trains. `plan` and `job` say what was found before anything is trained.

    >>> trainer = Trainer("hf:llama", "chats.jsonl", out="run")   # doctest: +SKIP
    >>> print(trainer.plan)   # doctest: +SKIP
    >>> trainer.train()   # doctest: +SKIP
    """

    def __init__(
        self, model: str, data: Any, plan: str | Path | Plan = "auto", *, out: str | Path, steps: int | None = None,
        callbacks: Sequence[Any] = (), cluster: str = "local", tokens_per_batch: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            model: A name of the catalogue, a YAML file, `hf:FOLDER` or `module:FILE.py:FUNCTION`.
            data: As `find_plans` takes it.
            plan: `auto` searches for the best; or a plan, or the file of one.
            out: Folder of the run. One that holds this run already is gone on with.
            steps: Iterations in all; once through the data, if not given.
            callbacks: Objects with the methods of transformers' `TrainerCallback`. They hear of training as it begins and ends, of every
                step with its loss, of evaluations, and may ask for its end. Model and optimizer live in other processes, and are None.
            cluster: Devices to plan for.
            tokens_per_batch: Tokens of a global batch, on average.
            settings: Any other fields of a job by their dotted names, such as `{"train.lr": 1e-5}`.
        """
        paths = data if is_path(data) else folder_of_rows(data)
        named = [str(paths)] if isinstance(paths, (str, Path)) else [str(path) for path in paths]
        given = {"model.source": named_model(model), "data.path": named, "out": str(out), "plan.cluster": cluster, **(settings or {})}
        given |= {name: value for name, value in (("train.steps", steps), ("plan.tokens_per_batch", tokens_per_batch)) if value is not None}
        if plan != "auto":
            given["plan.file"] = _plan_file(plan)
        self._ready, self._callbacks = ready(job_from({}, given, "the job")), callbacks

    @property
    def plan(self) -> Plan:
        """The chosen plan; printing it says why."""
        return self._ready.plan

    @property
    def job(self) -> JobFile:
        """Everything resolved, as the run's job.yaml has it."""
        return anywhere(self._ready.job)

    def train(self) -> TrainResult:
        """Trains to the last step, or until a callback asks for the end; losses and times of its steps."""
        return _run(self._ready, self._callbacks)


def _plan_file(plan: str | Path | Plan) -> str:
    if not isinstance(plan, Plan):
        return str(plan)
    path = cache_folder("plans") / f"given-{digest(plan_to_dict(plan))}.json"
    write_plan(path, plan)
    return str(path)


def _run(found: ReadyJob, callbacks: Sequence[Any]) -> TrainResult:
    trainer, under_torchrun = found.trainer(), "WORLD_SIZE" in os.environ and "RANK" in os.environ
    heard = _Heard(found, callbacks)
    heard.call("on_train_begin")
    result: TrainResult = (trainer.join if under_torchrun else trainer.train)(heard.hear)
    heard.call("on_train_end")
    return result


class _Heard:
    """Tells callbacks of a training what transformers' own trainer would."""

    def __init__(self, found: ReadyJob, callbacks: Sequence[Any]) -> None:
        job, steps = found.job, found.job.train.steps or 0
        self._callbacks = [one() if isinstance(one, type) else one for one in callbacks]
        self._asked = False
        self.args = SimpleNamespace(
            output_dir=job.out, max_steps=steps, learning_rate=job.train.lr, weight_decay=job.train.weight_decay, seed=job.train.seed,
            warmup_steps=job.train.warmup, max_grad_norm=job.train.clip, save_steps=job.save.every, eval_steps=job.train.eval_every,
            logging_steps=1, num_train_epochs=job.train.epochs,
        )  # fmt: skip
        self._batch, self._samples = found.plan.global_batch, len(found.prepared.data)
        if not callbacks:
            return
        state, control = _states()
        self.state, self.control = state(global_step=found.first_step, max_steps=steps), control()

    def call(self, event: str, **more: Any) -> None:
        """Calls each callback's method of that event, if it has one; a control that one returns replaces the last."""
        for callback in (one for one in self._callbacks if hasattr(one, event)):
            none = dict.fromkeys(("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"))
            self.control = getattr(callback, event)(self.args, self.state, self.control, **none, **more) or self.control

    def hear(self, step: StepReport) -> None:
        """A step is done."""
        if not self._callbacks:
            return
        self.state.global_step = step.step + 1
        self.state.epoch = (step.step + 1) * self._batch / self._samples
        self.call("on_step_end")
        logs = {"loss": step.loss, "tokens_per_s": step.tokens_per_s, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)
        if step.evaluated is not None:
            self.call("on_evaluate", metrics={"eval_loss": step.evaluated.loss, "eval_accuracy": step.evaluated.accuracy})
        if self.control.should_training_stop and not self._asked:
            self._asked = True
            signal.raise_signal(signal.SIGTERM)  # which ends a run after its step, with a checkpoint


def _states() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Makers of transformers' own `TrainerState` and `TrainerControl`, or of what callbacks read of them."""
    try:
        from transformers.trainer_callback import TrainerControl, TrainerState
    except ImportError:
        return lambda **given: SimpleNamespace(epoch=0.0, log_history=[], **given), lambda: SimpleNamespace(should_training_stop=False)
    return TrainerState, TrainerControl
