"""Imported Hugging Face models compute what transformers computes, in both layouts, and their weights survive the way there and back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.models.gpt import GptConfig, gpt
from penstock.models.huggingface import model_from_hf
from penstock.models.modules import Batch, Chain, Sequences, TensorParallel, build_chain
from penstock.models.modules.hf_weights import export_hf_weights, hf_names, load_hf_weights, read_safetensors
from penstock.models.ops import Model
from penstock.plans.references import with_precision

transformers = pytest.importorskip("transformers")

VOCAB = 97
LENGTHS, FULL = (7, 19, 3), (19, 19, 19)
DEC_LENGTHS, DEC_FULL = (11, 2, 8), (11, 11, 11)
LLAMA_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=44, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=64, rms_norm_eps=1e-5,
)  # fmt: skip
T5_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=32, d_kv=6, d_ff=44, num_layers=2, num_decoder_layers=3, num_heads=4, relative_attention_num_buckets=8,
    relative_attention_max_distance=12,
)  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip


def _config(name: str, **sizes: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**sizes)


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama": ("LlamaForCausalLM", _config("LlamaConfig", **LLAMA_SIZES)),
    "llama-biases-llama3": (
        "LlamaForCausalLM", _config("LlamaConfig", **LLAMA_SIZES, head_dim=12, attention_bias=True, rope_parameters=LLAMA3)),
    "llama-tied-linear": (
        "LlamaForCausalLM",
        _config("LlamaConfig", **{**LLAMA_SIZES, "num_hidden_layers": 1}, tie_word_embeddings=True,
                rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0})),
    "qwen2": ("Qwen2ForCausalLM", _config("Qwen2Config", **LLAMA_SIZES, tie_word_embeddings=True)),
    "qwen2-window": (
        "Qwen2ForCausalLM", _config("Qwen2Config", **LLAMA_SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen3": ("Qwen3ForCausalLM", _config("Qwen3Config", **LLAMA_SIZES, head_dim=12)),
    "mistral": ("MistralForCausalLM", _config("MistralConfig", **LLAMA_SIZES, sliding_window=5)),
    "gpt2": ("GPT2LMHeadModel", _config("GPT2Config", vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=40, n_inner=52)),
    "bert": ("BertForPreTraining", _config("BertConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                           intermediate_size=44, max_position_embeddings=40)),
    "t5": ("T5ForConditionalGeneration", _config("T5Config", **T5_SIZES)),
    "t5-gated": ("T5ForConditionalGeneration", _config("T5Config", **T5_SIZES, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}  # fmt: skip
TYPES = ("llama", "qwen2", "qwen3", "mistral", "gpt2", "bert", "t5")


@dataclass
class Pair:
    """The same model twice."""

    theirs: Any
    model: Model
    ours: Chain

    def compare(self, lengths: Sequence[int], dec_lengths: Sequence[int], layout: str = "padded") -> None:
        """Logits at all real positions, theirs from a padded batch with a mask, or from each sequence alone if ours are packed."""
        rows, dec_rows = _random_rows(lengths, 1), _random_rows(dec_lengths, 2) if self.model.dec_length else []
        types = [row % 2 for row in rows]
        kind_ids = types if self.model.family == "bert" else None
        batch = Batch(own=_sequences(rows, layout, kind_ids), decoder=_sequences(dec_rows, layout) if dec_rows else None, training=False)
        with torch.no_grad():
            carry = self.ours(batch)
        got = _split(carry["logits"], dec_lengths if dec_rows else lengths, layout)
        groups = [[i] for i in range(len(rows))] if layout == "packed" else [list(range(len(rows)))]
        for group in groups:
            wanted, next_sentence = self._theirs(*([part[i] for i in group] for part in (rows, dec_rows or rows, types)))
            for i, logits in zip(group, wanted, strict=True):
                assert logits.std() > 0.1  # large enough for the tolerance to mean something
                torch.testing.assert_close(got[i], logits, atol=1e-4, rtol=1e-4)
            if next_sentence is not None:
                torch.testing.assert_close(carry["next_sentence"][group], next_sentence, atol=1e-4, rtol=0)

    @torch.no_grad()
    def _theirs(
        self, rows: list[torch.Tensor], dec_rows: list[torch.Tensor], types: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        inputs = {"input_ids": _padded(rows), "attention_mask": _padded([torch.ones_like(row) for row in rows])}
        if self.model.family == "t5":
            inputs |= {"decoder_input_ids": _padded(dec_rows), "decoder_attention_mask": _padded([torch.ones_like(r) for r in dec_rows])}
        if self.model.family == "bert":
            output = self.theirs(**inputs, token_type_ids=_padded(types))
            return _cut(output.prediction_logits, rows), output.seq_relationship_logits
        return _cut(self.theirs(**inputs).logits, dec_rows if self.model.family == "t5" else rows), None


def _random_rows(lengths: Sequence[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def _cut(logits: torch.Tensor, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    return [row[: len(ids)] for row, ids in zip(logits, rows, strict=True)]


def _sequences(rows: list[torch.Tensor], layout: Any, types: list[torch.Tensor] | None = None) -> Sequences:
    def lay(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts) if layout == "packed" else _padded(parts).flatten()

    lengths = tuple(len(row) for row in rows)
    return Sequences(lay(rows), lengths, layout, max(lengths), torch.arange(len(rows)), lay(types) if types else None)


def _split(flat: torch.Tensor, lengths: Sequence[int], layout: str) -> list[torch.Tensor]:
    if layout == "packed":
        return list(flat.split(list(lengths)))
    return [row[:length] for row, length in zip(flat.unflatten(0, (len(lengths), -1)), lengths, strict=True)]


@torch.no_grad()
def _randomise(module: torch.nn.Module) -> None:
    """Weights so large that every term of the model shows in its logits; transformers' own start gives logits near zero."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
        else:
            parameter.copy_(noise if "relative_attention_bias" in name else 1.5 * noise / parameter.shape[-1] ** 0.5)


def _theirs(case: str) -> Any:
    kind, config = CASES[case]
    theirs = getattr(transformers, kind)(config()).eval()
    _randomise(theirs)
    return theirs


def _pair(case: str, folder: Path) -> Pair:
    theirs = _theirs(case)
    theirs.config.save_pretrained(folder)
    model = resolve_model(f"hf:{folder / 'config.json'}")
    chain = build_chain(model, 0, -1)
    load_hf_weights(chain, model, theirs.state_dict())
    return Pair(theirs, model, chain)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    pair = _pair(case, tmp_path)
    pair.compare(LENGTHS, DEC_LENGTHS)
    pair.compare(FULL, DEC_FULL)
    if "packed" in pair.model.layouts:
        pair.compare(LENGTHS, DEC_LENGTHS, "packed")


@pytest.mark.parametrize("case", CASES)
def test_weights_survive_the_round_trip(case: str, tmp_path: Path) -> None:
    pair = _pair(case, tmp_path)
    wanted = pair.theirs.state_dict()
    got = export_hf_weights(pair.ours, pair.model)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    once = export_hf_weights(pair.ours, pair.model, copies=False)
    assert len(once) == len(list(pair.theirs.parameters()))


@pytest.mark.parametrize("case", CASES)
def test_number_of_parameters(case: str, tmp_path: Path) -> None:
    pair = _pair(case, tmp_path)
    assert pair.model.num_parameters == pair.theirs.num_parameters()
    assert pair.model.num_parameters == sum(p.numel() for p in pair.ours.parameters())


def test_t5_with_a_head_of_its_own(tmp_path: Path) -> None:
    """T5 v1.1 as published: untied, therefore not scaled."""
    theirs = _theirs("t5-gated")
    head = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(3)) / 32**0.5  # logits of 10 would be rounded by the tolerance
    theirs.lm_head.weight = torch.nn.Parameter(head)
    config = {**T5_SIZES, "model_type": "t5", "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "torch_dtype": "float32"}
    model = _model(tmp_path, config)
    chain = build_chain(model, 0, -1)
    load_hf_weights(chain, model, theirs.state_dict())
    assert model.num_parameters == theirs.num_parameters()
    Pair(theirs, model, chain).compare(LENGTHS, DEC_LENGTHS)


@pytest.mark.parametrize("case", TYPES)
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_folders_of_safetensors(case: str, shard: str, tmp_path: Path) -> None:
    theirs = _theirs(case)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors").exists() == (shard == "1GB")
    model = model_from_hf(str(tmp_path))
    assert model.dtype == "fp32"
    chain = build_chain(model)
    load_hf_weights(chain, model, read_safetensors(tmp_path))
    got = export_hf_weights(chain, model)
    assert all(torch.equal(got[name], tensor) for name, tensor in theirs.state_dict().items())


def test_slices_and_ranks_take_their_part(tmp_path: Path) -> None:
    pair = _pair("qwen2", tmp_path)
    state = pair.theirs.state_dict()
    tail = build_chain(pair.model, 9)  # the tied logits are here, their embedding is not
    load_hf_weights(tail, pair.model, state)
    wanted = {f"{module.name}.{name}": p for module in pair.ours.ops for name, p in module.named_parameters()}
    parts = [build_chain(pair.model, tp=TensorParallel(rank, 2)) for rank in range(2)]
    for part in parts:
        load_hf_weights(part, pair.model, state)
    for module in tail.ops:
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, wanted[f"{module.name}.{name}"])
    first, second = (part.ops[2].weight for part in parts)
    query = state["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(torch.cat([first[:16], second[:16]]), query)
    with pytest.raises(InputError, match=r"'embedding' is divided over tp=2; only whole weights"):
        export_hf_weights(parts[0], pair.model)


def test_names_and_how_they_combine(tmp_path: Path) -> None:
    names = hf_names(_pair("llama", tmp_path).model)
    assert names["layers.1.up.weight"].names == ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    assert names["layers.0.qkv.weight"].shapes == ((32, 32), (16, 32), (16, 32))
    names = hf_names(_pair("bert", tmp_path).model)
    assert names["head.logits.weight"] == names["embedding.weight"]
    assert names["embedding.weight"].copies == ("cls.predictions.decoder.weight",)
    assert hf_names(_pair("gpt2", tmp_path).model)["layers.0.up.weight"].transposed
    with pytest.raises(InputError, match="family 'vgg', which has no Hugging Face names"):
        hf_names(resolve_model("vgg11"))


def test_old_checkpoints_of_the_body_alone(tmp_path: Path) -> None:
    """GPT-2's published names lack the prefix and hold masks; BERT's norms have gamma and beta."""
    pair = _pair("gpt2", tmp_path)
    state = {name.removeprefix("transformer."): tensor for name, tensor in pair.theirs.state_dict().items() if name != "lm_head.weight"}
    state["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    _loads_all(pair, state)
    pair = _pair("bert", tmp_path)
    renames = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    state = dict(pair.theirs.state_dict())
    for new, old in renames:
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    _loads_all(pair, state)


def _loads_all(pair: Pair, state: dict[str, torch.Tensor]) -> None:
    """Weights from such a checkpoint are those of the usual one."""
    chain = build_chain(pair.model, seed=1)
    load_hf_weights(chain, pair.model, state)
    for mine, wanted in zip(chain.parameters(), pair.ours.parameters(), strict=True):
        assert torch.equal(mine, wanted)


def test_wrong_weights_are_named(tmp_path: Path) -> None:
    pair = _pair("llama", tmp_path)
    state = pair.theirs.state_dict()
    chain = build_chain(pair.model)
    with pytest.raises(InputError, match=r"lack 'model\.layers\.1\.self_attn\.k_proj\.weight', which model"):
        load_hf_weights(chain, pair.model, {k: v for k, v in state.items() if k != "model.layers.1.self_attn.k_proj.weight"})
    with pytest.raises(InputError, match=r"and \d+ more"):
        load_hf_weights(chain, pair.model, {})
    with pytest.raises(InputError, match=r"'model\.norm\.weight' has shape \(3,\); \(32,\) is expected for 'head\.norm\.weight'"):
        load_hf_weights(chain, pair.model, {**state, "model.norm.weight": torch.ones(3)})
    with pytest.raises(InputError, match=r"no place for 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load_hf_weights(chain, pair.model, {**state, "model.layers.0.self_attn.q_proj.bias": torch.ones(32)})
    tied = _pair("qwen2", tmp_path)
    with pytest.raises(InputError, match=r"'lm_head\.weight' and 'model\.embed_tokens\.weight' differ.*tie_word_embeddings"):
        load_hf_weights(tied.ours, tied.model, {**tied.theirs.state_dict(), "lm_head.weight": torch.ones(VOCAB, 32)})


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds neither model\.safetensors .* never read"):
        read_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(InputError, match="weight_map"):
        read_safetensors(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "absent.safetensors"}}))
    with pytest.raises(InputError, match=r"absent\.safetensors' does not exist"):
        read_safetensors(tmp_path)["a"]
    (tmp_path / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(InputError, match="cannot be read"):
        read_safetensors(tmp_path)


LLAMA = {**LLAMA_SIZES, "model_type": "llama"}
QWEN2 = {**LLAMA_SIZES, "model_type": "qwen2"}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
BERT = {"model_type": "bert", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 44, "max_position_embeddings": 40}  # fmt: skip
T5 = {**T5_SIZES, "model_type": "t5"}


def _model(folder: Path, values: Any, **options: Any) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    return model_from_hf(str(path), **options)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
         {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "window": 0}),
        ({**LLAMA, "rope_parameters": LLAMA3},
         {"rope_theta": 500.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}),
        ({**LLAMA, "num_key_value_heads": None, "torch_dtype": "bfloat16", "sliding_window": 7},
         {"kv_heads": 4, "dtype": "bf16", "window": 0, "rope_theta": 10000.0, "rope_scaling": None}),
        ({**LLAMA, "model_type": "mistral", "dtype": "float16"}, {"window": 4096, "dtype": "fp16", "tied": False}),
        ({**LLAMA, "model_type": "mistral", "sliding_window": None}, {"window": 0, "dtype": "fp32"}),
        ({**LLAMA, "model_type": "qwen3"}, {"head_width": 128, "qk_norm": True, "qkv_bias": False}),
        ({**QWEN2, "sliding_window": 4}, {"window": 0, "qkv_bias": True, "out_bias": False}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4}, {"window": 0}),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, {"window": 4}),
        (GPT2, {"ffn": 128, "dropout": 0.1, "attention_dropout": 0.0, "fused_attention": True, "activation": "gelu_tanh", "tied": True}),
        ({**BERT, "architectures": ["BertForMaskedLM"]}, {"next_sentence": False, "types": 2, "dropout": 0.1, "attention_dropout": 0.0}),
        (T5, {"tied": True, "scaled": True, "gated": False, "activation": "relu", "seq_length": 512, "dec_layers": 3}),
        ({**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
         {"tied": False, "scaled": False, "gated": True, "activation": "gelu_tanh"}),
        ({**T5, "feed_forward_proj": "gated-silu", "n_positions": 64}, {"gated": True, "activation": "silu", "dec_length": 64}),
    ],
)  # fmt: skip
def test_fields(values: dict[str, Any], wanted: dict[str, Any], tmp_path: Path) -> None:
    config = _model(tmp_path, values).config
    assert {name: config[name] for name in wanted} == wanted


def test_what_a_config_leaves_open_and_does_not_get_is_known(tmp_path: Path) -> None:
    gpt2 = _model(tmp_path, GPT2)
    assert gpt2.open_dtype and "attn_pdrop 0.1" in gpt2.notes[0]
    assert not _model(tmp_path, {**GPT2, "attn_pdrop": 0.0, "torch_dtype": "float32"}).notes
    assert not _model(tmp_path, {**LLAMA, "dtype": "float32"}).open_dtype


def test_attention_dropout_on_request(tmp_path: Path) -> None:
    for values in (GPT2, BERT):
        config = _model(tmp_path, values, keep_attention_dropout=True).config
        assert (config["attention_dropout"], config["fused_attention"]) == (0.1, False)
    assert _model(tmp_path, LLAMA, keep_attention_dropout=True).family == "llama"
    with pytest.raises(InputError, match=r"'attention_dropout' is 0\.2; attention dropout is supported for gpt2 and bert only"):
        _model(tmp_path, {**LLAMA, "attention_dropout": 0.2}, keep_attention_dropout=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mixtral"}, r"'mixtral' is a mixture of experts: it is cut .*; experts are not spread over devices yet\."),
        ({"model_type": "qwen3_moe"}, r"'qwen3_moe' is a mixture of experts.*penstock\[hf\]"),
        ({"model_type": "gpt_neox"}, r"'gpt_neox', none of bert, gpt2, llama, mistral, qwen2, qwen3, t5: it is cut and trained as"),
        ({}, r"'model_type' is 'missing', none of bert, gpt2, llama"),
        ([1], r"expected an object with a field 'model_type', got list"),
        ({**LLAMA, "mlp_bias": True}, r"'mlp_bias' is True; supported: false"),
        ({**LLAMA, "hidden_act": "gelu"}, r"'hidden_act' is 'gelu'; supported: silu"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
         r"'rope_scaling' has rope_type 'yarn'; supported: default, linear, llama3"),
        ({**LLAMA, "rope_parameters": {"rope_type": "dynamic"}}, r"'rope_parameters' has rope_type 'dynamic'"),
        ({**LLAMA, "rope_parameters": {"rope_type": "linear"}}, r"rope_type 'linear' but no factor"),
        ({**LLAMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"one set of parameters for all layers"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, r"'partial_rotary_factor' is 0\.5"),
        ({**LLAMA, "num_local_experts": 8}, r"'llama' is a mixture of experts"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, r"'quantization_config' is .*; supported: weights in bf16"),
        ({**LLAMA, "dtype": "float64"}, r"'dtype' is 'float64'; supported: bfloat16, float16, float32"),
        ({**LLAMA, "hidden_size": "32"}, r"'hidden_size' is '32'; supported: a positive whole number"),
        ({**GPT2, "n_layer": 10**9}, r"'n_layer' is 1000000000; supported: at most 10000"),
        ({**LLAMA, "rms_norm_eps": "small"}, r"'rms_norm_eps' is 'small'; supported: a number"),
        ({**LLAMA, "tie_word_embeddings": 1}, r"'tie_word_embeddings' is 1; supported: true or false"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, r"'vocab_size' is missing, but a llama cannot be built without it"),
        ({**LLAMA, "num_key_value_heads": 3}, r"config\.json': heads=4 must be divisible by kv_heads=3"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1},
         r"'max_window_layers' is 1; supported: a window in all layers or in none"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, r"'scale_attn_by_inverse_layer_idx' is True"),
        ({**GPT2, "embd_pdrop": 0.0}, r"'embd_pdrop' is 0\.0; supported: the same as 'resid_pdrop' \(0\.1\)"),
        ({**GPT2, "activation_function": "quick_gelu"}, r"'activation_function' is 'quick_gelu'; supported: gelu, "),
        ({**BERT, "tie_word_embeddings": False}, r"'tie_word_embeddings' is False; supported: true"),
        ({**BERT, "position_embedding_type": "relative_key"}, r"'position_embedding_type' is 'relative_key'; supported: absolute"),
        ({**T5, "feed_forward_proj": "mixed-gelu"}, r"'feed_forward_proj' is 'mixed-gelu'"),
        ({**T5, "is_encoder_decoder": False}, r"'is_encoder_decoder' is False"),
    ],
)  # fmt: skip
def test_what_cannot_be_imported_is_refused(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        _model(tmp_path, values)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 32}},
         "'rope_parameters' has rope_type 'yarn', and our own ops know default, linear, llama3"),
        ({**LLAMA, "mlp_bias": True}, "'mlp_bias' is True"),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "'max_window_layers' is 1"),
    ],
)  # fmt: skip
def test_what_our_ops_do_not_know_is_trained_as_transformers_has_it(values: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = resolve_model(f"hf:{tmp_path}")
    assert model.family == "traced" and any(wanted in note for note in model.notes)
    assert with_precision(model, "bf16").notes == model.notes
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert model.num_parameters == transformers.AutoModelForCausalLM.from_config(config).num_parameters()


def test_a_model_that_fails_is_told_of_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "hidden_act": "no such"}))
    with pytest.raises(InputError, match=r"'hidden_act' is 'no such'; supported: silu\. As transformers has it: .* KeyError"):
        resolve_model(f"hf:{tmp_path}")


@pytest.mark.parametrize(("named", "told"), [("LlamaForSequenceClassification", True), ("LlamaForCausalLM", False)])
def test_another_head_is_told_of(named: str, told: bool, tmp_path: Path) -> None:
    notes = _model(tmp_path, {**LLAMA, "architectures": [named]}).notes
    assert notes == ((f"its config names {named}; planned and trained as LlamaForCausalLM.",) if told else ())


def test_a_config_without_its_prefix_is_pointed_at_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(InputError, match=r"is a Hugging Face config\. Give it as hf:.*config\.json"):
        resolve_model(str(tmp_path / "config.json"))


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Hugging Face config '.*config\.json' does not exist"):
        model_from_hf(str(tmp_path))


def test_own_models_export_too() -> None:
    model = gpt(GptConfig(1, 32, 4, seq_length=40, vocab=VOCAB, dtype="fp32"))
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{k: v for k, v in GPT2.items() if k != "model_type"} | {"n_layer": 1}))
    ours = build_chain(model, 0, -1)
    _randomise(ours)
    theirs.load_state_dict(export_hf_weights(ours, model))
    Pair(theirs.eval(), model, ours).compare(LENGTHS, DEC_LENGTHS)


@pytest.mark.parametrize(("field", "value"), [("rope_theta", -5.0), ("rms_norm_eps", -1.0), ("rms_norm_eps", 2.0)])
def test_numbers_that_make_no_model_are_refused(tmp_path: Path, field: str, value: float) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128,
              "vocab_size": 100, "max_position_embeddings": 32, field: value}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=f"field '{field}' is {value}; supported:"):
        model_from_hf(str(tmp_path / "config.json"))
