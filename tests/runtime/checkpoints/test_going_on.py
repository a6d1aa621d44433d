"""A run goes on under another plan and with moved data, and as nothing else: refused with both values, before anything is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from training_jobs import rank_of

from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.runtime.checkpoints.going_on import RUN, run_facts
from penstock.runtime.checkpoints.writer import CheckpointWriter
from penstock.runtime.rank_state import rank_pieces, rank_state
from penstock.runtime.request import TrainRequest
from penstock.runtime.settings import OptimizerSettings, TrainingSettings
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.transport.world import ProcessGroups

Change = Callable[[TrainRequest, Path], TrainRequest]


def plan_of(global_batch: int = 8, pp: int = 1, **model: object) -> Plan:
    plan = uniform_plan("gpt-tiny", "2xcpu", global_batch=global_batch, micro_batch=2, pp=pp, layout="packed")
    return replace(plan, model={"base": "gpt-tiny", **model}) if model else plan


@pytest.fixture
def saved(data: str, tmp_path: Path) -> TrainRequest:
    """A request that goes on from a checkpoint of step 3, into a folder that is not there."""
    plan = plan_of()
    rank = rank_of(plan, ProcessGroups(), TrainingSettings())
    writer = CheckpointWriter(tmp_path / "first" / "checkpoints")
    facts = run_facts(model_of(plan), data, seed=0, global_batch=8)
    writer.save(3, rank_pieces(rank), {**rank_state(rank), RUN: facts})
    writer.wait()
    return TrainRequest(plan, data, 9, str(tmp_path / "run"), resume=str(tmp_path / "first"))


def copied(request: TrainRequest, folder: Path, file: str = "") -> TrainRequest:
    """The same data elsewhere, with one byte of a file changed."""
    shutil.copytree(request.data, folder / "copy")
    if file:
        path = folder / "copy" / file
        path.write_bytes(path.read_bytes()[:-3] + b"x" + path.read_bytes()[-2:])
    return replace(request, data=str(folder / "copy"))


def test_another_plan_and_moved_data(saved: TrainRequest, tmp_path: Path) -> None:
    assert PlanTrainer(replace(copied(saved, tmp_path), plan=plan_of(pp=2))).first_step == 3
    assert PlanTrainer(replace(saved, plan=plan_of(dropout=0.1))).first_step == 3


def changed_weights(request: TrainRequest, folder: Path) -> TrainRequest:
    path = next((folder / "first").rglob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    return request


def changed_manifest(request: TrainRequest, folder: Path) -> TrainRequest:
    path = next((folder / "first").rglob("manifest.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": -3}))
    return request


def other_shares(request: TrainRequest, folder: Path) -> TrainRequest:
    """The same samples, of which other ones come next."""
    request = copied(request, folder)
    path = Path(request.data) / "data.json"
    found = json.loads(path.read_text())
    tasks = found["splits"]["train"]["tasks"]
    tasks[:] = [{**task, "weight": place + 1.0} for place, task in enumerate(tasks)]
    path.write_text(json.dumps(found))
    return request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one, _: replace(one, settings=TrainingSettings(seed=5)), "--seed: 0 in the checkpoint, 5 asked for"),
        (lambda one, _: replace(one, plan=plan_of(16)), "global batch: 8 in the checkpoint, 16 asked for"),
        (lambda one, _: replace(one, plan=plan_of(heads=8)), "model's heads: 4 in the checkpoint, 8 asked for"),
        (lambda one, _: replace(one, plan=plan_of(hidden=128)), "model's hidden: 64 in the checkpoint, 128 asked for"),
        (lambda one, folder: copied(one, folder, "train_input.bin"), r"--data: '.*data' \(.*\) in the checkpoint, '.*copy' \(.*\) asked"),
        (lambda one, folder: copied(one, folder, "tokenizer.json"), "tokenizer: '.* of 384 tokens' in the checkpoint"),
        (other_shares, r"shares of tasks: \[\] in the checkpoint, \[.*1\.0\].* asked for"),
        (changed_weights, "is damaged .its checksum differs.. Use an earlier checkpoint"),
        (changed_manifest, "says that it has -3 steps behind it"),
    ],
)
def test_anything_else(saved: TrainRequest, tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(InputError, match=message):
        PlanTrainer(change(saved, tmp_path))
    assert not Path(saved.out).exists()


def test_an_optimizer_that_has_no_state_in_it(saved: TrainRequest) -> None:
    """A checkpoint of before the first step has none at all, which suits every optimizer."""
    assert PlanTrainer(replace(saved, settings=TrainingSettings(optimizer=OptimizerSettings("sgd")))).first_step == 3
