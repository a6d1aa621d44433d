"""A stranger's net from the command line: searched for, trained in two stages, gone on with as two replicas, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from penstock.cli.main import run

NET = Path(__file__).parents[1] / "strangers_net.py"


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_net_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_bytes(NET.read_bytes())
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"cat {n} sat on mat {n * n} " * (1 + n % 4)}) + "\n" for n in range(40)))
    asked(capsys, "prepare-data", "texts.jsonl", "--train-tokenizer", "270", "--split", "9,1,0", "--out", "data")
    search = ("search", "--cluster", "2xcpu", "--global-batch", "4", "--seq-length", "64", "--top", "40")
    asked(capsys, *search, "--model", "module:net.py:make", "--out", "plan.json")
    plans = {path: json.loads(path.read_text()) for path in sorted(Path().glob("plan*.json"))}
    cut = next(path for path, plan in plans.items() if len(plan["stages"]) == 2)
    other = next(path for path, plan in plans.items() if len(plan["stages"]) == 1)
    first = asked(capsys, "train", str(cut), "--data", "data", "--out", "run", "--steps", "3", "--eval-every", "3", "--lr", "0.01")
    again = asked(capsys, "train", str(other), "--data", "data", "--out", "run", "--steps", "6", "--resume", "run", "--lr", "0.01")
    assert len(first["losses"]) == 3 and len(again["losses"]) == 3 and again["losses"][-1] < first["losses"][0]
    asked(capsys, "export", "run", "--to", "huggingface:trained")
    exported = load_file("trained/model.safetensors")
    assert "blocks.1.qkv.bias" in exported and "head.weight" not in exported, "shared weights once"
    asked(capsys, *search, "--model", "module:net.py:small", "--out", "small.json")
    assert run(["train", "small.json", "--data", "data", "--out", "other", "--steps", "1"]) == 2
    assert "has a vocabulary of 270, model 'small' of 100 only" in capsys.readouterr().err
