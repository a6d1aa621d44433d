"""A model of transformers and one's own texts on two processes, as torchrun starts them: by script and by command."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrun_ranks import run_ranks

import penstock
from penstock.cli.main import run
from penstock.data.text.tokenizer import train_tokenizer
from penstock.plans.references import model_of

transformers = pytest.importorskip("transformers")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def llama(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, as `save_pretrained` leaves them."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = train_tokenizer((json.loads(line)["text"] for line in texts.read_text().splitlines()), 384)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_a_family_of_ours_as_transformers_own_module(
    llama: Path, texts: Path, rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same loss by other code, from the weights of the folder, which is found by the name that it was downloaded under."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: {"tiny/llama": str(llama)}[name])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # what dynamo makes of units, at once
    losses = []
    for native, compiled in ((True, False), (False, False), (False, True)):
        plan = penstock.find_plans("hf:tiny/llama", "1xcpu", data=rows, tokens_per_batch=600, native=native)[0]
        model = penstock.parallelize("hf:tiny/llama", plan, native=native, compile=compiled)
        assert (model.rank.cut is None) is native
        losses.append(model.step(next(iter(penstock.DynamicLoader(rows, plan)))[1]).item())
        if native:
            with pytest.raises(penstock.InputError, match="find_plans with native=False"):
                penstock.parallelize("hf:tiny/llama", plan, native=False)
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    assert model.rank.cut is not None and len(model.rank.cut.skipping.in_place_of) == 4, "two layers, norm and head"
    given = {"model.native": False, "plan.tokens_per_batch": 600}
    trainer = penstock.Trainer("hf:tiny/llama", texts, out=tmp_path / "run", cluster="1xcpu", steps=1, settings=given)
    assert model_of(trainer.plan).config["origin"] == f"hf:{llama}" and not trainer.job.model.native


def launched(folder: Path, *arguments: str) -> str:
    """What the first of two processes said."""
    here = {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    first, second = run_ranks(arguments, [{"LOCAL_RANK": "0", **here}, {"LOCAL_RANK": "1", **here}], folder)
    assert (first.status, second.status) == (0, 0), first.err[-2000:] + second.err[-2000:]
    return first.out


@pytest.mark.parametrize("script", ["own_loop.py", "finetune.py"])
def test_the_scripts_of_ones_own_loop(script: str, llama: Path, texts: Path, tmp_path: Path) -> None:
    given = ("--model", str(llama), "--data", str(texts), "--tokens-per-batch", "900", "--out", str(tmp_path / "trained"))
    told = launched(tmp_path, str(EXAMPLES / script), *given)
    steps = re.findall(r"step (\d+): loss ([\d.]+)", told)
    assert "plan of llama" in told and len(steps) >= 2 and all(4 < float(loss) < 8 for _, loss in steps)
    before, after = (transformers.LlamaForCausalLM.from_pretrained(folder).state_dict() for folder in (llama, tmp_path / "trained"))
    assert all((after[name] - tensor).abs().max() > 1e-6 for name, tensor in before.items() if tensor.ndim > 1)


def test_the_command_under_torchrun_is_the_command_alone(
    llama: Path, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of the folder, its tokenizer, and the same losses on two processes as on one."""

    def command(out: str) -> list[str]:
        named = ["--model", f"hf:{llama}", "--data", str(texts), "--out", str(tmp_path / out), "--tokens-per-batch", "900"]
        return ["train", *named, "--steps", "2", "--json"]

    both: dict[str, Any] = json.loads(launched(tmp_path, *command("both")))
    assert run(command("alone")) == 0
    alone: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert both["losses"] == pytest.approx(alone["losses"], abs=1e-4) and both["data"] == alone["data"]
    theirs = json.loads((llama / "tokenizer.json").read_text())["model"]["vocab"]
    assert json.loads((Path(both["data"]) / "tokenizer.json").read_text())["model"]["vocab"] == theirs
