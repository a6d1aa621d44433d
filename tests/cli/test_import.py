"""`penstock import`: a user's own module becomes a model that can be planned for."""

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
        ("modul:net.py:maker", [], "'modul' cannot be imported. Write module:PATH.py:FUNCTION"),
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
