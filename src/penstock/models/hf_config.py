"""A model's `config.json` as Hugging Face's libraries read it, so that weights under their names load by themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import InputError
from penstock.models.huggingface import HF_ACTIVATIONS, HF_DTYPES
from penstock.models.ops import Model

__all__ = ["hf_config"]

_DTYPES, _ACTIVATIONS = ({ours: theirs for theirs, ours in reversed(names.items())} for names in (HF_DTYPES, HF_ACTIVATIONS))


def hf_config(model: Model, dtype: str) -> dict[str, Any]:
    """What `AutoConfig` needs to build the same model; `dtype` is that of the weights beside it, the model's own if not given."""
    writers = {"gpt": _gpt2, "llama": _llama, "bert": _bert, "t5": _t5}
    if model.family not in writers:
        raise InputError(f"model '{model.name}' of family {model.family} has no Hugging Face config. Known: {', '.join(writers)}.")
    return {**writers[model.family](model.config), "dtype": _DTYPES[dtype or model.dtype]}


def _gpt2(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": c["layers"], "n_embd": c["hidden"], "n_head": c["heads"],
        "n_positions": c["seq_length"], "vocab_size": c["vocab"], "n_inner": c["ffn"] or 4 * c["hidden"], "resid_pdrop": c["dropout"],
        "embd_pdrop": c["dropout"], "attn_pdrop": c["attention_dropout"], "tie_word_embeddings": c["tied"],
        "layer_norm_epsilon": c["eps"], "activation_function": _ACTIVATIONS[c["activation"]],
    }  # fmt: skip


def _bert(c: Mapping[str, Any]) -> dict[str, Any]:
    if not c["tied"]:
        raise InputError("tied is false, but the masked-token head of Hugging Face's BERT shares the word embedding.")
    return {
        "model_type": "bert", "architectures": ["BertForPreTraining" if c["next_sentence"] else "BertForMaskedLM"],
        "num_hidden_layers": c["layers"], "hidden_size": c["hidden"], "num_attention_heads": c["heads"], "intermediate_size": c["ffn"],
        "vocab_size": c["vocab"], "max_position_embeddings": c["seq_length"], "type_vocab_size": c["types"],
        "hidden_dropout_prob": c["dropout"], "attention_probs_dropout_prob": c["attention_dropout"], "layer_norm_eps": c["eps"],
        "hidden_act": _ACTIVATIONS[c["activation"]],
    }  # fmt: skip


def _t5(c: Mapping[str, Any]) -> dict[str, Any]:
    tied = c["tied"]
    return {
        "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True, "num_layers": c["layers"],
        "num_decoder_layers": c["dec_layers"] or c["layers"], "d_model": c["hidden"], "num_heads": c["heads"], "d_kv": c["head_width"],
        "d_ff": c["ffn"], "vocab_size": c["vocab"], "n_positions": c["seq_length"], "relative_attention_num_buckets": c["buckets"],
        "relative_attention_max_distance": c["max_distance"], "layer_norm_epsilon": c["eps"], "dropout_rate": c["dropout"],
        "feed_forward_proj": f"{'gated-' if c['gated'] else ''}{_ACTIVATIONS[c['activation']]}", "tie_word_embeddings": tied,
        "scale_decoder_outputs": tied if c["scaled"] is None else c["scaled"], "decoder_start_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip


def _llama(c: Mapping[str, Any]) -> dict[str, Any]:
    kind, name = _llama_kind(c)
    scaling = dict(c["rope_scaling"] or {"rope_type": "default"})
    # Left out, a head's width means hidden / heads to all of them but Qwen3.
    width = {"head_dim": c["head_width"] or c["hidden"] // c["heads"]} if c["head_width"] or kind == "qwen3" else {}
    return {
        "model_type": kind, "architectures": [f"{name}ForCausalLM"], "num_hidden_layers": c["layers"], "hidden_size": c["hidden"],
        "num_attention_heads": c["heads"], "num_key_value_heads": c["kv_heads"], "intermediate_size": c["ffn"], "vocab_size": c["vocab"],
        "max_position_embeddings": c["seq_length"], "hidden_act": "silu", "rms_norm_eps": c["eps"],
        "tie_word_embeddings": c["tied"], "attention_bias": c["out_bias"],
        "rope_parameters": {**scaling, "rope_theta": c["rope_theta"]}, "sliding_window": c["window"] or None,
        "use_sliding_window": bool(c["window"]), "max_window_layers": 0 if c["window"] else c["layers"], **width,
    }  # fmt: skip


def _llama_kind(c: Mapping[str, Any]) -> tuple[str, str]:
    """Which of Llama's relatives has these parts."""
    if c["qk_norm"] and c["qkv_bias"] == c["out_bias"]:
        return "qwen3", "Qwen3"
    if not c["qk_norm"] and c["qkv_bias"] and not c["out_bias"]:
        return "qwen2", "Qwen2"
    if not c["qk_norm"] and c["window"] and not c["qkv_bias"]:
        return "mistral", "Mistral"
    if not c["qk_norm"] and not c["window"] and c["qkv_bias"] == c["out_bias"]:
        return "llama", "Llama"
    raise InputError(
        f"no model type of Hugging Face has these parts together: qk_norm {c['qk_norm']}, qkv_bias {c['qkv_bias']}, out_bias "
        f"{c['out_bias']}, window {c['window']}."
    )
