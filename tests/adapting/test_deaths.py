"""Real runs whose ranks die, fail and freeze: they go on, to the bit as if nothing had happened, and tell of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.adapting.deaths import RunWitness
from penstock.adapting.events import read_events
from penstock.cli.main import run as main
from penstock.errors import InfeasibleError, InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.runtime.checkpoints.folder import find_checkpoint
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.request import PlanningSettings, StepReport, TrainRequest, TrainResult
from penstock.runtime.run_folder import plan_of_run
from penstock.runtime.settings import TrainingSettings
from penstock.runtime.telemetry.process_files import read_process
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import WorkerError
from penstock.timing.disturbance import Disturbance, DisturbanceStrike


def plan_of(**choice: int) -> Plan:
    return uniform_plan("gpt-tiny", "4xcpu", global_batch=4, micro_batch=2, layout="packed", precision="fp32", **choice)


def request(plan: Plan, data: str, out: Path, steps: int, **options: object) -> TrainRequest:
    return TrainRequest(plan, data, steps, str(out), checkpoint_every=0, planning=PlanningSettings(0), **options)  # type: ignore[arg-type]


def struck(wanted: TrainRequest, asked: dict[int, tuple[str, ...]]) -> TrainResult:
    """A run that recovers; `penstock disturb` is asked for something after some steps."""

    def told(step: StepReport) -> None:
        if step.step in asked:
            assert main(["disturb", wanted.out, *asked.pop(step.step)]) == 0

    return PlanTrainer(wanted, None, RunWitness(wanted.out)).train(told)


def steps_of(run: TrainRequest) -> list[tuple[int, float | None, str | None]]:
    return [(one.step, one.loss, one.samples) for one in read_steps(Path(run.out) / "steps.jsonl")]


def test_a_run_whose_folder_is_gone_when_a_rank_dies_ends_with_what_was_learned(data: str, tmp_path: Path) -> None:
    """Nobody could go on in it, but the copies are put there again, as a checkpoint."""
    wanted = request(plan_of(pp=2), data, tmp_path / "run", 2000, on_death="recover", copies=2)

    def told(step: StepReport) -> None:
        if step.step == 4:
            pid = read_process(wanted.out, 1).pid  # type: ignore[union-attr]
            os.rename(wanted.out, tmp_path / "elsewhere")
            os.kill(pid, signal.SIGKILL)

    words = r"(?s)rank 1 was killed.*\nTraining cannot go on: .*plan.json' does not exist.*\nStep \d+ is safe"
    with pytest.raises(WorkerError, match=words):
        PlanTrainer(wanted, None, RunWitness(wanted.out)).train(told)
    assert Checkpoint(find_checkpoint(wanted.out)).step >= 2


def test_ranks_that_die_fail_and_freeze_are_replaced(data: str, tmp_path: Path) -> None:
    """Killed, failed, out of memory, stopped, cut off: in phases of a step, while copies are made, while a checkpoint is written, and while
    others take the place of one that died. Losses, samples and results are to the bit those of a run that nothing happens to."""
    calm = request(plan_of(dp=2, zero=1), data, tmp_path / "calm", 20)
    wanted = PlanTrainer(calm).train()
    story = (
        ("kill", 1, "backward", 2), ("fail", 0, "recovering", 0), ("oom", 0, "gathered", 5), ("freeze", 1, "sharing", 8),
        ("kill", 0, "copying", 11), ("cut", 1, "saving", 14),
    )  # fmt: skip
    strikes = tuple(DisturbanceStrike(*one) for one in story)  # type: ignore[arg-type]
    run = replace(
        calm, out=str(tmp_path / "run"), on_death="recover", copies=3, checkpoint_every=15, disturbance=Disturbance(strikes=strikes)
    )
    found = struck(run, {})
    assert steps_of(run) == steps_of(calm)
    assert (found.losses, found.first_step, found.num_steps) == (wanted.losses, 0, 20)
    events = list(read_events(run.out))
    said = [one.text for one in events if one.event == "lost"]
    assert [one.ranks for one in events[:3]] == [(1,), (0,), (0, 1)]
    assert [one.event for one in events] == ["lost", "lost", "replaced", *["lost", "replaced"] * 4]
    assert [one.ranks for one in events[3:9]] == [(rank,) for rank in (0, 0, 1, 1, 0, 0)]
    assert said[0].startswith("rank 1 was killed by signal 9 (SIGKILL) at Backward of stage 0, micro-batch 0 (iteration ")
    assert said[1] == "rank 0 failed: FaultAsked: as was asked of rank 0"
    assert "at step (instruction " in said[2] and "allocate memory" in said[2]
    assert said[3].startswith("rank 1 was stopped by a signal at Step (iteration ") and said[3].endswith(", and was ended")
    assert all(one.pause_s and "Training went on from step " in one.text for one in events if one.event == "replaced")
    left = {path.name for path in Path(run.out).iterdir()}
    assert not {"faults", "rank-00000.process.json", "rank-00001.process.json"} & left
    assert find_checkpoint(run.out).name.endswith("step-20") and not list((Path(run.out) / "checkpoints").glob(".*"))


def test_a_rank_that_dies_twice_is_left_out(data: str, tmp_path: Path) -> None:
    """Its device counts as broken. To the bit it is the same switch through a checkpoint."""
    story = Disturbance(strikes=(DisturbanceStrike("kill", 0, "forward", 6),) * 2)
    run = request(plan_of(pp=2), data, tmp_path / "run", 8, on_death="recover", copies=4, disturbance=story)
    found = struck(run, {})
    assert [one.event for one in read_events(run.out)] == ["lost", "replaced", "lost", "shrunk"]
    smaller = plan_of_run(run.out)
    assert smaller.ranks == (1,) and found.plan == smaller and found.num_steps == 8
    assert not list(Path(run.out).glob("*.process.json"))
    first = request(plan_of(pp=2), data, tmp_path / "first", 4)
    PlanTrainer(first).train()
    PlanTrainer(replace(first, plan=smaller, steps=8, resume=first.out)).train()
    assert steps_of(run) == steps_of(first)


def test_a_spare_takes_the_place_of_a_device_that_is_broken(data: str, tmp_path: Path) -> None:
    """To the bit: it is the same plan on other devices."""
    story = Disturbance(strikes=(DisturbanceStrike("kill", 1, "backward", 4),) * 2)
    run = request(plan_of(pp=2), data, tmp_path / "run", 6, on_death="recover", copies=3, spares=1, disturbance=story)
    found = struck(run, {})
    events = list(read_events(run.out))
    assert [one.event for one in events] == ["lost", "replaced"] * 2 and plan_of_run(run.out).ranks == (0, 2)
    assert events[3].text.startswith("rank 1 is left out, a plan of ranks 0,2 is in force. Training went on from step 3")
    assert found.losses == PlanTrainer(request(plan_of(pp=2), data, tmp_path / "calm", 6)).train().losses


@pytest.mark.parametrize(
    ("options", "words"),
    [({"spares": 3, "on_death": "recover"}, "cluster has 4 devices, 2 of them after rank 1"),
     ({"spares": 1}, "Add --on-death recover"),
     ({"disturbance": Disturbance(strikes=(DisturbanceStrike("kill", None, "update"),))}, "the store is to be struck, but this run has 1")],
)  # fmt: skip
def test_spares_without_use_and_strikes_without_nodes_are_refused(data: str, tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        PlanTrainer(request(plan_of(pp=2), data, tmp_path / "run", 6, **options))


def test_a_step_that_nobody_survives_ends_the_run_with_a_checkpoint(data: str, tmp_path: Path) -> None:
    """Of the copies, which are newer than any other; and the command that goes on from there is told."""
    story = Disturbance(strikes=(DisturbanceStrike("kill", 0, "backward", 5),) * 3)
    run = request(plan_of(), data, tmp_path / "run", 9, on_death="recover", copies=4, disturbance=story)
    with pytest.raises(WorkerError, match=r"rank 0 was killed(.|\n)*Step 4 is safe. Go on with: penstock train … --out .*run --resume "):
        struck(run, {})
    assert [one.event for one in read_events(run.out)] == ["lost", "replaced"] * 2 + ["lost"]
    calm = request(plan_of(), data, tmp_path / "calm", 9)
    assert PlanTrainer(replace(run, resume=run.out, disturbance=Disturbance())).train().losses == PlanTrainer(calm).train().losses[4:]


def test_without_copies_it_goes_back_to_a_checkpoint_or_the_beginning(data: str, tmp_path: Path) -> None:
    calm = request(plan_of(pp=2), data, tmp_path / "calm", 30)
    wanted = PlanTrainer(calm).train()
    run = replace(calm, out=str(tmp_path / "run"), on_death="recover", copies=0, checkpoint_every=10)
    story = Disturbance(strikes=(DisturbanceStrike("kill", 1, "update", 3),))
    found = struck(replace(run, planning=PlanningSettings(1), disturbance=story), {12: ("--kill", "0")})
    assert found.losses == wanted.losses and steps_of(run) == steps_of(calm)
    events = list(read_events(run.out))
    assert [one.event for one in events] == ["lost", "replaced", "disturbed", "lost", "replaced"]
    assert events[1].step == 0 and events[4].step % 10 == 0  # whichever checkpoint was whole by then


def test_a_run_recovers_whose_first_checkpoint_has_made_room_for_others(data: str, tmp_path: Path) -> None:
    """The one that it was resumed from is of no account once there are newer ones."""
    run = request(plan_of(), data, tmp_path / "run", 8, on_death="recover", copies=2, keep=1)
    PlanTrainer(replace(run, steps=2)).train()
    story = Disturbance(strikes=(DisturbanceStrike("kill", 0, "backward", 7),))
    found = struck(replace(run, resume=run.out, checkpoint_every=2, disturbance=story), {})
    assert [one.event for one in read_events(run.out)] == ["lost", "replaced"]
    assert (found.first_step, found.num_steps) == (2, 6)


def test_a_failure_that_another_would_meet_too_ends_the_run(data: str, tmp_path: Path) -> None:
    """Here a checkpoint that cannot be written; nobody is started again for it."""
    run = request(plan_of(), data, tmp_path / "run", 3, on_death="recover")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(WorkerError, match="cannot hold checkpoints"):
        PlanTrainer(run, None, RunWitness(run.out)).train()
    assert not list(read_events(run.out))


def test_no_plan_without_the_only_device() -> None:
    with pytest.raises(InfeasibleError, match="nothing is left for training without rank 0"):
        RunWitness(os.devnull).smaller_plan(plan_of(), [0], [])


@pytest.fixture(params=["time slices", "MPS"])
def shared_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes take turns on the GPU, or run on it together."""
    control = "nvidia-cuda-mps-control"
    if request.param != "MPS":
        yield
        return
    if shutil.which(control) is None:
        pytest.skip(f"needs {control}")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", str(tmp_path))
    subprocess.run([control, "-d"], check=True, timeout=250)
    try:
        yield
    finally:
        subprocess.run([control], input=b"quit -t 5\n", check=True, timeout=250)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.usefixtures("shared_gpu")
def test_ranks_that_share_a_gpu_all_end_with_one_and_go_on_from_copies_in_host_memory(data: str, tmp_path: Path) -> None:
    """A death may take the GPU's context, and with it what all of them have learned, away; to the bit it is as if nothing had happened."""
    plan = uniform_plan("gpt-tiny", "2xh200", global_batch=4, micro_batch=2, layout="packed", precision="fp32", pp=2)
    settings = TrainingSettings(deterministic=True)
    calm = request(plan, data, tmp_path / "calm", 12, device="cuda", share_gpus=True, settings=settings)
    wanted = PlanTrainer(calm).train()
    story = ("kill", 1, "backward", 4), ("freeze", 0, "update", 7), ("oom", 1, "forward", 10)
    strikes = tuple(DisturbanceStrike(*one) for one in story)  # type: ignore[arg-type]
    run = replace(calm, out=str(tmp_path / "run"), on_death="recover", copies=3, disturbance=Disturbance(strikes=strikes))
    processes = defaultdict[int, set[int]](set)

    def told(step: StepReport) -> None:
        for rank in plan.ranks:
            if (process := read_process(run.out, rank)) is not None:  # it has not ended after the last step
                processes[rank].add(process.pid)

    found = PlanTrainer(run, None, RunWitness(run.out)).train(told)
    assert found.losses == wanted.losses and steps_of(run) == steps_of(calm)
    events = list(read_events(run.out))
    assert [one.event for one in events] == ["lost", "replaced"] * 3
    assert [one.step for one in events if one.event == "replaced"] == [3, 6, 9]  # without a checkpoint before them
    assert {rank: len(own) for rank, own in processes.items()} == {0: 4, 1: 4}
