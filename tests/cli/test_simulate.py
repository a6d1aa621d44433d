"""`penstock simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from full_disk import small_files

from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.schema import write_plan
from penstock.schedules.actions import parse_schedule

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
GOOD = EXAMPLES / "gpt-1.3b-pp4.json"


def test_a_table_and_a_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(GOOD)]) == 0
    shown = capsys.readouterr().out
    assert "schedule 1f1b" in shown and "in flight" in shown and "3 │" in shown and "F0" in shown and "B0" in shown
    assert "F─ forward, B═ backward" in shown and "simulated" in shown and "the first" in shown


def test_everything_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(GOOD), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_micro_batches"] == 128 and 0 < told["time_s"] <= told["predicted_s"] and told["violation"] is None
    assert [device["in_flight"] for device in told["devices"]] == [4, 3, 2, 1]
    assert sum(len(actions) for actions in parse_schedule("\n".join(told["actions"]))) == 2 * 4 * 128
    busiest = max(told["devices"], key=lambda device: device["busy_s"])
    assert busiest["device"] == 3 and busiest["bubble_share"] < 0.05


def test_files_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "zb.json"
    write_plan(plan, uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4, schedule="zero-bubble"))
    assert run(["simulate", str(plan), "--trace", str(tmp_path / "t.json"), "--figure", str(tmp_path / "f.svg")]) == 0
    shown = capsys.readouterr().out
    assert "t.json" in shown and "f.svg" in shown and "weight gradient" in shown
    events = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {f"device {d}: ranks {d}" for d in range(4)}
    assert b"<svg" in (tmp_path / "f.svg").read_bytes()


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the file that did not fit, nor the one that did."""
    asked = ["simulate", str(GOOD), "--trace", str(tmp_path / "new" / "t.json.gz"), "--figure", str(tmp_path / "f.svg")]
    assert run(asked) == 0
    trace, figure = ((tmp_path / name).stat().st_size for name in ("new/t.json.gz", "f.svg"))
    assert trace < figure
    shutil.rmtree(tmp_path / "new")
    (tmp_path / "f.svg").write_text("kept")
    capsys.readouterr()
    with small_files((trace + figure) // 2):
        assert run(asked) == 2
    shown = capsys.readouterr()
    assert "f.svg' cannot be written: File too large" in " ".join(shown.err.split()) and not shown.out
    assert [path.name for path in tmp_path.rglob("*")] == ["f.svg"] and (tmp_path / "f.svg").read_text() == "kept"


def test_interleaved_plans_and_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "large.json"
    write_plan(plan, uniform_plan("gpt-6.7b", "4xa100-40gb", global_batch=32, micro_batch=8, pp=4, chunks=2, schedule="interleaved"))
    assert run(["simulate", str(plan)]) == 0
    assert "this plan does not fit: device 0 holds" in capsys.readouterr().out
    assert run(["simulate", str(plan), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["violation"]["device"] == 0 and told["devices"][0]["stages"] == [0, 4]
    assert told["violation"]["memory_bytes"] > told["violation"]["limit_bytes"]


def test_a_batch_of_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, lengths = tmp_path / "plan.json", tmp_path / "lengths.csv"
    write_plan(plan, uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=24, micro_batch=4, pp=2, replicas=2))
    sizes = [37 * k % 900 + 20 for k in range(24)]
    lengths.write_text("sample_id,enc_len,dec_len\n" + "".join(f"{k},{size},0\n" for k, size in enumerate(sizes)), encoding="utf-8")
    assert run(["simulate", str(plan), "--lengths", str(lengths), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    # two programs, one answer: the planner of batches has a simulator of its own
    assert told["time_s"] == pytest.approx(told["predicted_s"]) and told["violation"] is None
    assert told["replica"] in (0, 1) and 3 <= told["num_micro_batches"] < 24 and [row["stages"] for row in told["devices"]] == [[0], [1]]
    assert run(["simulate", str(plan), "--lengths", str(lengths)]) == 0
    assert "micro-batches of lengths.csv" in capsys.readouterr().out
    assert run(["simulate", str(plan), "--lengths", str(tmp_path / "none.csv")]) == 2
    assert "none.csv' does not exist" in capsys.readouterr().err


def test_a_batch_that_was_planned_is_simulated_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, lengths, batch = tmp_path / "plan.json", tmp_path / "lengths.csv", tmp_path / "batch.json"
    write_plan(plan, uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=24, micro_batch=4, pp=2, replicas=2))
    lengths.write_text("length\n" + "".join(f"{37 * k % 900 + 20}\n" for k in range(24)), encoding="utf-8")
    assert run(["batch", "--lengths", str(lengths), "--plan", str(plan), "--budget-steps", "2000", "--out", str(batch), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert run(["simulate", str(plan), "--batch", str(batch), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["predicted_s"] == planned["predicted_s"] == pytest.approx(told["time_s"])
    replica = planned["batch"]["replicas"][told["replica"]]
    assert told["actions"] == replica["schedule"] and told["num_micro_batches"] == len(replica["micro_batches"])
    assert run(["simulate", str(GOOD), "--batch", str(batch)]) == 2
    assert "is for 2 replicas of 2 stages, the plan has 1 of 4" in capsys.readouterr().err
    assert run(["simulate", str(plan), "--batch", str(batch), "--lengths", str(lengths)]) == 2
    assert "Give one of them" in capsys.readouterr().err


def test_wrong_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "no-such-plan.json"]) == 2
    assert run(["simulate", str(GOOD), "--figure", str(tmp_path / "f.gif")]) == 2
    told = capsys.readouterr().err
    assert "no-such-plan.json' does not exist" in told and "must end in one of .svg" in told
    assert not (tmp_path / "f.gif").exists()


@pytest.mark.parametrize("name", ["gpipe", "zero-bubble", "adaptive", "greedy", "search"])
def test_the_same_stages_in_another_order(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4))
    assert run(["simulate", str(plan), "--schedule", name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    own, other = told["orders"]
    assert (own["order"], other["order"], told["order"]) == ("1f1b", name, name) and other["time_s"] == told["time_s"]
    assert own["fits"] and own["time_s"] > 0 and 0 < own["bubble_share"] < 1
    assert other["peak_bytes"] == max(device["peak_bytes"] for device in told["devices"])
    if name == "zero-bubble":
        assert other["bubble_share"] < own["bubble_share"] and any("W" in actions for actions in told["actions"])
    assert run(["simulate", str(plan), "--schedule", name]) == 0
    shown = capsys.readouterr().out
    assert "the plan's own order, and the one asked for" in shown and name in shown


def test_a_batch_in_another_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, lengths = tmp_path / "plan.json", tmp_path / "lengths.csv"
    write_plan(plan, uniform_plan("gpt-1.3b", "4xa100-80gb", global_batch=24, micro_batch=4, pp=4))
    lengths.write_text("length\n" + "".join(f"{37 * k % 900 + 20}\n" for k in range(24)), encoding="utf-8")
    assert run(["simulate", str(plan), "--lengths", str(lengths), "--schedule", "greedy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["order"] for row in told["orders"]] == ["planned", "greedy"] and told["violation"] is None
    assert run(["simulate", str(plan), "--lengths", str(lengths), "--schedule", "zero-bubble"]) == 2
    assert "run in whole passes. Use 1f1b, gpipe" in capsys.readouterr().err


def test_orders_that_do_not_suit_the_plan_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(GOOD), "--schedule", "interleaved"]) == 2
    assert "the plan under the schedule 'interleaved' has 1 problem" in capsys.readouterr().err
    assert run(["simulate", str(GOOD), "--schedule", "greedi"]) == 2
    assert "Did you mean 'greedy'" in capsys.readouterr().err
    plan = tmp_path / "stashed.json"
    write_plan(plan, uniform_plan("llama-tiny", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4, schedule="pipedream"))
    assert run(["simulate", str(plan), "--schedule", "greedy"]) == 2
    assert "the order says when weights are updated" in capsys.readouterr().err


def test_asynchronous_batches_have_no_break_between_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is told is the time of one, which is hardly more than the busiest device computes."""
    plan = tmp_path / "plan.json"
    write_plan(plan, uniform_plan("llama-tiny", "4xa100-80gb", global_batch=16, micro_batch=2, pp=4, schedule="pipedream"))
    assert run(["simulate", str(plan), "--schedule", "1f1b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["order"] for row in found["orders"]] == ["pipedream", "1f1b"] and found["num_batches"] == 1
    assert found["orders"][0]["bubble_share"] < 0.15 * found["orders"][1]["bubble_share"]
    assert run(["simulate", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_batches"], found["num_micro_batches"]) == (10, 80)
    assert found["time_s"] == pytest.approx(max(row["busy_s"] + row["bubble_s"] for row in found["devices"]), rel=1e-3)
    assert run(["simulate", str(plan)]) == 0
    assert "80 micro-batches of 10 global batches without a break: " in " ".join(capsys.readouterr().out.split())
    assert run(["explain", str(plan), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["time_s"] == pytest.approx(found["time_s"], rel=1e-9)


def test_a_batch_by_dynapipes_tables(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned, simulated and scored by the same configuration, without a plan file; other configurations are refused."""
    lengths, planned, costs = tmp_path / "lengths.csv", tmp_path / "batch.json", f"dynapipe:{small_tables / 'dynapipe'}/gptA"
    lengths.write_text("sample_id,enc_len,dec_len\n" + "".join(f"{i},{20 + 37 * i % 400},0\n" for i in range(20)))
    asked = ["--lengths", str(lengths), "--costs", costs, "--json"]
    assert run(["batch", *asked, "--budget-steps", "50", "--out", str(planned)]) == 0
    batch = json.loads(capsys.readouterr().out)
    assert run(["simulate", "--batch", str(planned), "--costs", costs, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["time_s"] == pytest.approx(batch["predicted_s"], rel=1e-9) and len(simulated["devices"]) == 4
    assert run(["explain", str(planned), "--costs", costs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["time_s"] == pytest.approx(batch["predicted_s"], rel=1e-9)
    assert max(stage["memory_mb"] for stage in told["stages"]) == pytest.approx(batch["peak_bytes"] / 1e6)
    assert run(["simulate", *asked, "--schedule", "gpipe"]) == 0
    own, gpipe = json.loads(capsys.readouterr().out)["orders"]
    assert gpipe["order"] == "gpipe" and gpipe["peak_bytes"] >= own["peak_bytes"] > 0
    for more, message in (
        (["--batch", str(planned), "--costs", costs.replace("gptA", "t5C")], "the configuration has 1 of 4"),
        (["--costs", costs], "Give --lengths or --batch"), (["--lengths", str(lengths)], "a plan file is missing"),
        ([*asked, "--schedule", "zero-bubble"], "run in whole passes"),
        ([*asked, "--schedule", "interleaved"], "pipelines with several on each device group, this one has one stage"),
    ):  # fmt: skip
        assert run(["simulate", *more]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
