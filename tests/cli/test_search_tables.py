"""`penstock search` over Aceso's and FASOP's own tables: plans, bounds, files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import with_last_values

from penstock.cli.main import run
from penstock.plans.schema import read_plan
from penstock.systems.aceso.files import read_aceso_plan

LAYER = ["enc-1st-layernorm", "enc-attention-qkv", "enc-attention-score", "enc-attention-softmax", "enc-attention-dropout",
         "enc-attention-context", "enc-attention-dense", "enc-post-attention-dropout", "enc-2nd-layernorm", "enc-MLP-GEMM-1",
         "enc-MLP-gelu", "enc-MLP-GEMM-2", "enc-post-MLP-dropout"]  # fmt: skip
HEADER = "op_name,forward-compute,backward-compute,input_size,output_size,weights,activations,fwd_reserved,bwd_reserved"


def op_table(mbs: int, tp: int, algo: int) -> str:
    """Every op takes as long, but for the second split, which is faster for half of them."""
    names = ["encoder-embedding", *LAYER, "final-layernorm", "gpt-post-process"]
    times = [100 * mbs / tp * (0.9 if algo and index % 2 else 1) for index in range(len(names))]
    rows = [f"{name},{time},{2 * time},{4 * mbs},{4 * mbs},{8 / tp},{4 * mbs / tp},1,1" for name, time in zip(names, times, strict=True)]
    return "\n".join([HEADER, *rows]) + "\n"


@pytest.fixture
def aceso(tmp_path: Path) -> Path:
    """Tables of a GPT of Aceso's, and of one of a size that it has not."""
    folder = tmp_path / "aceso"
    folder.mkdir()
    for model in ("gpt_350M", "gpt_mine"):
        for mbs in (1, 2):
            for tp in (1, 2):
                for algo in (0, 1):
                    (folder / f"{model}_mbs{mbs}_tp{tp}_algo{algo}.csv").write_text(op_table(mbs, tp, algo))
    (folder / "p2p_intra_node.csv").write_text("1,2,4,8\n10, 20, 40, 40\n")
    return folder


ASKED = ["--model", "gpt_350M", "--cluster", "1x2", "--global-batch", "16", "--memory-limit", "20"]


def asked_of(aceso: Path, *more: str) -> list[str]:
    """The same with other options, or other values of them."""
    return with_last_values(["search", "--costs", f"aceso:{aceso}", *ASKED, *more])


def test_a_search_of_acesos_tables_writes_acesos_file(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(asked_of(aceso, "--out", str(path), "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    found = read_aceso_plan(path)
    assert found.model_size == "350M" and found.hidden_size == 1024 and sum(found.num_gpus) == told["num_gpus"] == 2
    assert [stage["ops"] for stage in told["stages"]] == list(found.num_ops_in_each_stage) and told["memory_limit_mb"] == 20_000
    assert found.micro_batch_size == told["micro_batch"] and 0 < told["lower_bound_s"] <= told["time_s"]
    assert told["gap"] == pytest.approx(told["time_s"] / told["lower_bound_s"] - 1)
    assert found.resharding_stages == tuple(
        len(set(zip(*lists, strict=True))) > 1
        for lists in zip(found.model_parallel_size_of_each_op, found.data_parallel_size_of_each_op, found.algo_of_each_op, strict=True)
    )


def test_it_shows_stages_and_the_bound(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked_of(aceso, "--steps", "1000", "--out", str(tmp_path / "plan.json"))) == 0
    shown = capsys.readouterr().out
    assert "best plan of gpt_350M on 1 × 2 GPUs, global batch 16" in " ".join(shown.split()) and "recomputed" in shown
    assert "no such plan takes less than" in shown and "20,000 MB (of 2²⁰ bytes, as Aceso counts)" in shown
    assert "1,000 iterations take" in shown and f"wrote {tmp_path / 'plan.json'}" in shown


def test_other_depths_and_sizes(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(asked_of(aceso, "--model", "gpt_mine_3layers", "--out", str(path), "--json")) == 0
    plan = json.loads(path.read_text())
    assert plan["num_layers"] == 3 and sum(plan["num_ops_in_each_stage"]) == 3 * 13 + 3 and "hidden_size" not in plan
    assert run(asked_of(aceso, "--model", "gpt_350M_2layers", "--out", str(path), "--json")) == 0
    assert read_aceso_plan(path).num_layers == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "gpt_350"], "has no such model. Did you mean 'gpt_350M' or 'gpt_mine'? It has gpt_350M, gpt_mine."),
        (["--model", "gpt-350m"], "It has gpt_350M, gpt_mine."),
        (["--model", "gpt_mine"], "has no fixed number of layers"),
        (["--model", "gpt_350M_0layers"], "has no such model"),
        (["--cluster", "4xv100-32gb"], "nodes x GPUs, such as 2x8, were expected"),
        (["--cluster", "0x4"], "nodes x GPUs"),
        (["--cluster", "17x8"], "136 GPUs; Aceso's plans have up to 16 stages of 8"),
        (["--micro-batches", "3"], "none of the micro-batch sizes 3"),
        (["--micro-batches", "0"], "sizes start at 1"),
        (["--memory-limit", "-1"], "--memory-limit is -1"),
        (["--global-batch", "0"], "--global-batch is 0"),
        (["--objective", "cost"], "--objective does not go with --costs aceso:"),
        (["--schedules", "gpipe"], "--schedules does not go with"),
        (["--export", "aceso:x.json"], "--export does not go with"),
        (["--proof"], "--proof does not go with"),
        (["--lengths", "l.csv"], "--lengths does not go with"),
    ],
)
def test_what_is_refused(aceso: Path, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(asked_of(aceso, "--out", str(path), *more)) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == "" and not path.exists()


@pytest.mark.parametrize("left_out", ["--memory-limit", "--global-batch", "--cluster"])
def test_what_the_tables_do_not_say_is_asked_for(aceso: Path, left_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = ASKED.index(left_out)
    assert run(["search", "--costs", f"aceso:{aceso}", *ASKED[:at], *ASKED[at + 2 :]]) == 2
    assert left_out in capsys.readouterr().err


def test_folders_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for costs, message in (("aceso:", "expected aceso:DIR"), ("fasop:", "expected fasop:DIR"), (f"aceso:{tmp_path}", "holds no Aceso op"),
                           (f"fasop:{tmp_path}", "holds no FASOP tables"), (f"aceso:{tmp_path}/none", "does not exist")):  # fmt: skip
        assert run(["search", "--costs", costs, *ASKED]) == 2
        assert message in capsys.readouterr().err


def test_nothing_that_fits_is_status_3(aceso: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked_of(aceso, "--memory-limit", "0.001")) == 3
    assert "no plan of gpt_350M fits 2 GPUs of 1 MB each: that is proven" in " ".join(capsys.readouterr().err.split())


def test_own_models_still_need_a_cluster_and_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--model", "gpt-tiny", "--global-batch", "8"]) == 2
    assert "--cluster is missing" in capsys.readouterr().err
    assert run(["search", "--model", "gpt-tiny", "--cluster", "2xcpu"]) == 2
    assert "--global-batch is missing" in capsys.readouterr().err


@pytest.fixture
def fasop(tmp_path: Path) -> Path:
    """A model of four layers on two nodes of two GPUs."""
    folder = tmp_path / "fasop"
    folder.mkdir()
    layers = ["embedding_layer", "block", "block", "post_process"]
    model = {"hidden_size": 64, "sequence_length": 32, "vocab_size": 500, "num_attention_heads": 4, "global_batch_size": 4,
             "layer_types": layers}  # fmt: skip
    node = {"instance": "x", "gpu": "X", "gpus_per_node": 2, "intra_bits_per_s": 2e10, "inter_bits_per_s": 5e9, "usable_mem_gib": 1.0,
            "usd_per_hour": 3.6}  # fmt: skip
    rows = [f"tiny,X,{tp},{mbs},{layer},block,{0.01 * mbs / tp}" for tp in (1, 2) for mbs in (1, 2) for layer in range(4)]
    files: dict[str, Any] = {
        "models.json": {"tiny": model}, "node_types.json": {"default": {"A": node}},
        "settings.json": {"pair": {"model": "tiny", "node_table": "default", "nodes": "AA", "total_steps": 10}},
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "layer_fwdbwd_cost.csv").write_text("\n".join(["model,gpu,tp,mbs,layer_index,layer_type,fwdbwd_seconds", *rows]))
    return folder


def test_a_search_of_fasops_tables(fasop: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, asked = tmp_path / "plan.json", ["search", "--costs", f"fasop:{fasop}", "--model", "pair"]
    assert run([*asked, "--out", str(path), "--json", "--cluster", "AA", "--global-batch", "4"]) == 0
    told, plan = json.loads(capsys.readouterr().out), json.loads(path.read_text())
    assert plan["setting"] == "pair" and [stage["layers"] for stage in told["stages"]] == [stage["layers"] for stage in plan["stages"]]
    assert sum(stage["layers"] for stage in plan["stages"]) == 4 and 0 < told["lower_bound_s"] <= told["time_s"]
    assert told["usd_per_step"] <= told["time_s"] * 2 * 3.6 / 3600 * (1 + 1e-9)
    assert run([*asked, "--steps", "3600"]) == 0
    shown = capsys.readouterr().out
    assert "best plan of tiny on nodes AA, global batch 4" in " ".join(shown.split()) and "of A 0" in shown
    assert f"3,600 iterations take {told['time_s']:,.2f} hours and $" in shown


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--model", "pairs"], "has no such setting. Did you mean 'pair'? It has pair."),
        (["--cluster", "AAA"], "--cluster is AAA, but setting 'pair' of"),
        (["--global-batch", "8"], "--global-batch is 8, but setting 'pair' of"),
        (["--micro-batches", "1"], "--micro-batches does not go with"),
        (["--top", "3"], "--top does not go with"),
        (["--time-budget", "3"], "ends by itself. Drop it"),
        (["--memory-limit", "28"], "--memory-limit does not go with"),
        (["--proof"], "--proof does not go with"),
    ],
)
def test_what_fasops_settings_say_themselves(fasop: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(with_last_values(["search", "--costs", f"fasop:{fasop}", "--model", "pair", *more])) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == ""


def test_a_plan_found_over_fasops_tables_is_a_plan_here(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of GPUs of two kinds, some of which idle since nodes here have more of them; proven safe by what is checked before training."""
    theirs, ours = tmp_path / "theirs.json", tmp_path / "plan.json"
    assert run(["search", "--costs", f"fasop:{small_tables / 'fasop'}", "--model", "gpt2XL-het", "--out", str(theirs)]) == 0
    assert f"next: penstock import fasop:{theirs} --model" in capsys.readouterr().out.replace("\n", " ")
    found = json.loads(theirs.read_text())["stages"]
    asked = ["--model", "gpt2", "--cluster", "1xp4d.24xlarge+3xg5.24xlarge", "--global-batch", "64"]
    assert run(["import", f"fasop:{theirs}", *asked, "--out", str(ours)]) == 0
    plan = read_plan(ours)
    nodes = [[[0, 8, 12, 16, 20][node + 1] > rank >= [0, 8, 12, 16][node] for rank in stage.devices[0]].count(True)
             for stage, own in zip(plan.stages, found, strict=True) for _, node, _ in own["devices"]]  # fmt: skip
    assert nodes == [count for own in found for _, _, count in own["devices"]]
    assert [(stage.degrees.tp, stage.degrees.dp) for stage in plan.stages] == [(own["tp"], own["dp"]) for own in found]
    assert plan.micro_batching.samples == found[0]["mbs"] * found[0]["dp"] and run(["check", str(ours)]) == 0


def test_a_plan_found_over_tables_suits_our_own_chain(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With plenty of memory nothing is recomputed and nothing cut; splits that are only measured twice do not stand in the way."""
    folder, theirs, ours = small_tables / "aceso", tmp_path / "aceso.json", tmp_path / "plan.json"
    asked = ["--model", "gpt_350M", "--cluster", "1x2", "--global-batch", "64", "--memory-limit", "80", "--json"]
    assert run(["search", "--costs", f"aceso:{folder}", *asked, "--out", str(theirs)]) == 0
    told, found = json.loads(capsys.readouterr().out), read_aceso_plan(theirs)
    assert told["gap"] < 0.03 and found.num_ops_in_each_stage == (315,) and any(found.algo_of_each_op[0])
    assert run(["import", f"aceso:{theirs}", "--model", "gpt-350m", "--cluster", "2xv100-32gb", "--out", str(ours)]) == 0
    assert "gpt-350m: 1 stage (196 ops on 2)" in capsys.readouterr().out and read_plan(ours).stages[0].runs == ()


def test_cuts_that_can_be_imported(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fastest plan recomputes a part of attention, which is one op here: told, rounded by import, and left out where that is asked."""
    theirs, ours = tmp_path / "aceso.json", tmp_path / "plan.json"
    asked = ["search", "--costs", f"aceso:{small_tables / 'aceso'}", "--model", "gpt_350M", "--cluster", "1x2", "--global-batch", "64",
             "--memory-limit", "6", "--out", str(theirs)]  # fmt: skip
    imported = ["import", f"aceso:{theirs}", "--model", "gpt-350m", "--cluster", "2xv100-32gb", "--out", str(ours)]
    assert run(asked) == 0 and "--cuts both finds one without" in " ".join(capsys.readouterr().out.split())
    assert run(imported) == 0 and "a part of attention that is never kept here" in " ".join(capsys.readouterr().out.split())
    assert run([*asked, "--cuts", "both"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"next: penstock import aceso:{theirs} --model … --cluster … --out plan.json" in shown and "--cuts" not in shown
    assert run(imported) == 0 and "note:" not in capsys.readouterr().out and run(["check", str(ours)]) == 0
    again = [len(stage.recomputed()) for stage in read_plan(ours).stages]
    assert len(again) == 2 and again[0] > again[1]


@pytest.mark.parametrize(
    ("costs", "cuts", "message"),
    [
        ("aceso:{tables}/aceso", "layers", "--cuts is 'layers'; ops, both or blocks was expected"),
        ("aceso:{tables}/aceso", "blocks", "--cuts is blocks, but resnet_500M is cut between any two of its ops, which are ops here too"),
        ("fasop:{tables}/fasop", "both", "--cuts does not go with --costs fasop:"),
        ("roofline", "both", "--cuts is for --costs aceso:DIR; costs are 'roofline'"),
    ],
)
def test_cuts_that_mean_nothing(costs: str, cuts: str, message: str, small_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["search", "--costs", costs.format(tables=small_tables), "--model", "resnet_500M", "--cluster", "1x2", "--global-batch", "64"]
    assert run([*asked, "--memory-limit", "6", "--cuts", cuts]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_more_plans_and_less_time(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best plan of the other micro-batch size comes second, in a file of its own; with no time the first one at hand is told."""
    asked = asked_of(aceso, "--memory-limit", "11.8", "--json")
    assert run([*asked, "--top", "3", "--out", str(tmp_path / "plan.json")]) == 0
    told = json.loads(capsys.readouterr().out)
    first, second = (read_aceso_plan(tmp_path / name) for name in ("plan.json", "plan.2.json"))
    assert {first.micro_batch_size, second.micro_batch_size} == {1, 2} and not (tmp_path / "plan.3.json").exists()
    assert run(["explain", str(tmp_path / "plan.2.json"), "--costs", f"aceso:{aceso}", "--json"]) == 0
    (other,) = told["others"]
    assert json.loads(capsys.readouterr().out)["time_s"] == pytest.approx(other["time_s"], rel=1e-9) and other["time_s"] >= told["time_s"]
    assert run([*asked, "--top", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["others"] == []
    assert run([*asked, "--time-budget", "0.000001"]) == 0
    hurried = json.loads(capsys.readouterr().out)
    assert hurried["time_s"] >= told["time_s"] * (1 - 1e-9) and hurried["lower_bound_s"] <= told["lower_bound_s"] * (1 + 1e-9)


@pytest.mark.parametrize("setting", ["gpt2XL-het", "T5-homo"])
def test_simpler_spaces_by_fasops_tables(setting: str, small_tables: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["search", "--costs", f"fasop:{small_tables / 'fasop'}", "--model", setting, "--baselines", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    grid_s, amp_s, suited_s = (told["baselines"][name] for name in ("Megatron-LM's grid", "AMP's choice", "FASOP's space"))
    assert told["time_s"] <= amp_s * (1 + 1e-9) < 20 * told["time_s"]
    assert told["lower_bound_s"] <= told["time_s"] * (1 + 1e-9) <= suited_s * (1 + 2e-9) <= grid_s * (1 + 3e-9) < 20 * told["time_s"]


def test_a_plan_found_is_explained_by_the_same_tables(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(asked_of(aceso, "--memory-limit", "11.8", "--out", str(path), "--baselines", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert run(["explain", str(path), "--costs", f"aceso:{aceso}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["time_s"] == pytest.approx(found["time_s"], rel=1e-9) and max(s["memory_mb"] for s in told["stages"]) <= 11_800
    assert sum(stage["recompute_s"] for stage in told["stages"]) > 0
    assert found["time_s"] <= found["baselines"]["Megatron-LM's grid"] < 2 * found["time_s"]
    assert run(["explain", str(path), "--costs", f"aceso:{aceso}"]) == 0
    assert "by the tables' own rules" in " ".join(capsys.readouterr().out.split())


def test_what_an_aceso_plan_is_not_scored_by(aceso: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(asked_of(aceso, "--out", str(path))) == 0
    plan = json.loads(path.read_text())
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps(plan | {"micro_batch_size": 4}))
    for more, message in ((["--costs", "fasop:x"], "aceso:DIR"), (["--costs", f"aceso:{aceso}", "--what-if"], "--what-if does not go")):
        assert run(["explain", str(path), *more]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run(["explain", str(odd), "--costs", f"aceso:{aceso}"]) == 2
    assert "4 samples" in " ".join(capsys.readouterr().err.split())
