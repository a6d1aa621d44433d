"""`penstock import`: a user's own module becomes a model that can be planned for, files of other planners become plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_lines import with_last_values

from penstock.cli.main import run
from penstock.models import resolve_model
from penstock.plans.schema import read_plan
from penstock.systems.aceso.files import FAMILY_FIELDS
from penstock.systems.aceso.plans import SIZES

NET = """
import torch
from torch import nn
from sizes import WIDTH  # a neighbour of this file


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).float().sum()


def tensors():
    return Net(), (torch.zeros(4, 16, dtype=torch.long),)


def maker():
    return Net(), lambda samples, length: (torch.zeros(samples, length, dtype=torch.long),)


def number():
    return 3


def leaves():
    raise SystemExit(7)


def fails():
    raise ValueError("boom")


def mismatch():
    return Net(), (torch.zeros(4, 16),)


def numbers():
    return Net(), (1, 2)
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "sizes.py").write_text("WIDTH = 32\n", encoding="utf-8")
    path = tmp_path / "net.py"
    path.write_text(NET, encoding="utf-8")
    return path


@pytest.mark.parametrize("function", ["tensors", "maker"])
def test_a_module_becomes_a_model(function: str, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.json"
    assert run(["import", f"module:{net}:{function}", "--out", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    model = resolve_model(str(path))
    weights = 100 * 32 + 3 * (2 * 32 * 64 + 64 + 32) + 32 * 100 + 100
    assert model.num_parameters == told["num_parameters"] == weights and model.name == function
    assert run(["search", "--model", str(path), "--cluster", "2xcpu", "--global-batch", "8", "--json"]) == 0


def test_it_says_what_comes_next(net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", f"module:{net}:maker", "--out", str(tmp_path / "net.json"), "--name", "mine", "--dtype", "bf16"]) == 0
    shown = capsys.readouterr().out
    assert "mine: 5 ops" in shown and "bf16" in shown and "penstock search --model" in shown


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("modul:net.py:maker", [], "'modul' cannot be imported. Did you mean 'module'? Write module:PATH.py:FUNCTION"),
        ("onnx:net.onnx", [], "'onnx' cannot be imported. Known: aceso, dynpipe, fasop, module."),
        ("module:{net}:maker", ["--model", "vgg16"], "--model belongs to dynpipe:PATH or aceso:PATH or fasop:PATH"),
        ("module:net.py", [], "module:PATH.py:FUNCTION was expected"),
        ("module:net.py:", [], "module:PATH.py:FUNCTION was expected"),
        ("module:none.py:maker", [], "file 'none.py' does not exist"),
        ("module:{net}:makers", [], "has no function 'makers'. Did you mean 'maker'"),
        ("module:{net}:number", [], "returned a int; (torch module, example inputs) was expected"),
        ("module:{net}:fails", [], "failed: ValueError: boom"),
        ("module:{net}:leaves", [], "failed: SystemExit: 7"),
        ("module:{net}:mismatch", [], "stopped in or after 'embed'"),
        ("module:{net}:numbers", [], "module 'numbers' cannot be traced with its example"),
        ("module:{net}:maker", ["--dtype", "int4"], "dtype is 'int4'"),
        ("module:{net}:maker", ["--length", "0"], "--length is 0"),
    ],
)
def test_wrong_input_exits_2_and_writes_nothing(
    source: str, more: list[str], message: str, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", source.format(net=net), "--out", str(tmp_path / "out.json"), *more]) == 2
    told = capsys.readouterr()
    assert message in told.err and "Traceback" not in told.err and told.out == "" and not (tmp_path / "out.json").exists()


def test_a_name_that_is_not_json_is_refused(net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", f"module:{net}:maker", "--out", str(tmp_path / "net.yaml")]) == 2
    assert "ends in .json" in capsys.readouterr().err


def test_a_file_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def (:\n", encoding="utf-8")
    assert run(["import", f"module:{path}:maker", "--out", str(tmp_path / "out.json")]) == 2
    assert "cannot be imported: SyntaxError" in capsys.readouterr().err


TOPOLOGY = {"module_to_stage_map": [0, 1, 1], "stage_to_rank_map": {"0": [0, 1, 2], "1": [3]}, "stage_to_depth_map": {"0": 1, "1": 0}}
PARTITION = {"partition": [15, 23], "recompute_ratio": [0, 0.5], "batch_size_all": [72], "batch_size": [24, 72]}
FOR = ["--model", "vgg16", "--cluster", "4xv100-16gb", "--global-batch", "7200"]


@pytest.fixture
def dynpipe(tmp_path: Path) -> Path:
    """A folder with both of DynPipe's files."""
    folder = tmp_path / "dynpipe"
    folder.mkdir()
    (folder / "topology.json").write_text(json.dumps(TOPOLOGY), encoding="utf-8")
    (folder / "partition.json").write_text(json.dumps(PARTITION), encoding="utf-8")
    return folder


def test_files_of_dynpipe_become_a_plan_and_files_again(dynpipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(["import", f"dynpipe:{dynpipe}", "--out", str(path), *FOR]) == 0
    shown = capsys.readouterr().out
    assert "vgg16: 2 stages (15 ops on 3, 21 ops on 1), schedule pipedream" in shown and f"wrote {path}; next: penstock check" in shown
    assert "cannot be trained" not in shown
    assert run(["check", str(path)]) == 0
    assert "global batch 7200 = 1 × 100 micro-batches of 72" in capsys.readouterr().out
    assert run(["export", str(path), "--to", f"dynpipe:{tmp_path / 'again'}"]) == 0
    assert json.loads((tmp_path / "again" / "topology.json").read_text()) == TOPOLOGY
    assert json.loads((tmp_path / "again" / "partition.json").read_text()) == PARTITION


def test_files_of_dynpipe_under_other_names(dynpipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = [f"dynpipe:{dynpipe / 'topology.json'}", "--partition", str(dynpipe / "partition.json")]
    for number, source in enumerate((apart, [f"dynpipe:{dynpipe}"])):
        assert run(["import", *source, "--out", str(tmp_path / f"{number}.json"), *FOR, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["num_stages"] == 2 and told["num_devices"] == 4 and told["num_micro_batches"] == 100 and told["notes"] == []
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()


def test_a_topology_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = tmp_path / "dp_conf.json"
    topology.write_text(json.dumps({"module_to_stage_map": [0, 0, 0], "stage_to_rank_map": {"0": [0, 1, 2, 3]}}), encoding="utf-8")
    assert run(["import", f"dynpipe:{topology}", "--mini-batch", "72", "--out", str(tmp_path / "plan.json"), *FOR]) == 0
    assert run(["check", str(tmp_path / "plan.json")]) == 0


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("dynpipe:", FOR, "dynpipe:PATH was expected, as in dynpipe:hybrid_conf.json"),
        ("dynpip:{folder}", FOR, "'dynpip' cannot be imported. Did you mean 'dynpipe'?"),
        ("dynpipe:{folder}", FOR[:4], "--global-batch is missing"),
        ("dynpipe:{folder}", FOR[2:], "--model is missing"),
        ("dynpipe:{folder}", [*FOR[:2], *FOR[4:]], "--cluster is missing"),
        ("dynpipe:{folder}", [*FOR, "--dtype", "bf16"], "--dtype belongs to module:PATH.py:FUNCTION"),
        ("dynpipe:{folder}", [*FOR, "--model", "vgg15"], "Did you mean"),
        ("dynpipe:{folder}", [*FOR, "--model", "vgg19"], "38 blocks, but model 'vgg19' has 44 there"),
        ("dynpipe:{folder}", [*FOR, "--cluster", "2xv100-16gb"], "has rank 2, but the cluster"),
        ("dynpipe:{folder}", [*FOR, "--global-batch", "100"], "not a multiple of"),
        ("dynpipe:{folder}", [*FOR, "--mini-batch", "24"], "the mini-batch is given as 24"),
        ("dynpipe:{folder}/none", FOR, "none' does not exist"),
        ("dynpipe:{folder}/partition.json", FOR, "module_to_stage_map"),
        ("dynpipe:{folder}/topology.json", FOR, "has no batch size"),
        ("dynpipe:{folder}/topology.json", [*FOR, "--mini-batch", "72"], "it does not say where the 2 stages are cut"),
    ],
)
def test_wrong_files_of_dynpipe(
    source: str, more: list[str], message: str, dynpipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(with_last_values(["import", source.format(folder=dynpipe), "--out", str(tmp_path / "plan.json"), *more])) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == ""
    assert not (tmp_path / "plan.json").exists()


def aceso_plan(family: str, size: str, counts: tuple[int, ...], **changes: Any) -> dict[str, Any]:
    """A plan as Aceso writes it: two GPUs for each stage, tp 2, nothing recomputed."""
    layers, fields = SIZES[family][size]
    same = {"num_stages": len(counts), "num_gpus": [2] * len(counts), "checkpoint_activations": [False] * len(counts),
            "resharding_stages": [False] * len(counts), "num_ops_in_each_stage": list(counts)}  # fmt: skip
    columns = {"model_parallel_size_of_each_op": 2, "data_parallel_size_of_each_op": 1, "recompute_ops": 0, "algo_of_each_op": 0}
    return {
        "model_name": family, "model_size": size, "num_layers": layers, **dict(zip(FAMILY_FIELDS[family], fields, strict=True)),
        "global_batch_size": 64, "micro_batch_size": 4, **same,
        **{name: [[value] * count for count in counts] for name, value in columns.items()}, **changes,
    }  # fmt: skip


ACESO_FOR = ["--model", "gpt-350m", "--cluster", "4xv100-32gb"]


def test_a_plan_of_aceso_becomes_a_plan_and_the_same_file_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = tmp_path / "aceso.json", tmp_path / "plan.json"
    counts = (1 + 13 * 12, 13 * 12 + 2)
    again = [[0] + [1] * 13 * 12, [0] * counts[1]]
    theirs.write_text(json.dumps(aceso_plan("gpt", "350M", counts, recompute_ops=again, checkpoint_activations=[True, False]), indent=4))
    assert run(["import", f"aceso:{theirs}", "--out", str(ours), *ACESO_FOR]) == 0
    assert "gpt-350m: 2 stages (97 ops on 2, 99 ops on 2), schedule 1f1b" in capsys.readouterr().out
    assert read_plan(ours).precision == "fp16" and read_plan(ours).stages[0].recompute == (((1, 97),),)
    assert run(["check", str(ours)]) == 0
    assert "global batch 64 = 1 × 16 micro-batches of 4" in capsys.readouterr().out
    assert run(["export", str(ours), "--to", f"aceso:{tmp_path / 'again.json'}"]) == 0
    assert (tmp_path / "again.json").read_text() == theirs.read_text()
    theirs.write_text(json.dumps(aceso_plan("gpt", "350M", (counts[0] + 3, counts[1] - 3))))
    capsys.readouterr()
    assert run(["import", f"aceso:{theirs}", "--out", str(ours), *ACESO_FOR]) == 0
    assert "note: Aceso's plan begins a stage inside of what is one op here; it begins behind that: layers.12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("aceso:", ACESO_FOR, "aceso:PATH was expected, as in aceso:gpt_1_3B.json"),
        ("aceso:{folder}/none.json", ACESO_FOR, "none.json' does not exist"),
        ("aceso:{folder}/broken.json", ACESO_FOR, "num_gpus has 1 entry, num_stages is 2"),
        ("aceso:{folder}/plan.json", ACESO_FOR[2:], "--model is missing: Aceso's plan does not name it"),
        ("aceso:{folder}/plan.json", ACESO_FOR[:2], "--cluster is missing"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--global-batch", "64"], "--global-batch belongs to dynpipe:PATH or fasop:PATH"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--row", "0"], "--row belongs to fasop:PATH"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--model", "gpt-1.3b"], "is for gpt 350M of 24 layers; model 'gpt-1.3b' is gpt 1_3B"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--model", "t5-770m"], "is for gpt 350M of 24 layers; model 't5-770m' is t5 770M"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--model", "llama-tiny"], "Aceso has no model like 'llama-tiny'"),
        ("aceso:{folder}/plan.json", [*ACESO_FOR, "--cluster", "2xv100-32gb"], "has 2 devices"),
    ],
)
def test_wrong_plans_of_aceso(source: str, more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts = (1 + 13 * 12, 13 * 12 + 2)
    for name, plan in {
        "plan": aceso_plan("gpt", "350M", counts),
        "broken": aceso_plan("gpt", "350M", counts, num_gpus=[2]),
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(plan))
    assert run(with_last_values(["import", source.format(folder=tmp_path), "--out", str(tmp_path / "out.json"), *more])) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == ""
    assert not (tmp_path / "out.json").exists()


NODES = "['p4d.24xlarge', 'g5.24xlarge', 'g5.24xlarge']"
TURNED = "['g5.24xlarge', 'p4d.24xlarge', 'g5.24xlarge']"
ROWS = f"""\
mbs,tp,dp,pp,node placement,partition,estimated time (s/step),is_oom
1,1,2,8,"{NODES}","[1, 1, 1, 1, 1, 1, 0, 0]",0.5,True
2,2,2,4,"{TURNED}","[1, 2, 2, 1]",0.75,False
2,2,2,4,"{NODES}","[2, 1, 1, 2]",1.25,False
4,1,4,4,"{NODES}","[3, 1, 1, 1]",0.9,False
"""
FASOP_FOR = ["--model", "gpt-tiny", "--cluster", "1xp4d.24xlarge+2xg5.24xlarge", "--global-batch", "32"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS, encoding="utf-8")
    return path


def test_the_best_row_of_fasop_becomes_a_plan_and_a_row_again(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert run(["import", f"fasop:{rows}", "--out", str(path), *FASOP_FOR]) == 0
    shown = capsys.readouterr().out
    assert "gpt-tiny: 4 stages (17 ops on 4, 8 ops on 4, 8 ops on 4, 3 ops on 4), schedule 1f1b" in shown
    assert "note: this is row 4 of 4, 0.900 s a step by FASOP's estimate" in shown
    assert "note: row 2 is faster, on nodes in the order 1xg5.24xlarge+1xp4d.24xlarge+1xg5.24xlarge" in shown
    plan = read_plan(path)
    assert plan.num_replicas == 4 and plan.micro_batching.samples == 4 and plan.stages[1].devices == ((4,), (5,), (6,), (7,))
    assert run(["check", str(path)]) == 0
    assert run(["export", str(path), "--to", f"fasop:{tmp_path / 'again.csv'}"]) == 0
    header, again = (tmp_path / "again.csv").read_text().splitlines()
    assert header.startswith("mbs,tp,dp,pp,node placement") and again.startswith(f'4,1,4,4,"{NODES}",1,2,"[3, 1, 1, 1]"')


def test_a_row_by_its_number(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", f"fasop:{rows}", "--row", "3", "--out", str(tmp_path / "plan.json"), *FASOP_FOR, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_stages"] == 4 and told["num_devices"] == 16 and told["num_micro_batches"] == 8
    assert told["notes"] == ["this is row 3 of 4, 1.250 s a step by FASOP's estimate"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (FASOP_FOR[:4], "--global-batch is missing: FASOP's rows and plans over its tables do not name it"),
        (FASOP_FOR[2:], "--model is missing"),
        ([*FASOP_FOR, "--partition", "p.json"], "--partition belongs to dynpipe:PATH. Drop it"),
        ([*FASOP_FOR, "--row", "0"], "row 0 was asked for; the file has rows 1 to 4 below its header"),
        ([*FASOP_FOR, "--row", "5"], "row 5 was asked for"),
        ([*FASOP_FOR, "--row", "1"], "partition [1, 1, 1, 1, 1, 1, 0, 0]; 1 layer or more"),
        ([*FASOP_FOR, "--row", "2"], "FASOP's row is placed on 1xg5.24xlarge+1xp4d.24xlarge+1xg5.24xlarge; the cluster is 1xp4d"),
        ([*FASOP_FOR, "--cluster", "16xa100-40gb"], "the cluster is 2x"),
        ([*FASOP_FOR, "--model", "gpt-350m"], "6 layers, embedding and head included; model 'gpt-350m' has 26"),
        ([*FASOP_FOR, "--global-batch", "24"], "global_batch"),
    ],
)
def test_rows_of_fasop_that_do_not_match(
    more: list[str], message: str, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(with_last_values(["import", f"fasop:{rows}", "--out", str(tmp_path / "plan.json"), *more])) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == ""
    assert not (tmp_path / "plan.json").exists()
