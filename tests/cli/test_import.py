"""`penstock import`: a user's own module becomes a model that can be planned for, DynPipe's files become a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.models import resolve_model

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
        ("onnx:net.onnx", [], "'onnx' cannot be imported. Known: dynpipe, module."),
        ("module:{net}:maker", ["--model", "vgg16"], "--model belongs to dynpipe:PATH"),
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
    assert run(["import", source.format(folder=dynpipe), "--out", str(tmp_path / "plan.json"), *more]) == 2
    told = capsys.readouterr()
    assert message in " ".join(told.err.split()) and "Traceback" not in told.err and told.out == ""
    assert not (tmp_path / "plan.json").exists()
