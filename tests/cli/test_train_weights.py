"""`penstock train --weights`: from a model of transformers, under several plans, to what transformers itself would have trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from penstock.cli.main import run
from penstock.data.planning import sample_ids
from penstock.data.samples import Samples
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import write_plan
from penstock.runtime.request import TrainRequest
from penstock.runtime.run_inputs import run_inputs

transformers = pytest.importorskip("transformers")
VOCAB, STEPS, BATCH, RATE = 384, 2, 8, 1e-3
LLAMA: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=128,
)  # fmt: skip
GPT2: dict[str, Any] = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
OPT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, dropout=0.0, layerdrop=0.3,
)  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
}


def saved(name: str, folder: Path) -> Any:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(getattr(transformers, config)(**sizes))
    theirs.save_pretrained(folder)
    return theirs.eval()


def plan_of(source: Path, zero: int = 0, **degrees: int) -> Plan:
    plan = uniform_plan(f"hf:{source}", "2xcpu", global_batch=BATCH, micro_batch=2, layout="packed", **degrees)  # type: ignore[arg-type]
    return replace(plan, stages=tuple(replace(stage, zero=zero) for stage in plan.stages))


def train(plan: Plan, data: str, out: Path, *options: str, steps: int = STEPS) -> int:
    write_plan(out.parent / "plan.json", plan)
    given = ["--data", data, "--steps", str(steps), "--out", str(out), "--lr", str(RATE), *options]
    return run(["train", str(out.parent / "plan.json"), *given])


def loss_of(theirs: Any, plan: Plan, data: str, step: int) -> torch.Tensor:
    """What transformers finds for the samples of a step, one by one: each counted token weighs the same."""
    source, planner = run_inputs(TrainRequest(plan, data, STEPS, ""))
    held, batches = source.open()
    batch = batches[step]
    samples = Samples(held, planner.form, source.limits)
    lengths, _ = planner.form.positions(batch.lengths)
    total, count = torch.zeros(()), 0
    for identity, length in zip(sample_ids(batch, len(held)), lengths.tolist(), strict=True):
        one = samples.sample(step, identity, length, 0)
        assert one.counted is not None
        logits = theirs(torch.from_numpy(one.inputs)[None]).logits[0]
        counted = torch.from_numpy(one.counted)
        total = total + F.cross_entropy(logits[counted], torch.from_numpy(one.labels)[counted], reduction="sum")
        count += int(counted.sum())
    return total / count


def fine_tuned(theirs: Any, plan: Plan, data: str) -> list[float]:
    """Trains transformers' own model on the same samples; the losses."""
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=RATE, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        loss = loss_of(theirs, plan, data, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("gpt2", {"pp": 2}),
        ("gpt2", {"tp": 2}),
        ("qwen2-tied", {"tp": 2}),
        ("qwen2-tied", {"replicas": 2, "zero": 1}),
        ("llama", {"replicas": 2, "zero": 3}),
        ("opt", {}),
        ("opt", {"pp": 2}),
    ],
)
def test_training_goes_on_where_transformers_was(
    name: str, degrees: dict[str, int], data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = saved(name, tmp_path / "source")
    plan = plan_of(tmp_path / "source", **degrees)
    assert train(plan, data, tmp_path / "run", "--weights", f"hf:{tmp_path / 'source'}", "--json") == 0, capsys.readouterr().err
    losses = json.loads(capsys.readouterr().out)["losses"]
    assert losses == pytest.approx(fine_tuned(theirs, plan, data), abs=1e-4)

    assert run(["export", str(tmp_path / "run"), "--to", f"huggingface:{tmp_path / 'export'}"]) == 0
    shutil.copy(tmp_path / "source" / "config.json", tmp_path / "export")
    again = type(theirs).from_pretrained(tmp_path / "export")
    tokens = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (again(tokens).logits - theirs(tokens).logits).abs().max() < 2e-4
        assert (again(tokens).logits - type(theirs).from_pretrained(tmp_path / "source")(tokens).logits).abs().max() > 1e-2


def test_the_weights_of_a_checkpoint(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Step 0 again, with weights that had been trained, under another plan: the loss that transformers finds for them."""
    saved("llama", tmp_path / "source")
    assert train(plan_of(tmp_path / "source"), data, tmp_path / "run", "--weights", f"hf:{tmp_path / 'source'}", "--json") == 0
    assert run(["export", str(tmp_path / "run"), "--to", f"huggingface:{tmp_path / 'export'}", "--json"]) == 0
    shutil.copy(tmp_path / "source" / "config.json", tmp_path / "export")
    capsys.readouterr()
    plan = plan_of(tmp_path / "source", tp=2)
    assert train(plan, data, tmp_path / "again", "--weights", str(tmp_path / "run"), "--json", steps=1) == 0
    wanted = loss_of(transformers.LlamaForCausalLM.from_pretrained(tmp_path / "export"), plan, data, 0).item()
    assert json.loads(capsys.readouterr().out)["losses"] == pytest.approx([wanted], abs=1e-4)


def changed(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replaces or drops tensors of a folder."""
    from safetensors.torch import load_file, save_file

    state = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors", {"format": "pt"})


def reconfigured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


WRONG = {
    "missing": (lambda path: changed(path, **{"model.norm.weight": None}), "the weights lack 'model.norm.weight'"),
    "shape": (lambda path: changed(path, **{"model.norm.weight": torch.ones(3)}), "'model.norm.weight' has shape (3,); (32,) is expected"),
    "unknown": (lambda path: changed(path, **{"extra.weight": torch.ones(3)}), "has no place for 'extra.weight'"),
    "copies": (
        lambda path: changed(path, **{"lm_head.weight": torch.ones(VOCAB, 32)}), "differ, but the model shares them",
    ),
    "heads": (lambda path: reconfigured(path, num_attention_heads=8, head_dim=4), "heads is 8 there, 4 in the plan"),
    "family": (lambda path: (shutil.rmtree(path), saved("gpt2", path)), "it is of family gpt, the plan's of llama"),
    "none": (lambda path: (path / "model.safetensors").unlink(), "holds neither model.safetensors nor model.safetensors.index.json"),
    "cut": (lambda path: (path / "model.safetensors").write_bytes(b"\x01\x00"), "cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_other_weights_are_refused_before_training(case: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("qwen2-tied", tmp_path / "source")
    shutil.copytree(tmp_path / "source", tmp_path / "other")
    spoil, told = WRONG[case]
    spoil(tmp_path / "other")
    plan = plan_of(tmp_path / "source", pp=2)
    assert train(plan, data, tmp_path / "run", "--weights", f"hf:{tmp_path / 'other'}") == 2
    assert told in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "run").exists()


def test_what_else_is_refused(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved("llama", tmp_path / "source")
    plan = plan_of(tmp_path / "source")
    assert train(plan, data, tmp_path / "run", "--weights", str(tmp_path / "source")) == 2
    assert f"Write hf:{tmp_path / 'source'}" in capsys.readouterr().err
    assert train(plan, data, tmp_path / "run", "--weights", str(tmp_path)) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(plan, data, tmp_path / "run", "--weights", f"hf:{tmp_path / 'source'}", steps=1) == 0
    capsys.readouterr()
    both = ("--resume", str(tmp_path / "run"), "--weights", f"hf:{tmp_path / 'source'}")
    assert train(plan, data, tmp_path / "again", *both) == 2
    assert "Give one of the two" in capsys.readouterr().err and not (tmp_path / "again").exists()
    saved("gpt2", tmp_path / "gpt2")
    assert train(plan_of(tmp_path / "gpt2"), data, tmp_path / "again", "--weights", str(tmp_path / "run")) == 2
    assert "Is it of another model" in capsys.readouterr().err and not (tmp_path / "again").exists()
