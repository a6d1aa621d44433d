"""A stranger's net from the command line: searched for, trained in two stages, gone on with as two replicas, exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from penstock.cli.main import run

NET = '''
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, 16), nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make():
    return Net(300), None


def small():
    return Net(100), None
'''


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_a_net_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(NET)
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
