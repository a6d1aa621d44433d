"""Training for real: losses fall, a run goes on under another plan, and wrong input is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import with_last_values
from torchrun_ranks import run_ranks
from training_jobs import train_slowly

from penstock.cli.main import run
from penstock.data.bundled import bundled_files
from penstock.data.text.prepare import TextRequest, prepare_text
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching, Plan
from penstock.plans.schema import write_plan
from penstock.runtime.nodes.supervisor import hearing
from penstock.runtime.request import PACED, RECOVER, TIMED, NodePlace, PlanAdopted, PlanningSettings, StepReport, TrainRequest
from penstock.runtime.run_folder import plan_of_run, plans_of_run
from penstock.runtime.settings import LearningRate, TrainingSettings
from penstock.runtime.telemetry.spans_reader import RankSpans, read_run, read_spans
from penstock.runtime.telemetry.steps import read_steps
from penstock.runtime.trainer import PlanTrainer
from penstock.runtime.workers import WorkerError
from penstock.timing.disturbance import Disturbance, DisturbanceStrike

SETTINGS = TrainingSettings(LearningRate(2e-3))


def plan_of(**degrees: int) -> Plan:
    return uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, layout="packed", **degrees)  # type: ignore[arg-type]


def test_a_run_goes_on_under_another_plan(data: str, tmp_path: Path) -> None:
    heard: list[StepReport] = []
    first = TrainRequest(
        plan_of(pp=2), data, 6, str(tmp_path / "first"), SETTINGS, eval_every=4, eval_batches=2, checkpoint_every=3, keep=3
    )  # fmt: skip
    straight = PlanTrainer(first).train(heard.append)
    assert [one.step for one in heard] == list(range(6)) and [one.loss for one in heard] == list(straight.losses)
    assert straight.losses[-1] < straight.losses[0] - 0.2
    assert [one.step for one in straight.evaluated] == [4, 6] and straight.evaluated[1].loss < straight.evaluated[0].loss
    records = read_steps(tmp_path / "first" / "steps.jsonl")
    assert [record.loss for record in records] == list(straight.losses) and all(record.tokens for record in records)
    held_out = [(one.step + 1, one.held_out_loss, one.held_out_accuracy) for one in records if one.held_out_loss is not None]
    assert held_out == [(one.step, one.loss, one.accuracy) for one in straight.evaluated]
    assert sorted(path.name for path in (tmp_path / "first").glob("*.spans")) == ["rank-00000.spans", "rank-00001.spans"]
    assert set(straight.stages) == {0, 1} and straight.stages[0].num_passes > 0

    saved = next((tmp_path / "first" / "checkpoints").glob("*-step-3"))
    other = replace(first, plan=plan_of(tp=2, replicas=2), out=str(tmp_path / "second"), resume=str(saved), eval_every=0)
    again = PlanTrainer(other).train()
    assert again.first_step == 3 and again.losses == pytest.approx(straight.losses[3:], rel=1e-5)
    with pytest.raises(InputError, match="has 6 steps behind it, which --steps 6 counts too"):
        PlanTrainer(replace(first, resume=str(tmp_path / "first")))


def test_a_folder_that_is_used_again(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run from the start is refused before anything is touched; one that goes on adds to the steps, and counts what is left."""
    write_plan(tmp_path / "plan.json", plan_of())
    command = ["train", str(tmp_path / "plan.json"), "--data", data, "--out", str(tmp_path / "run")]
    again = ("--steps", "5", "--resume", str(tmp_path / "run"))
    for options, status, steps in ((("--steps", "3"), 0, 3), (("--steps", "5"), 2, 3), (again, 0, 5)):
        assert run([*command, *options]) == status
        assert [record.step for record in read_steps(tmp_path / "run" / "steps.jsonl")] == list(range(steps))
    told = capsys.readouterr()
    assert "holds a run already" in told.err and "Traceback" not in told.err
    assert "trained 2 steps" in told.out and told.err.splitlines()[-1].split("so far")[0].count("2/2") == 1


def test_a_full_disk_is_told_once_and_training_goes_on(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "steps.jsonl").symlink_to("/dev/full")
    write_plan(tmp_path / "plan.json", plan_of())
    assert run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "8", "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err.count("note: steps are no longer recorded: [Errno 28] No space left on device.") == 1


def num_forwards(one: RankSpans) -> int:
    return sum(one.kinds[int(kind)] == "Forward" for kind in one.spans["kind"])


def test_unequal_replicas_train_like_one_process_and_go_on(data: str, tmp_path: Path) -> None:
    """Three and one micro-batches of four samples: the losses of one process, also when a run goes on with other shares."""
    alone = PlanTrainer(TrainRequest(plan_of(), data, 4, str(tmp_path / "alone"), SETTINGS)).train()
    plan = plan_of(replicas=2)
    unequal, turned = (replace(plan, micro_batching=replace(plan.micro_batching, per_replica=counts)) for counts in ((3, 1), (1, 3)))
    first = TrainRequest(unequal, data, 4, str(tmp_path / "first"), SETTINGS, checkpoint_every=2)
    found = PlanTrainer(first).train()
    assert found.losses == pytest.approx(alone.losses, rel=1e-5)
    assert [num_forwards(one) for one in read_run(tmp_path / "first")] == [3 * 4, 1 * 4]
    saved = next((tmp_path / "first" / "checkpoints").glob("*-step-2"))
    again = PlanTrainer(replace(first, plan=turned, out=str(tmp_path / "again"), resume=str(saved), checkpoint_every=0)).train()
    assert again.first_step == 2 and again.losses == pytest.approx(alone.losses[2:], rel=1e-5)


def on_devices(plan: Plan, *devices: int) -> Plan:
    """A plan of one device for each stage, on these."""
    return replace(plan, stages=tuple(replace(stage, devices=((own,),)) for stage, own in zip(plan.stages, devices, strict=True)))


def test_devices_without_work_stay_idle(data: str, tmp_path: Path) -> None:
    """Planners, records, checkpoints and the result are those of the ranks that the plan has."""
    requests = [TrainRequest(plan, data, 3, str(tmp_path / name), SETTINGS)
                for name, plan in (("two", plan_of(pp=2)), ("of four", on_devices(plan_of(pp=2), 3, 1)))]  # fmt: skip
    found = [PlanTrainer(request).train() for request in requests]
    assert found[0].losses == found[1].losses and found[1].num_steps == 3
    worked = [rank for rank in range(4) if read_spans(tmp_path / "of four" / f"rank-{rank:05d}.spans").iterations]
    assert worked == [1, 3]
    again = replace(requests[0], resume=str(tmp_path / "of four"), out=str(tmp_path / "again"), steps=4)
    assert PlanTrainer(again).train().first_step == 3


def test_planners_follow_a_run_to_another_plan(data: str, tmp_path: Path) -> None:
    adopted, told = [], []
    planners = SimpleNamespace(adopt=lambda step, planner: adopted.append((step, planner.plan)))
    hear = hearing(TrainRequest(plan_of(pp=2), data, 3, str(tmp_path / "run")), planners, told.append)  # type: ignore[arg-type]
    hear(StepReport(4, 5.0, 1.0))
    hear(PlanAdopted(5, plan_of(tp=2)))
    assert plan_of_run(tmp_path / "run") == plan_of(tp=2) and list(plans_of_run(tmp_path / "run")) == [5]
    assert adopted == [(5, plan_of(tp=2))] and told == [StepReport(4, 5.0, 1.0)]


def test_processes_of_torchrun_do_the_same_training(data: str, tmp_path: Path) -> None:
    """Of three devices the plan leaves one out, and no process was started for it."""
    write_plan(tmp_path / "plan.json", on_devices(plan_of(pp=2), 0, 2))
    options = [str(tmp_path / "plan.json"), "--data", data, "--steps", "2", "--out", str(tmp_path / "run"), "--json", "--lr", "2e-3"]
    options += ["--compare", "--planners", "0"]
    first, second = run_ranks(["train", *options], [{"LOCAL_RANK": "0"}, {"LOCAL_RANK": "1"}], tmp_path)
    assert (first.status, second.status) == (0, 0), first.err[-2000:] + second.err[-2000:]
    found = json.loads(first.out)
    assert not second.out
    assert [stage["stage"] for stage in found["stages"]] == [0, 1] and all(stage["forward_measured_s"] > 0 for stage in found["stages"])
    alone = PlanTrainer(TrainRequest(plan_of(), data, 2, str(tmp_path / "alone"), SETTINGS)).train()
    assert found["losses"] == pytest.approx(alone.losses, rel=1e-5)


def test_dynamic_micro_batches(data: str, tmp_path: Path) -> None:
    """The loss is that of the global batch, however it is cut and interleaved: that of one process."""
    alone = PlanTrainer(TrainRequest(plan_of(), data, 3, str(tmp_path / "alone"), SETTINGS)).train()
    for number, more in enumerate(({}, {"chunks": 2, "schedule": "interleaved"})):
        plan = replace(plan_of(pp=2, **more), micro_batching=MicroBatching("packed", "dynamic"))  # type: ignore[arg-type]
        dynamic = PlanTrainer(TrainRequest(plan, data, 3, str(tmp_path / str(number)), SETTINGS)).train()
        assert dynamic.losses == pytest.approx(alone.losses, rel=1e-4)


def test_a_failure_is_told_in_one_message(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "steps.jsonl").mkdir(parents=True)
    with pytest.raises(WorkerError, match=r"rank 0: '.*steps.jsonl' cannot be written: Is a directory"):
        PlanTrainer(TrainRequest(plan_of(pp=2), data, 3, str(tmp_path / "run"), SETTINGS)).train()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (
            {"cluster_ref": "256xcpu", "pp": 4, "replicas": 64, "global_batch": 256, "micro_batch": 1},
            (),
            "the plan has 256 ranks, but this",
        ),
        ({"global_batch": 4096}, (), "fewer than one global batch of 4096"),
        ({"model_ref": "gpt-small", "seq_length": 64}, ("--steps", "0"), "--steps is 0"),
        ({}, ("--resume", "nowhere"), "'nowhere' holds no checkpoint"),
        ({}, ("--device", "abacus"), "cpu or cuda was expected"),
        ({}, ("--lr", "-1"), "--lr is -1.0; 0 or more was expected"),
        ({}, ("--torch-profile", "x"), "--torch-profile is 'x'"),
        ({}, ("--torch-profile", "2,3"), "step 3 is to be profiled, but this run has steps 0 to 2"),
        ({}, ("--data", "nowhere"), "folder 'nowhere' holds no prepared data"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], options: tuple[str, ...], message: str
) -> None:
    fields = {"model_ref": "gpt-tiny", "cluster_ref": "4xcpu", "global_batch": 16, "micro_batch": 4, "pp": 2, "layout": "packed"} | changes
    write_plan(tmp_path / "plan.json", uniform_plan(**fields))  # type: ignore[arg-type]
    where = () if "--data" in options else ("--data", data)
    words = ["train", str(tmp_path / "plan.json"), *where, "--steps", "3", "--out", str(tmp_path / "run"), *options]
    assert run(with_last_values(words)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def strike_of(phase: str) -> Disturbance:
    return Disturbance(strikes=(DisturbanceStrike("kill", 1, phase),))


@pytest.mark.parametrize(
    ("options", "torchrun", "message"),
    [
        ({"steps": 0}, 0, "0 steps were asked for"),
        ({"keep": 0}, 0, "0 checkpoints are to be kept"),
        ({"on_death": "live"}, 0, "--on-death is 'live'; end or recover was expected"),
        ({"on_death": RECOVER}, 2, "torchrun ends all of its own when one fails"),
        ({"on_death": RECOVER, "device": TIMED}, 0, "have nothing to lose"),
        ({"on_death": RECOVER, "copies": 1}, 0, "but this machine has 1e-09 GB of memory left"),
        ({"node": NodePlace(0, "host", 1)}, 2, "--node-rank is for supervisors"),
        ({"node": NodePlace(0, "host", 1), "device": TIMED}, 0, "--node-rank is for supervisors"),
        ({"node": NodePlace(1, "host", 1)}, 0, "--node-rank is 1, but the plan has work for 1 node"),
        ({"device": PACED}, 2, "keep one clock"),
        ({}, 3, "3 processes"),
        ({"plan": "without the first"}, 3, "the first process tells what a run does, but the plan leaves rank 0 out"),
        ({"disturbance": strike_of("lunch")}, 0, "is to be struck in phase 'lunch'"),
        ({"disturbance": strike_of("update"), "device": TIMED}, 0, "learn nothing that could be lost"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_made(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], torchrun: int, message: str
) -> None:
    monkeypatch.setattr("penstock.runtime.recovering.recovery._free_bytes", lambda: 1)
    if torchrun:
        monkeypatch.setenv("WORLD_SIZE", str(torchrun))
    plan = on_devices(plan_of(pp=2), *((1, 2) if "plan" in options else (0, 1)))
    with pytest.raises(InputError, match=message):
        PlanTrainer(replace(TrainRequest(plan, data, 3, str(tmp_path / "run")), **{**options, "plan": plan}))
    assert not (tmp_path / "run").exists()


def test_an_evaluation_needs_samples_that_were_held_out(tmp_path: Path) -> None:
    prepare_text(TextRequest(tuple(bundled_files()), tmp_path / "data", train_tokenizer=384, split=(1.0, 0.0, 0.0)))
    request = TrainRequest(plan_of(pp=2), str(tmp_path / "data"), 3, str(tmp_path / "run"), eval_every=2)
    with pytest.raises(InputError, match=r"evaluation was asked for, but data .* has no split 'validation'"):
        PlanTrainer(request)
    PlanTrainer(replace(request, eval_every=0))


def test_waits_without_an_end_or_a_beginning_are_refused() -> None:
    wrong = (({"planners": -1}, "-1 planners"), ({"wait_s": 0.0}, "may wait for 0.0 s"), ({"away_s": -1.0}, "may be away for"))
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            PlanningSettings(**options)  # type: ignore[arg-type]
    PlanningSettings(planners=0, away_s=0.0)


def test_a_vocabulary_that_does_not_match(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = replace(plan_of(pp=2), model={"base": "gpt-tiny", "vocab": 100})
    write_plan(tmp_path / "plan.json", plan)
    assert run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "3", "--out", str(tmp_path / "run")]) == 2
    assert "has a vocabulary of 384" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_loads_slowly_is_told_so(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.runtime.trainer.train_rank", train_slowly)
    monkeypatch.setenv("COLUMNS", "80")
    write_plan(tmp_path / "plan.json", plan_of(pp=2))
    assert run(["train", str(tmp_path / "plan.json"), "--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--compare"]) == 0
    *_, shown = capsys.readouterr().out.partition("checkpoint in")
    _, *lines = shown.splitlines()
    assert max(len(line) for line in lines if not line.endswith(".")) <= 80  # a sentence is one line for other programs
    assert "were predicted: loading micro-batches on rank 0 took 4." in " ".join(shown.split())
    assert "Memory is not measured on CPU" in shown


def test_the_verb_compares_predicted_and_measured(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", plan_of(pp=2))
    given = ["--data", data, "--steps", "3", "--out", str(tmp_path / "run"), "--compare", "--json", "--torch-profile", "1"]
    assert run(["train", str(tmp_path / "plan.json"), *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 3 and found["predicted_time_s"] > 0
    for stage in found["stages"]:
        assert min(stage[f"{kind}_{how}_s"] for kind in ("forward", "backward") for how in ("predicted", "measured")) > 0
        assert stage["memory_predicted_bytes"] > 0 and stage["memory_measured_bytes"] is None  # a processor does not tell
    for rank in found["ranks"]:
        assert min(rank["measured"][f"{part}_s"] for part in ("forward", "backward", "update", "loading", "pauses")) > 0
    assert "were predicted: " in found["cause"]["sentence"]
    traces = sorted((tmp_path / "run").glob("profile-*.json"))
    assert [path.name for path in traces] == ["profile-rank-00000-step-1.json", "profile-rank-00001-step-1.json"]
    labels = {event["name"].split(":")[0] for event in json.loads(traces[0].read_text())["traceEvents"] if "name" in event}
    assert {"compute", "pipeline", "data parallel", "update"} <= labels
