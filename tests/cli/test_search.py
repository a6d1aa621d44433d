"""`penstock search`: its table, its file, its JSON, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command_lines import with_last_values
from searched_once import searched_once

from penstock.batching.ways import BatchWays
from penstock.cli.batch_options import ways_of
from penstock.cli.console import format_share, format_time
from penstock.cli.main import run
from penstock.costs.roofline import Roofline
from penstock.errors import InputError
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import read_plan
from penstock.search import Request, short_name
from penstock.timing.estimate import estimate

REQUEST = ("search", "--model", "gpt-350m", "--cluster", "4xa100-40gb", "--global-batch", "32", "--micro-batches", "1,2,4")

RELU = "a GPT with another activation"


def test_the_printed_time_is_that_of_the_written_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "plan.json"
    assert run([*REQUEST, "--out", str(path), "--top", "3", "--strict"]) == 0
    shown = capsys.readouterr().out
    plan = read_plan(path)
    found = estimate(plan, model_of(plan), cluster_of(plan), Roofline())
    assert plan.predicted is not None and plan.predicted.time_s == found.time_s
    answer, first = shown.splitlines()[0], plan.stages[0]
    assert answer.startswith(f"{short_name(plan)}, micro-batch {plan.micro_batching.samples}: {format_time(found.time_s)} a step ±6 %, ")
    assert f"; 2,048 tokens, bf16 (gradients in fp32); at most {format_share(found.time_s / plan.predicted.lower_bound_s - 1)}" in answer  # type: ignore[operator]
    row = next(line.split("  ") for line in shown.splitlines() if line.startswith(f"{short_name(plan)}  "))  # the first is the best
    cells = [cell.strip() for cell in row if cell]
    assert cells[:3] == [short_name(plan), str(plan.micro_batching.samples), format_time(found.time_s)]
    assert cells[6:11] == [str(number) for number in (plan.num_replicas, first.degrees.dp, plan.num_groups, first.degrees.tp, first.zero)]
    assert f"penstock train {path} --data DIR --steps 100 --out run" in shown and f"penstock explain {path}" in shown
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["plan.2.json", "plan.3.json", "plan.json", "plan.search.json"]


def test_the_record_of_a_search_says_what_was_asked_and_why_plans_lost(tmp_path: Path) -> None:
    assert run([*REQUEST, "--out", str(tmp_path / "plan.json"), "--top", "3", "--baselines"]) == 0
    record = json.loads((tmp_path / "plan.search.json").read_text(encoding="utf-8"))
    best, *others = record["candidates"]
    assert record["format"] == "penstock-search" and record["request"]["global_batch"] == int(REQUEST[REQUEST.index("--global-batch") + 1])
    assert best["file"] == "plan.json" and best["slower"] == 0 and best["because"] == []
    for row in others:
        plan = read_plan(tmp_path / row["file"])
        assert plan.predicted is not None and row["time_s"] == plan.predicted.time_s
        longer_s = sum(part["longer_s"] for part in row["because"])
        assert longer_s == pytest.approx(row["time_s"] - best["time_s"], abs=1e-9 * row["time_s"])
    assert len(record["baselines"]) > 2 and record["families"] and record["bound_s"] <= record["formula_s"]
    points = record["progress"]
    bests = [point["best_s"] for point in points if point["best_s"] is not None]
    assert points and bests == sorted(bests, reverse=True) and [p["after_s"] for p in points] == sorted(p["after_s"] for p in points)


@pytest.fixture
def searches() -> Iterator[None]:
    """What is asked in other words is searched once."""
    with searched_once():
        yield


@pytest.mark.usefixtures("searches")
def test_a_simpler_plan_within_the_error_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Roofline, "error", 0.5)  # so that data parallelism is as good as a pipeline here, whatever the costs say
    asked = ["search", "--model", "gpt2-xl", "--cluster", "8xt4", "--global-batch", "64", "--micro-batches", "1,2", "--top", "2"]
    path = tmp_path / "plan.json"
    assert run([*asked, "--out", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    plan, other = read_plan(path), read_plan(tmp_path / "plan.2.json")
    assert (plan.num_groups, plan.num_replicas) == (1, 8) and other.num_groups > 1  # the fastest is still there
    slower = plan.predicted.time_s / other.predicted.time_s - 1  # type: ignore[union-attr]
    assert f"DP 8 + ZeRO-1, recomputing is {format_share(slower)} slower than the best found" in shown
    assert "within the error of ±50 % (roofline)" in shown
    assert "at most" in shown and slower > 0.01
    assert run([*asked, "--strict", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["strict"] and told["fastest_s"] == told["plans"][0]["time_s"] == other.predicted.time_s  # type: ignore[union-attr]
    assert [row["time_s"] for row in told["plans"]] == sorted(row["time_s"] for row in told["plans"])
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not told["strict"] and told["error"] == 0.5 and told["plans"][0]["time_s"] == plan.predicted.time_s > told["fastest_s"]  # type: ignore[union-attr]


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run([*REQUEST, "--json", "--top", "2", "--strict", "--out", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["plans"]) == 2 and told["plans"][0]["time_s"] <= told["plans"][1]["time_s"] and told["out"] == str(path)
    assert read_plan(path).predicted.time_s == told["plans"][0]["time_s"]  # type: ignore[union-attr]


def test_every_option_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gigabytes are 10⁹ bytes."""
    asked: list[Any] = []

    def stopped(*values: Any, **named: Any) -> None:
        asked.append((values, named))
        raise InputError("enough")

    chosen = ["search", "--model", "gpt-tiny", "--cluster", "2xcpu", "--global-batch", "8", "--costs", "roofline", "--seq-length", "64"]
    chosen += ["--micro-batches", "1,2", "--schedules", "1f1b", "--precision", "fp32", "--gradients", "fp32", "--memory-limit", "3"]
    chosen += ["--top", "4", "--time-budget", "9", "--max-hops", "2"]
    monkeypatch.setattr("penstock.search.search", stopped)
    assert run(chosen) == 2
    (((request,), named),) = asked
    assert (named["top"], named["time_budget_s"], named["max_hops"]) == (4, 9.0, 2)
    assert (request.memory_limit_bytes, request.frame.gradients, request.frame.seq_length) == (3e9, "fp32", 64)
    monkeypatch.setattr(Request, "of", stopped)
    assert run(chosen) == 2
    assert asked[1][0] == ("gpt-tiny", "2xcpu", 8, "roofline", 64, [1, 2], 3e9, ["1f1b"], "fp32", "fp32")
    assert ways_of("", "", "", "", 3.0).memory_limit_bytes == 3e9 and ways_of("", "", "", "", None) == BatchWays()


def test_prices_and_shipped_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["search", "--model", "gpt-1.3b", "--cluster", "p5e.48xlarge", "--global-batch", "64", "--micro-batches", "2", "--json"]
    assert run([*arguments, "--costs", "profile:h200-141gb"]) == 0
    best = json.loads(capsys.readouterr().out)["plans"][0]
    assert best["price_usd"] == pytest.approx(best["price_usd_per_h"] * best["time_s"] / 3600)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batches", "1,x"], "--micro-batches is '1,x'"),
        (["--micro-batches", "0"], "--micro-batches is '0'; sizes start at 1"),
        (["--memory-limit", "-3"], "--memory-limit is -3.0"),
        (["--memory-limit", "nan"], "--memory-limit is nan"),
        (["--top", "0"], "--top is 0"),
        (["--global-batch", "0"], "--global-batch is 0"),
        (["--seq-length", "-1"], "--seq-length is -1"),
        (["--seq-length", "99999"], "seq_length is 99999, but model 'gpt-350m' has 2048 positions"),
        (["--costs", "profil:x"], "costs 'profil:x' is not known. Did you mean 'profile'"),
        (["--costs", "profile:none.json"], "profile 'none.json' does not exist"),
        (["--model", "gpt-351m"], "unknown model 'gpt-351m'"),
        (["--cluster", "4xa100"], "a100-40gb"),
    ],
)
def test_wrong_input_exits_2_and_writes_nothing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(with_last_values([*REQUEST, "--out", str(tmp_path / "plan.json"), *arguments])) == 2
    told = capsys.readouterr()
    assert message in told.err and told.out == "" and list(tmp_path.iterdir()) == []


def test_infeasible_exits_3_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*REQUEST[:-1], "1", "--memory-limit", "0.5", "--out", str(tmp_path / "plan.json"), "--json"]) == 3
    told = capsys.readouterr()
    assert told.out == "" and "--memory-limit allows 0.5 GB" in told.err and list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run([*REQUEST, "--out", str(tmp_path / "file" / "plan.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_help_says_what_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--help"]) == 0
    assert "between any two ops" in " ".join(capsys.readouterr().out.split())


def test_baselines_and_proof_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*REQUEST, "--json", "--top", "1", "--baselines", "--proof", "--strict", "--steps", "10"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["plans"][0]
    assert [row["name"] for row in told["baselines"]] == ["data parallel", "Megatron grid", "AMP", "FASOP", "Aceso"]
    found = {row["name"]: row["plan"] for row in told["baselines"]}
    assert all(found.values())  # there is room for everyone
    assert all(plan["time_s"] >= best["time_s"] * (1 - 1e-9) for plan in found.values())
    assert told["lower_bound_s"] <= told["formula_s"] and told["gap"] == pytest.approx(told["formula_s"] / told["lower_bound_s"] - 1)
    assert all(row["bound_s"] >= told["lower_bound_s"] for row in told["proof"])
    assert best["hours"] == pytest.approx(best["time_s"] * 10 / 3600)


@pytest.mark.parametrize("objective", ["speed", "time@time<=3", "cost@time<=x", "time@cost"])
def test_objectives_are_checked(objective: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*REQUEST, "--objective", objective]) == 2
    assert "--objective" in capsys.readouterr().err


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("length\n" + "\n".join(str(8 + number * 37 % 240) for number in range(200)) + "\n", encoding="utf-8")
    return path


def test_lengths_give_plans_of_dynamic_micro_batches(lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    asked = ["search", "--model", "gpt-small", "--cluster", "2xa100-40gb", "--global-batch", "64", "--lengths", str(lengths), "--top", "2"]
    assert run([*asked, "--out", str(path), "--tokens", "1e6"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "200 lengths up to 244, global batch 64" in shown and "iterations take" in shown and f"wrote {path}" in shown
    plan = read_plan(path)
    assert plan.micro_batching.policy == "dynamic" and plan.predicted is not None
    assert run([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plans"][0]["time_s"] == plan.predicted.time_s and told["num_samples"] == 200
    assert run(["batch", "--lengths", str(lengths), "--plan", str(path)]) == 0
    capsys.readouterr()
    assert run(["explain", str(path)]) == 0  # which knows full samples alone, and says what the search found
    predicted = read_plan(path).predicted
    assert predicted is not None and f"{predicted.time_s:.3g} s were predicted for the lengths" in " ".join(capsys.readouterr().out.split())


def test_a_simple_plan_for_lengths_says_why_even_alone(
    lengths: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("penstock.search.lengths.simplest", lambda plans, times_s, error: len(plans) - 1)  # let the slowest be simple
    asked = ["search", "--model", "gpt-small", "--cluster", "2xcpu", "--global-batch", "16", "--lengths", str(lengths), "--top", "1"]
    assert run([*asked, "--out", str(tmp_path / "plan.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "slower than the best found" in shown and "within the error of ±6 % (roofline)" in shown
    assert [path.name for path in tmp_path.glob("plan*")] == ["plan.json"]  # the fastest is named, not offered
    assert run([*asked, "--strict"]) == 0
    assert "within the error" not in capsys.readouterr().out


def test_rates_that_are_guesses_are_told_wherever_times_are(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of a plan file for this machine, which knows its cluster by content and not by name."""
    path = tmp_path / "plan.json"
    asked = ["search", "--model", "gpt-tiny", "--cluster", "local", "--global-batch", "4", "--top", "1", "--out", str(path)]
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": ""}):
        for more in (["--micro-batches", "1"], ["--data", data]):
            assert run([*asked, *more]) == 0
            assert "rates of cpu are a guess" in " ".join(capsys.readouterr().out.split())
            assert run([*asked, *more, "--json"]) == 0
            assert any("rates of cpu are a guess" in note for note in json.loads(capsys.readouterr().out)["notes"])
            assert run(["explain", str(path)]) == 0
            assert "rates of cpu are a guess" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "more", [["--proof"], ["--seq-length", "128"], ["--micro-batches", "1,2"], ["--objective", "cost"], ["--max-hops", "3"]]
)
def test_lengths_go_with_no_option_for_one_length(lengths: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--model", "gpt-small", "--cluster", "2xa100-40gb", "--global-batch", "64", "--lengths", str(lengths)]
    assert run([*asked, *more]) == 2
    assert f"{more[0]} does not go with --lengths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--steps", "5", "--tokens", "1e9"], "--steps and --tokens say the same thing"),
        (["--export", "megatron:x.txt"], "--export is for megatron, which cannot express micro-batches that differ from batch to batch"),
        (["--export", "deepspeed:x.json"], "--export is for deepspeed"),
    ],
)
def test_lengths_refuse_before_the_search(
    lengths: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.search_lengths.search_lengths", lambda *given: pytest.fail("it searched"))
    asked = ["search", "--model", "gpt-small", "--cluster", "2xa100-40gb", "--global-batch", "64", "--lengths", str(lengths)]
    assert run([*asked, *more]) == 2
    assert message in capsys.readouterr().err


def test_plans_for_the_lengths_of_prepared_data(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    asked = ["search", "--model", "gpt-tiny", "--cluster", "2xcpu", "--global-batch", "16", "--data", data, "--top", "1"]
    assert run([*asked, "--out", str(path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "lengths up to 128, global batch 16" in shown and f"penstock train {path} --data" in shown
    assert read_plan(path).micro_batching.policy == "dynamic"
    assert run([*asked, "--seq-length", "40", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["tokens_per_micro_batch"] <= 16 * 40
    assert run([*asked, "--lengths", "lengths.csv"]) == 2
    assert "Give one of them" in capsys.readouterr().err


def test_devices_that_a_plan_leaves_idle_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--model", "gpt-tiny", "--global-batch", "2", "--cluster", "2xg5.xlarge", "--top", "1"]
    assert run(asked) == 0
    assert "note: 1 of 2 devices is idle: rank 1." in capsys.readouterr().out
    assert run([*asked, "--json"]) == 0
    assert "1 of 2 devices is idle: rank 1." in json.loads(capsys.readouterr().out)["notes"]


def test_precision_gradients_and_length_are_printed_and_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 8192}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    asked = ["search", "--model", f"hf:{tmp_path}", "--global-batch", "4", "--micro-batches", "1", "--top", "1", "--max-hops", "0"]
    assert run([*asked, "--cluster", "2xa100-40gb"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "; 4,096 tokens, bf16 (gradients in fp32); at most " in told
    assert "planned in bf16: the config names no dtype" in told and "the model takes 8,192" in told and "attn_pdrop 0.1" in told
    assert run([*asked, "--cluster", "2xa100-40gb", "--precision", "fp16", "--gradients", "fp16", "--seq-length", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["precision"], found["gradients"], found["seq_length"]) == ("fp16", "fp16", 64)
    assert run([*asked, "--cluster", "2xt4", "--precision", "bf16"]) == 2
    assert "t4 has no bf16" in capsys.readouterr().err


def test_gradients_are_narrower_where_nothing_else_fits(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--model", "gpt-1.3b", "--cluster", "1xa100-40gb", "--global-batch", "1", "--top", "1", "--max-hops", "0", "--json"]
    limit = ["--memory-limit", "23"]
    assert run([*asked, *limit]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gradients"] == "bf16" and any("no plan that sums them in fp32 fits" in note for note in found["notes"])
    assert run([*asked, *limit, "--gradients", "fp32"]) == 3
    assert run(asked) == 0 and json.loads(capsys.readouterr().out)["gradients"] == "fp32"


def test_a_plan_for_a_system_is_exported_and_says_what_it_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--model", "gpt-small", "--cluster", "2xt4", "--global-batch", "8", "--seq-length", "128", "--micro-batches", "1,2"]
    path = tmp_path / "flags.txt"
    assert run([*asked, "--for", "megatron", "--export", f"megatron:{path}", "--precision", "fp16"]) == 0
    assert "--tensor-model-parallel-size" in path.read_text()
    capsys.readouterr()
    assert run([*asked, "--for", "fasop", "--precision", "fp16"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fasop cannot express the fastest plan found" in told and "slower" in told
    assert run([*asked, "--for", "acseo"]) == 2
    assert "aceso" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [("--schedules pipedream --for aceso", "aceso (--for) updates once an iteration"),
     ("--schedules pipedream --export megatron:flags.txt", "megatron (--export) updates once an iteration"),
     ("--schedules zero-bubble --for dynpipe", "no plan of --schedules zero-bubble does. Search with --for dynpipe alone"),
     ("--export dynpipe:folder", "no plan of --schedules 1f1b,interleaved,zero-bubble does. Search with --for dynpipe")],
)  # fmt: skip
def test_schedules_that_a_system_does_not_run_are_refused_before_the_search(
    options: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.search.search", lambda *args, **options: pytest.fail("it was searched"))
    monkeypatch.chdir(tmp_path)
    assert run([*["search", "--model", "vgg16", "--cluster", "4xv100-16gb", "--global-batch", "64"], *options.split()]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("model", "system", "reason"),
    [("gpt-small", "aceso", "sizes of none of Aceso's gpt models"), ("vgg16", "megatron", "Megatron-LM has no model like 'vgg16'"),
     ("gpt-small", "torchtitan", "torchtitan has no model like 'gpt-small'"), (RELU, "megatron", "cannot express the activation 'relu'"),
     ("llama-8b --precision fp16", "torchtitan", "torchtitan cannot express precision fp16. It has bf16 and fp32. Search with --precision"),
     ("gpt-1.3b --precision bf16", "aceso", "Aceso cannot express precision bf16; it trains gpt in fp16. Search with --precision fp16"),
     ("vgg16 --precision bf16", "dynpipe", "DynPipe cannot express precision bf16: it trains in fp32. Search with --precision fp32")],
)  # fmt: skip
def test_a_model_or_a_precision_that_a_system_has_none_like_is_refused_before_the_search(
    model: str, system: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.search.search", lambda *args, **options: pytest.fail("it was searched"))
    if model == RELU:
        model = str(tmp_path / "relu.yaml")
        Path(model).write_text(json.dumps({"family": "gpt", "layers": 2, "hidden": 64, "heads": 2, "activation": "relu"}))
    assert run(["search", "--model", *model.split(), "--cluster", "2xa100-40gb", "--global-batch", "8", "--for", system]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
