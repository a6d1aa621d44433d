"""`penstock train --model M --data texts --out RUN`, and what comes after it: repeat, change, go on, be killed, go on."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pty_runs import cut_lines, on_terminal, screen_lines
from warm_launchers import launched

from penstock.cli.main import run
from penstock.cli.train_job import findings
from penstock.jobs.job_file import job_from, read_job
from penstock.jobs.starting import ready
from penstock.plans.build import uniform_plan
from penstock.plans.schema import read_plan, write_plan
from penstock.runtime.checkpoints.folder import latest_checkpoint, step_of
from penstock.runtime.telemetry.steps import read_steps

NET = Path(__file__).parents[1] / "strangers_net.py"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, drawn = tmp_path_factory.mktemp("raw") / "chats.jsonl", random.Random(0)
    lines = [{"text": " ".join(str(drawn.randrange(20)) for _ in range(drawn.choice((5, 9, 20, 40))))} for _ in range(64)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def command(texts: Path, out: Path, *options: str) -> list[str]:
    usual = [] if "--model" in options else ["--model", "gpt-tiny"]
    return ["train", *usual, "--data", str(texts), "--out", str(out), "--tokens-per-batch", "400", *options]


def trained(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*arguments, "--json"]) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert run(arguments) == 2
    return " ".join(capsys.readouterr().err.split())


def test_one_command_and_what_comes_after_it(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    status, said = on_terminal(command(texts, out, "--steps", "2"), 80)
    assert status == 0 and cut_lines(said, 80) == []
    told = "\n".join(screen_lines(said))
    for word in ("model    gpt-tiny", "data     ", "devices  ", "costs    roofline", "plan     ", "step     ", "memory   ", "bound    ",
                 "fixed padded micro-batches", "trained 2 steps"):  # fmt: skip
        assert word in told
    job = job_from(read_job(out / "job.yaml"), {}, "the job")
    assert (job.train.steps, job.plan.global_batch, job.data.path) == (2, read_plan(out / "plan.json").global_batch, [str(texts)])
    assert read_plan(out / "plan.json").micro_batching.policy == "dynamic"

    # The same command has nothing left to do; with more steps it goes on, says what has changed, and keeps its plan.
    status, said = on_terminal(["train", str(out / "job.yaml")], 80)
    assert status == 0 and cut_lines(said, 80) == [] and "has all of its 2 steps behind it" in " ".join(screen_lines(said))
    found = trained(capsys, *command(texts, out, "--steps", "3", "--set", "train.lr=1e-5"))
    assert (found["first_step"], len(found["losses"])) == (2, 1)
    assert found["changed"] == ["train.steps: 2 → 3", "train.lr: 0.0003 → 1e-05"]
    assert [step.step for step in read_steps(out / "steps.jsonl")] == [0, 1, 2]

    # The file repeats it elsewhere, as it was; another cluster goes on under another plan.
    again = trained(capsys, "train", str(out / "job.yaml"), "--out", str(tmp_path / "again"), "--set", "train.lr=3e-4", "--steps", "2")
    first = [step.loss for step in read_steps(out / "steps.jsonl")][:2]
    assert again["losses"] == pytest.approx(first, abs=1e-6)
    moved = trained(capsys, *command(texts, out, "--steps", "4", "--set", "train.lr=1e-5", "--cluster", "2xcpu"))
    assert moved["first_step"] == 3 and moved["changed"] == ["plan.cluster: local → 2xcpu", "train.steps: 3 → 4"]
    assert len(read_plan(out / "plan.json").ranks) == 2


def test_what_a_model_notes_is_told_before_it_is_trained(texts: Path, tmp_path: Path) -> None:
    fields = {"model.source": f"module:{NET}:make", "data.path": [str(texts)], "out": str(tmp_path / "run"), "train.steps": 1}
    found = ready(job_from({}, fields, "the job"))
    assert found.model.notes and {f"note     {note}" for note in found.model.notes} <= set(findings(found))


def test_a_job_goes_on_from_another_folder(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file has absolute paths; one that has them as they were typed reports no change."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    (here / "chats.jsonl").write_bytes(texts.read_bytes())
    (here / "two.yaml").write_text("nodes: [{device: cpu, gpus: 1}]\n", encoding="utf-8")
    (here / "mine.yaml").write_text("base: gpt-tiny\n", encoding="utf-8")
    monkeypatch.chdir(here)
    words = ("train", "--model", "mine.yaml", "--data", "chats.jsonl", "--out", "run", "--cluster", "two.yaml", "--tokens-per-batch", "400")
    trained(capsys, *words, "--steps", "2")
    job = here / "run" / "job.yaml"
    monkeypatch.chdir(there)
    found = trained(capsys, "train", str(job), "--steps", "3")
    assert found["first_step"] == 2 and found["changed"] == ["train.steps: 2 → 3"] and list(there.iterdir()) == []
    monkeypatch.chdir(here)
    job.write_text(job.read_text(encoding="utf-8").replace(f"{here}/", ""), encoding="utf-8")
    found = trained(capsys, *words, "--steps", "4")
    assert found["first_step"] == 3 and found["changed"] == ["train.steps: 3 → 4"]



@pytest.mark.parametrize("model", ["gpt-tiny", f"module:{NET}:make"], ids=["before anything is saved", "a net, after a checkpoint"])
def test_a_killed_run_goes_on_by_the_same_command(model: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From its beginning, or from its checkpoint, here under another plan: the next step has the loss that it had before."""
    out, is_net = tmp_path / "run", model != "gpt-tiny"
    given = command(texts, out, "--model", model, "--checkpoint-every", "3" if is_net else "400")
    losses: dict[int, float | None] = {}
    with launched([*given, "--cluster", "1xcpu", "--steps", "400"], tmp_path) as launcher:
        while launcher.status is None:
            os.killpg(launcher.pid, signal.SIGSTOP)  # what is looked at stays as it is until it is killed
            saved = latest_checkpoint(out / "checkpoints")
            losses = {step.step: step.loss for step in read_steps(out / "steps.jsonl")} if (out / "steps.jsonl").is_file() else {}
            if (saved is not None or not is_net) and (0 if saved is None else step_of(saved)) in losses:
                break
            os.killpg(launcher.pid, signal.SIGCONT)
            time.sleep(0.1)
        assert launcher.status is None, launcher.ended()
    begin = 0 if saved is None else step_of(saved)
    assert (begin > 0) is is_net and len(read_plan(out / "plan.json").ranks) == 1
    found = trained(capsys, *given, "--steps", str(begin + 1), "--cluster", "2xcpu" if is_net else "1xcpu")
    assert (found["first_step"], found["losses"]) == (begin, pytest.approx([losses[begin]], rel=1e-5))
    assert len(read_plan(out / "plan.json").ranks) == (2 if is_net else 1)


def test_plans_and_jobs_take_other_options(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_plan(tmp_path / "plan.json", uniform_plan("gpt-tiny", "1xcpu", global_batch=8, micro_batch=8))
    plan = ("train", str(tmp_path / "plan.json"))
    assert "--set goes with a job, not with a plan file" in refused(capsys, *plan, "--set", "train.lr=1")
    assert "--data is missing" in refused(capsys, *plan, "--steps", "1", "--out", str(tmp_path / "run"))
    assert "--model is missing" in refused(capsys, "train", "--data", str(texts), "--out", str(tmp_path / "run"))
    assert "--resume goes with a plan file" in refused(capsys, *command(texts, tmp_path / "run", "--resume", "x"))
    assert "--adapt is 'sideways'" in refused(capsys, *command(texts, tmp_path / "run", "--adapt", "sideways"))
    assert not (tmp_path / "run").exists()


def test_what_is_refused_before_anything_starts(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    (tmp_path / "empty.jsonl").touch()
    write_plan(tmp_path / "other.json", uniform_plan("gpt-small", "1xcpu", global_batch=8, micro_batch=8))
    assert "is empty" in refused(capsys, *command(tmp_path / "empty.jsonl", out))
    assert "no field 'train.lrr'. Did you mean 'train.lr'" in refused(capsys, *command(texts, out, "--set", "train.lrr=1"))
    found = refused(capsys, *command(texts, out, "--set", f"plan.file={tmp_path / 'other.json'}"))
    assert "the plan is of another model: 'gpt-small', not 'gpt-tiny' (layers" in found
    assert "the data has" in refused(capsys, *command(texts, out, "--set", "plan.tokens_per_batch=1000000"))
    assert "there is neither a folder 'no/such-model' nor" in refused(capsys, *command(texts, out, "--model", "hf:no/such-model"))
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    write_plan(tmp_path / "two.json", uniform_plan("gpt-tiny", "2xcpu", global_batch=8, micro_batch=4, pp=2))
    found = refused(capsys, *command(texts, out, "--set", f"plan.file={tmp_path / 'two.json'}"))
    assert "the plan has 2 ranks, but 3 processes were started" in found
    assert not out.exists()


def test_a_run_of_a_plan_is_not_trained_into(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    (out / "steps.jsonl").write_text("{}\n", encoding="utf-8")
    assert "holds a run already" in refused(capsys, *command(texts, out))
