"""Two nodes on this machine, 127.0.0.1 and 127.0.0.2, each with a supervisor of its own: ranks that die on both, a node that is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from free_ports import free_port
from node_jobs import one_core, other_node, placed

from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.adapting.watching import obey_run
from penstock.cli.main import run as main
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import read_plan
from penstock.runtime.recovering.faults import Fault, ask_fault
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest
from penstock.runtime.run_folder import last_step, plans_of_run
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


def oracle(run: TrainRequest, steps: int) -> list[tuple[int, float | None, str | None]]:
    """The steps of a run on one machine that goes through the same plans, and from each to the next through a checkpoint."""
    calm = replace(run, out=f"{run.out}-calm", on_death="end", disturbance=Disturbance())
    plans = plans_of_run(run.out)
    for (first, path), end in zip(plans.items(), [*plans, steps][1:], strict=True):
        PlanTrainer(replace(calm, plan=read_plan(path), steps=end, resume=calm.out if first else "")).train()
    return steps_of(calm)


def test_ranks_die_on_both_nodes_one_falls_silent_another_joins_in_its_place_and_the_first_leaves(data: str, tmp_path: Path) -> None:
    """To the bit it is the same switches through checkpoints. What the lost node had learned is in copies that the other keeps. SIGTERM has
    a node leave, after which nothing is done again but what followed its parting copies; the last one ends the run."""
    story = Disturbance(strikes=(DisturbanceStrike("kill", 1, "backward", 4), DisturbanceStrike("kill", 0, "update", 7)))
    plan, port = plan_of(tmp_path), free_port()
    run = TrainRequest(plan, data, 2000, str(tmp_path / "run"), checkpoint_every=0, on_death="recover", copies=3, disturbance=story)
    with ExitStack() as stack:
        others = [stack.enter_context(other_node(placed(run, 1, port)))]

        def told(step: StepReport) -> None:
            if step.step == 11:
                os.kill(others[0].pid, signal.SIGSTOP)
                others.append(stack.enter_context(other_node(placed(run, 1, port))))
            if any("is there" in note for note in step.notes):
                os.kill(os.getpid(), signal.SIGTERM)

        found = PlanTrainer(placed(run, 0, port), None, RunWitness(run.out)).train(told)
        assert (found.has_left, found.ended_by, found.losses) == (True, signal.SIGTERM, ())
        while [one.event for one in read_events(run.out)][-1] != "shrunk":
            time.sleep(0.05)
        others[1].terminate()
        others[1].join()
    events = list(read_events(run.out))
    assert [(one.event, one.ranks) for one in events] == [
        ("lost", (1,)), ("replaced", (1,)), ("lost", (0,)), ("replaced", (0,)), ("lost", (1,)), ("shrunk", (1,)), ("joined", (1,)),
        ("left", (0,)), ("shrunk", (0,)),
    ]  # fmt: skip
    assert events[7].text == "node 0 leaves, with rank 0, as it was asked to (SIGTERM). Node 1 leads now"
    assert events[4].text == "node 1 (127.0.0.2) is lost, with rank 1: it has been silent for 2.5 s"
    assert events[6].text.startswith("rank 1 is there, a plan of ranks 0-1 is in force. Training went on from step ")
    plans = list(map(read_plan, plans_of_run(run.out).values()))
    assert events[5].step >= 6 and plans[0] == plans[-2] == plan and plans[-1].ranks == (1,)
    assert not (Path(run.out) / "leader.json").exists()
    end = last_step(run.out) + 1  # it may have ended before all that was left was done again
    assert steps_of(run)[:end] == oracle(run, end)


def test_a_node_that_leaves_moves_its_work_away_and_no_step_is_done_again(data: str, tmp_path: Path) -> None:
    """SIGTERM to a node that does not lead: the others go on in their processes, to the bit as through a checkpoint, and copy what they
    learn without it: a death long after that goes back to a step under their plan."""
    plan, port = plan_of(tmp_path), free_port()
    run = TrainRequest(plan, data, 2000, str(tmp_path / "run"), checkpoint_every=0, on_death="recover", copies=3)
    with other_node(placed(run, 1, port), obey_run) as other:

        def told(step: StepReport) -> None:
            if step.step == 4:
                other.terminate()
            if any("another plan" in note for note in step.notes):
                ask_fault(run.out, Fault("kill", 0, "backward", step.step + 40))
            if any("another process" in note for note in step.notes):
                os.kill(os.getpid(), signal.SIGTERM)

        found = PlanTrainer(placed(run, 0, port), obey_run, RunWitness(run.out)).train(told)
        other.join()
    *first, lost, replaced = read_events(run.out)
    left, moved = sorted(first, key=lambda one: one.event)  # a rank and the launcher write them, whichever comes first
    assert [one.event for one in (left, moved, lost, replaced)] == ["left", "moved", "lost", "replaced"]
    assert moved.text.startswith(f"another plan (without rank 1) is in force from step {moved.step} on: ")
    assert left.text == "node 1 (127.0.0.2) leaves, with rank 1, as it was asked to (SIGTERM)"
    assert found.ended_by == signal.SIGTERM and found.plan is not None and found.plan.ranks == (0,)
    numbers = [json.loads(line)["step"] for line in (Path(run.out) / "steps.jsonl").read_text().splitlines()]
    again = next(later for before, later in pairwise(numbers) if later <= before)
    assert again == replaced.step > moved.step + run.copies  # nothing before the death, and only what followed the newest copy
    assert list(plans_of_run(run.out)) == [0, moved.step] and steps_of(run) == oracle(run, last_step(run.out) + 1)


def test_another_node_leads_when_the_first_stands_still(data: str, tmp_path: Path) -> None:
    """The first one's store, planners and supervisor are lost with it; where the run is, is in its folder, whose lock is taken from it."""
    port = free_port()
    story = Disturbance(strikes=(DisturbanceStrike("freeze", None, "backward", 5),))
    run = TrainRequest(
        plan_of(tmp_path), data, 2000, str(tmp_path / "run"), checkpoint_every=0, on_death="recover", copies=2, disturbance=story
    )
    heard = list[StepReport]()
    with other_node(placed(run, 0, port)):

        def told(step: StepReport) -> None:
            if not heard:
                assert main(["disturb", run.out, "--node", "7"]) == 2
                assert main(["disturb", run.out, "--node", "0"]) == 0  # it is still there
                os.kill(os.getpid(), signal.SIGTERM)
            heard.append(step)

        found = PlanTrainer(placed(run, 1, port), None, RunWitness(run.out)).train(told)
    events = list(read_events(run.out))
    assert [(one.event, one.ranks) for one in events] == [("lost", (0,)), ("shrunk", (0,)), ("disturbed", ())]
    assert events[0].text == "node 0 is lost, with rank 0: it has been silent for 2.5 s. Node 1 leads now"
    number = last_step(run.out) + 1
    assert found.ended_by == signal.SIGTERM and found.num_steps == len(found.losses) == number == heard[-1].step + 1
    assert steps_of(run) == oracle(run, number) and len(plans_of_run(run.out)) == 2


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
    with pytest.raises(InputError, match="--node-rank is 2, but the plan has work for 2 nodes, numbered from 0"):
        PlanTrainer(placed(run, 2, port))
