"""Checkpoints written under tensor and pipeline parallelism, exported: transformers loads them and computes what we compute."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_pieces import chain_pieces

from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.models.modules import TensorParallel, build_chain
from penstock.models.modules.hf_weights import load_hf_weights, read_safetensors
from penstock.models.ops import Model
from penstock.runtime.checkpoints.huggingface import HfFolder, export_hf_checkpoint
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter

transformers = pytest.importorskip("transformers")

LLAMA: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64,
)  # fmt: skip
T5: dict[str, Any] = dict(vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, relative_attention_num_buckets=8)
CASES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**LLAMA, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**LLAMA, "head_dim": 12}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**LLAMA, "sliding_window": 5}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", dict(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=40)),
    "bert": ("BertForPreTraining", "BertConfig", dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                                      intermediate_size=48, max_position_embeddings=40)),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
}  # fmt: skip


def saved(model: Model, source: Path, folder: Path) -> Checkpoint:
    """Weights of a Hugging Face folder, loaded by two stages of two tensor-parallel ranks each, and saved by them."""
    writers = [CheckpointWriter(folder, rank=rank, world_size=4, token="x") for rank in range(4)]
    for rank, writer in enumerate(writers):
        first, last = ((0, 5), (5, model.num_ops))[rank // 2]
        chain = build_chain(model, first, last, tp=TensorParallel(rank % 2, 2), seed=1)
        load_hf_weights(chain, model, read_safetensors(source))
        writer.save(1, chain_pieces(chain, owned=True), {})
    for writer in writers:
        writer.wait()
    return Checkpoint(folder)


@pytest.mark.parametrize("file_bytes", [10**9, 20_000])
@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case: str, file_bytes: int, tmp_path: Path) -> None:
    kind, config, sizes = CASES[case]
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    theirs.save_pretrained(tmp_path / "source")
    model = resolve_model(f"hf:{tmp_path / 'source' / 'config.json'}")
    checkpoint = saved(model, tmp_path / "source", tmp_path / "saves")
    export_hf_checkpoint(checkpoint, model, tmp_path / "export", file_bytes=file_bytes)
    assert (tmp_path / "export" / "model.safetensors").is_file() == (file_bytes == 10**9)
    assert resolve_model(f"hf:{tmp_path / 'export'}").config == model.config
    again, report = getattr(transformers, kind).from_pretrained(tmp_path / "export", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    wanted = theirs.state_dict()
    assert again.state_dict().keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state_dict().items())
    if case not in ("bert", "t5"):
        ids = torch.randint(96, (2, 20))
        auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
        assert torch.equal(auto(ids).logits, theirs(ids).logits)


def test_pieces_come_from_the_folders_own_weights(tmp_path: Path) -> None:
    """Each rank asks for its pieces of one weight after the other, and later for the first ones again."""
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path)
    model = resolve_model(f"hf:{tmp_path}")
    folder, chain = HfFolder(tmp_path, model), build_chain(model, seed=1, tp=TensorParallel(1, 2))
    for _ in range(2):
        with torch.no_grad():
            for parameter in chain.parameters():
                parameter.zero_()
        folder.load(chain_pieces(chain))
    wanted = build_chain(model, seed=2, tp=TensorParallel(1, 2))
    load_hf_weights(wanted, model, read_safetensors(tmp_path))
    for (name, found), other in zip(chain.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(found, other), name


@pytest.mark.parametrize("change", [{"sliding_window": 7}, {"num_key_value_heads": 1, "head_dim": 16, "num_attention_heads": 2},
                                    {"rms_norm_eps": 1e-3}, {"rope_theta": 5e5}])  # fmt: skip
def test_weights_of_another_model_with_the_same_shapes_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    base = {**LLAMA, "sliding_window": 5}
    theirs = transformers.MistralForCausalLM(transformers.MistralConfig(**base))
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.MistralConfig(**{**base, **change}).save_pretrained(tmp_path / "asked")
    with pytest.raises(InputError, match="describes another model"):
        HfFolder(tmp_path / "theirs", resolve_model(f"hf:{tmp_path / 'asked'}"))


def test_the_tokenizer_of_the_data_comes_along(data: str, tmp_path: Path) -> None:
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path / "source")
    model = resolve_model(f"hf:{tmp_path / 'source' / 'config.json'}")
    chain = build_chain(model, seed=1)
    writer = CheckpointWriter(tmp_path / "saves", rank=0, world_size=1, token="x")
    writer.save(1, chain_pieces(chain, owned=True), {"run": {"--data": {"folder": data, "fingerprint": "x"}}})
    writer.wait()
    export_hf_checkpoint(Checkpoint(tmp_path / "saves"), model, tmp_path / "export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("the water falls")["input_ids"]).strip() == "the water falls"


def test_other_dtypes_and_wrong_targets(tmp_path: Path) -> None:
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    theirs.save_pretrained(tmp_path / "source")
    model = resolve_model(f"hf:{tmp_path / 'source' / 'config.json'}")
    checkpoint = saved(model, tmp_path / "source", tmp_path / "saves")
    export_hf_checkpoint(checkpoint, model, tmp_path / "half", dtype="bf16", file_bytes=30_000)
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * theirs.num_parameters()
    assert max(path.stat().st_size for path in (tmp_path / "half").iterdir()) < 30_000 + 4000
    assert len(set(index["weight_map"].values())) == math.ceil(index["metadata"]["total_size"] / 30_000)
    with pytest.raises(InputError, match="is not an empty folder"):
        export_hf_checkpoint(checkpoint, model, tmp_path / "half")
    with pytest.raises(InputError, match="dtype is 'int4'"):
        export_hf_checkpoint(checkpoint, model, tmp_path / "new", dtype="int4")
    with pytest.raises(InputError, match="has no Hugging Face names"):
        export_hf_checkpoint(checkpoint, resolve_model("vgg11"), tmp_path / "new")
    with pytest.raises(InputError, match="lacks"):
        export_hf_checkpoint(checkpoint, resolve_model("llama-tiny"), tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["half", "saves", "source"]
