"""Two nodes on this machine, 127.0.0.1 and 127.0.0.2, each with a supervisor of its own: ranks that die on both, a node that is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from node_jobs import free_port, one_core, other_node, placed

from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.runtime.request import PlanningSettings, StepTold, TrainRequest
from penstock.runtime.run_folder import plan_of_run
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.stores.sealing import KEY_VARIABLE
from penstock.timing.disturbance import Disturbance, DisturbanceStrike


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(KEY_VARIABLE, "5e" * 32)
    with one_core():
        yield


def plan_of(tmp_path: Path) -> Plan:
    """Two stages, one on each node."""
    (tmp_path / "two.yaml").write_text("nodes: [{device: cpu, gpus: 1, count: 2, inter: {bandwidth_gb_per_s: 1}}]\n")
    return uniform_plan("gpt-tiny", str(tmp_path / "two.yaml"), global_batch=4, micro_batch=2, pp=2, layout="packed", precision="fp32")


def steps_of(run: TrainRequest) -> list[tuple[int, float | None, str | None]]:
    return [(one.step, one.loss, one.samples) for one in read_steps(Path(run.out) / "steps.jsonl")]


def test_ranks_of_both_nodes_are_replaced_and_a_node_that_falls_silent_is_done_without(data: str, tmp_path: Path) -> None:
    """To the bit it is the same switch through a checkpoint. What the lost node had learned is in copies that the other keeps."""
    story = Disturbance(strikes=(DisturbanceStrike("kill", 1, "backward", 4), DisturbanceStrike("kill", 0, "update", 7)))
    calm = TrainRequest(plan_of(tmp_path), data, 16, str(tmp_path / "calm"), checkpoint_every=0, on_death="recover", copies=2)
    run, port = replace(calm, out=str(tmp_path / "run"), disturbance=story), free_port()
    with other_node(placed(run, 1, port)) as other:

        def told(step: StepTold) -> None:
            if step.step == 11:
                os.kill(other.pid, signal.SIGSTOP)

        found = PlanTrainer(placed(run, 0, port), None, RunWitness(run.out)).train(told)
    events = list(read_events(run.out))
    assert [(one.event, one.ranks) for one in events] == [
        ("lost", (1,)), ("replaced", (1,)), ("lost", (0,)), ("replaced", (0,)), ("lost", (1,)), ("shrunk", (1,))
    ]  # fmt: skip
    assert events[4].text == "node 1 (127.0.0.2) is lost, with rank 1: it has been silent for 2.5 s"
    switch, smaller = events[5].step, plan_of_run(run.out)
    assert smaller.ranks == (0,) and switch >= 8 and found.num_steps == 16  # no more is done again than since the copies before the last
    PlanTrainer(replace(calm, steps=switch, on_death="end")).train()
    PlanTrainer(replace(calm, plan=smaller, resume=calm.out, on_death="end")).train()
    assert steps_of(run) == steps_of(calm)


def test_nodes_that_were_started_for_something_else_are_refused(data: str, tmp_path: Path) -> None:
    run, port = TrainRequest(plan_of(tmp_path), data, 3, str(tmp_path / "run"), planning=PlanningSettings(0)), free_port()
    with other_node(placed(run, 0, port)):
        for wrong, words in (
            (replace(run, settings=TrainingSettings(seed=1)), "--seed: 0 on node 0, 1 asked for"),
            (replace(run, steps=4), "--steps: 3 on node 0, 4 asked for"),
        ):
            with pytest.raises(InputError, match=words):
                PlanTrainer(placed(wrong, 1, port)).train()
        assert PlanTrainer(placed(run, 1, port)).train().ended_by == 0  # the right one is met all the same
    assert len(steps_of(run)) == 3
    with pytest.raises(InputError, match="--node-rank is 2, but the plan has work for 2 nodes: 0 to 1"):
        PlanTrainer(placed(run, 2, port))
