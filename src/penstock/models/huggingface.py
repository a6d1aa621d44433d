"""Models of Hugging Face: where their files are, and a `config.json` as a family of ours; neither torch nor transformers is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files import read_json
from penstock.models.bert import BertConfig, bert
from penstock.models.config import MAX_LAYERS, expected_number
from penstock.models.gpt import GptConfig, gpt
from penstock.models.llama import LlamaConfig, llama
from penstock.models.ops import Model
from penstock.models.t5 import T5Config, t5

__all__ = [
    "HF_ACTIVATIONS", "HF_DTYPES", "TRANSFORMERS", "NotOurs", "found_source", "hf_folder", "model_from_hf", "named_dtype",
]  # fmt: skip

TRANSFORMERS = "transformers:"
"""Before a folder: its model as transformers has it, though it is of a family of ours, which `hf:` would make of it."""
_PREFIXES = "hf:", TRANSFORMERS

# Their names to ours; of several for one of ours the first is what we write.
HF_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
HF_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu",
}  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_AS_IT_IS = "it is cut and trained as transformers has it (pip install 'penstock[hf]')"
_ROPE_TYPES = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor")}
"""The rotary scalings our kernels know and the numbers each needs."""


class NotOurs(InputError):
    """A config of a model that no family of ours can be; `notes` are what to say of the model if transformers has it."""

    notes: tuple[str, ...] = ()


def found_source(source: str, native: bool = True) -> str:
    """The source with the place of its files in it: `hf:Qwen/Qwen3-1.7B` becomes `hf:` and the folder that it was downloaded to.

    Not `native`: the model as transformers has it, whether we have its family or not.
    """
    prefix = next((one for one in _PREFIXES if source.startswith(one)), "")
    if not prefix:
        return source
    name, prefix = source.removeprefix(prefix), prefix if native else TRANSFORMERS
    if Path(name).exists():
        return prefix + name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise InputError(f"model '{source}': there is no folder '{name}'. Give one that holds a config.json.") from None
    try:
        return prefix + snapshot_download(name, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        raise InputError(
            f"model '{source}': there is neither a folder '{name}' nor a downloaded model of that name. Download it with "
            f"`hf download {name}`, or give a folder that holds a config.json."
        ) from None


def hf_folder(source: str) -> Path | None:
    """The folder of a Hugging Face model; None for any other."""
    prefix = next((one for one in _PREFIXES if source.startswith(one)), "")
    if not prefix:
        return None
    path = Path(source.removeprefix(prefix))
    return path if path.is_dir() else path.parent


def _config_file(path: str) -> Path:
    return Path(path) / "config.json" if Path(path).is_dir() else Path(path)


def named_dtype(path: str) -> str:
    """Our name of the dtype that a `config.json` (or a folder holding one) has for its model; "" where it names none of ours."""
    values = read_json(_config_file(path), "Hugging Face config")
    found = (values.get("dtype") or values.get("torch_dtype")) if isinstance(values, dict) else None
    return HF_DTYPES.get(str(found).removeprefix("torch."), "")


def model_from_hf(path: str, *, keep_attention_dropout: bool = False) -> Model:
    """The model that a Hugging Face `config.json` (or a folder holding one) describes.

    Fields that are absent mean what transformers takes them for; without `dtype` the model is fp32, but plans may choose. Dropout of hidden
    states is kept, but not inside T5's MLP. Dropout of attention probabilities becomes 0, because the fused kernels have none, and
    is noted; `keep_attention_dropout` keeps it and gives up the fused kernels (GPT-2 and BERT only).
    """
    file = _config_file(path)
    where = f"Hugging Face config '{file}'"
    values = read_json(file, "Hugging Face config")
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected an object with a field 'model_type', got {type(values).__name__}.")
    kind = str(values.get("model_type", "missing"))
    if any(values.get(name) for name in _EXPERTS) or "moe" in kind or kind == "mixtral":
        unknown = NotOurs(f"{where}: {kind!r} is a mixture of experts: {_AS_IT_IS}; experts are not spread over devices yet.")
        unknown.notes = ("mixture of experts: cut and trained as it is; experts are not spread over devices yet.",)
        raise unknown
    if kind not in _READERS:
        raise NotOurs(f"{where}: field 'model_type' is {kind!r}, none of {', '.join(_READERS)}: {_AS_IT_IS}.")
    fields = _Fields(values, where, kind, keep_attention_dropout)
    if values.get("quantization_config") is not None:
        raise fields.wrong("quantization_config", "weights in bf16, fp16 or fp32")
    config, build = _READERS[kind](fields)
    fields.say_head()
    try:
        model = build(config, file.resolve().parent.name or kind)
        return replace(model, notes=tuple(fields.notes), open_dtype=not (values.get("dtype") or values.get("torch_dtype")))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


@dataclass(frozen=True)
class _Fields:
    """The fields of one config, with errors that name file, field, value and what is supported."""

    values: Mapping[str, Any]
    where: str
    kind: str
    keep_attention_dropout: bool
    notes: list[str] = field(default_factory=list)

    def wrong(self, name: str, supported: str) -> InputError:
        """The error for a field that has a value Penstock cannot honour."""
        return InputError(f"{self.where}: field '{name}' is {self.values.get(name)!r}; supported: {supported}.")

    def not_ours(self, name: str, supported: str, has: str = "") -> NotOurs:
        """The error for a field with which the model is none of our families'; `has` tells more of its value than that it is there."""
        has = has or f"is {self.values.get(name)!r}"
        error = NotOurs(f"{self.where}: field '{name}' {has}; supported: {supported}.")
        error.notes = (f"cut and trained as transformers has it: field '{name}' {has}, and our own ops know {supported}.",)
        return error

    def only(self, name: str, allowed: Collection[Any], supported: str) -> None:
        """Refuses a value that is neither null nor one of `allowed`."""
        value = self.values.get(name)
        if value is not None and value not in list(allowed):
            raise self.not_ours(name, supported)

    def say_head(self) -> None:
        """Notes that the config names a model with another head than ours has."""
        named, ours = self.values.get("architectures"), _HEADS[self.kind]
        if isinstance(named, list) and named and named[0] not in ours:
            self.notes.append(f"its config names {named[0]}; planned and trained as {ours[0]}.")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number; without a default it must be there."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            raise InputError(f"{self.where}: field '{name}' is missing, but a {self.kind} cannot be built without it.")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(name, "a positive whole number")
        if "layer" in name and value > MAX_LAYERS:
            raise self.wrong(name, f"at most {MAX_LAYERS}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        if expected := expected_number(name, value):
            raise self.wrong(name, expected)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """Our name of an activation."""
        value = str(self.values.get(name) or default)
        if value not in HF_ACTIVATIONS:
            raise self.not_ours(name, ", ".join(HF_ACTIVATIONS))
        return HF_ACTIVATIONS[value]

    def dtype(self) -> str:
        """`dtype`, or `torch_dtype` as it was called before transformers 5."""
        name = "dtype" if self.values.get("dtype") is not None else "torch_dtype"
        value = str(self.values.get(name) or "float32").removeprefix("torch.")
        if value not in HF_DTYPES:
            raise self.wrong(name, ", ".join(HF_DTYPES))
        return HF_DTYPES[value]

    def attention_dropout(self, name: str, default: float, unfused: bool = False) -> float:
        """The dropout of attention probabilities if it was asked for; `unfused` tells that the family has a path for it."""
        value = self.number(name, default)
        if value and not self.keep_attention_dropout:
            self.notes.append(f"its config asks for {name} {value:g} in attention, which is not modelled: attention runs without dropout.")
            return 0.0
        if value and not unfused:
            raise InputError(
                f"{self.where}: field '{name}' is {value}; attention dropout is supported for gpt2 and bert only. "
                "Leave out keep_attention_dropout, or set the field to 0."
            )
        return value


def _gpt2(f: _Fields) -> tuple[GptConfig, Callable[[Any, str], Model]]:
    f.only("scale_attn_weights", (True,), "true")
    f.only("scale_attn_by_inverse_layer_idx", (False,), "false")
    f.only("add_cross_attention", (False,), "false")
    dropout = f.number("resid_pdrop", 0.1)
    if f.number("embd_pdrop", 0.1) != dropout:
        raise f.not_ours("embd_pdrop", f"the same as 'resid_pdrop' ({dropout})")
    attention_dropout = f.attention_dropout("attn_pdrop", 0.1, unfused=True)
    return GptConfig(
        layers=f.size("n_layer"),
        hidden=f.size("n_embd"),
        heads=f.size("n_head"),
        seq_length=f.size("n_positions"),
        vocab=f.size("vocab_size"),
        ffn=f.size("n_inner", 4 * f.size("n_embd")),
        dropout=dropout,
        attention_dropout=attention_dropout,
        fused_attention=not attention_dropout,
        tied=f.flag("tie_word_embeddings", True),
        eps=f.number("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", "gelu_new"),
        dtype=f.dtype(),
    ), gpt


def _bert(f: _Fields) -> tuple[BertConfig, Callable[[Any, str], Model]]:
    f.only("is_decoder", (False,), "false")
    f.only("add_cross_attention", (False,), "false")
    f.only("position_embedding_type", ("absolute",), "absolute")
    f.only("tie_word_embeddings", (True,), "true: the masked-token head shares the word embedding")
    attention_dropout = f.attention_dropout("attention_probs_dropout_prob", 0.1, unfused=True)
    return BertConfig(
        layers=f.size("num_hidden_layers"),
        hidden=f.size("hidden_size"),
        heads=f.size("num_attention_heads"),
        ffn=f.size("intermediate_size"),
        vocab=f.size("vocab_size"),
        seq_length=f.size("max_position_embeddings"),
        types=f.size("type_vocab_size", 2),
        next_sentence=f.values.get("architectures") != ["BertForMaskedLM"],
        dropout=f.number("hidden_dropout_prob", 0.1),
        attention_dropout=attention_dropout,
        fused_attention=not attention_dropout,
        eps=f.number("layer_norm_eps", 1e-12),
        activation=f.activation("hidden_act", "gelu"),
        dtype=f.dtype(),
    ), bert


def _t5(f: _Fields) -> tuple[T5Config, Callable[[Any, str], Model]]:
    f.only("is_encoder_decoder", (True,), "true")
    f.attention_dropout("dropout_rate", 0.1)
    gated, activation = _t5_mlp(f)
    tied = f.flag("tie_word_embeddings", True)
    length = f.size("n_positions", 512)
    return T5Config(
        layers=f.size("num_layers"),
        dec_layers=f.size("num_decoder_layers", f.size("num_layers")),
        hidden=f.size("d_model"),
        heads=f.size("num_heads"),
        head_width=f.size("d_kv"),
        ffn=f.size("d_ff"),
        vocab=f.size("vocab_size"),
        seq_length=length,
        dec_length=length,
        buckets=f.size("relative_attention_num_buckets", 32),
        max_distance=f.size("relative_attention_max_distance", 128),
        gated=gated,
        activation=activation,
        tied=tied,
        # Since transformers 5 the files of T5 v1.1 say tied, and tell by this field that the logits are not scaled.
        scaled=f.flag("scale_decoder_outputs", tied),
        eps=f.number("layer_norm_epsilon", 1e-6),
        dropout=f.number("dropout_rate", 0.1),
        dtype=f.dtype(),
    ), t5


def _t5_mlp(f: _Fields) -> tuple[bool, str]:
    """(gated?, activation) of "relu", "gated-gelu" and the like, which newer files also say in two fields of their own."""
    text = str(f.values.get("feed_forward_proj") or "relu")
    gate, _, function = text.rpartition("-")
    if gate not in ("", "gated") or function not in HF_ACTIVATIONS:
        raise f.not_ours("feed_forward_proj", f"FUNCTION or gated-FUNCTION with one of {', '.join(HF_ACTIVATIONS)}")
    default = "gelu_new" if text == "gated-gelu" else function
    return f.flag("is_gated_act", gate == "gated"), f.activation("dense_act_fn", default)


def _llama(f: _Fields) -> tuple[LlamaConfig, Callable[[Any, str], Model]]:
    f.only("hidden_act", ("silu", "swish"), "silu")
    f.only("mlp_bias", (False,), "false")
    f.attention_dropout("attention_dropout", 0.0)
    theta, scaling = _rope(f)
    heads = f.size("num_attention_heads")
    # What transformers takes an absent number for; null means one per head.
    absent = heads if "num_key_value_heads" in f.values else {"mistral": 8, "qwen2": 32, "qwen3": 32}.get(f.kind, heads)
    all_biases = f.kind in ("llama", "qwen3") and f.flag("attention_bias", False)
    return LlamaConfig(
        layers=f.size("num_hidden_layers"),
        hidden=f.size("hidden_size"),
        heads=heads,
        kv_heads=f.size("num_key_value_heads", absent),
        ffn=f.size("intermediate_size"),
        vocab=f.size("vocab_size"),
        seq_length=f.size("max_position_embeddings"),
        head_width=f.size("head_dim", 128 if f.kind == "qwen3" else 0),
        rope_theta=theta,
        rope_scaling=scaling,
        eps=f.number("rms_norm_eps", 1e-6),
        tied=f.flag("tie_word_embeddings", False),
        qkv_bias=all_biases or f.kind == "qwen2",
        out_bias=all_biases,
        qk_norm=f.kind == "qwen3",
        window=_window(f),
        dtype=f.dtype(),
    ), llama


def _rope(f: _Fields) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5), or from `rope_theta` and `rope_scaling` before it."""
    name = "rope_scaling" if f.values.get("rope_scaling") else "rope_parameters"
    found = f.values.get(name) or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise f.not_ours(name, "one set of parameters for all layers")
    inner = _Fields({**f.values, **found}, f"{f.where}: {name}", f.kind, False)
    kind = str(found.get("rope_type") or found.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise f.not_ours(name, ", ".join(_ROPE_TYPES), f"has rope_type {kind!r}")
    inner.only("partial_rotary_factor", (1,), "1: all of a head is rotated")
    theta = inner.number("rope_theta", 10000.0)
    missing = [part for part in _ROPE_TYPES[kind] if found.get(part) is None]
    if missing:
        raise InputError(f"{f.where}: field '{name}' has rope_type {kind!r} but no {', '.join(missing)}.")
    if kind == "default":
        return theta, None
    scaling: dict[str, Any] = {"rope_type": kind, **{part: inner.number(part, 1.0) for part in _ROPE_TYPES[kind]}}
    if kind == "llama3":
        scaling["original_max_position_embeddings"] = inner.size("original_max_position_embeddings", f.size("max_position_embeddings"))
    return theta, scaling


def _window(f: _Fields) -> int:
    """The attention window that all layers share; 0 without one."""
    # Absent it means 4096 to transformers, null means none.
    window = f.size("sliding_window", 0 if "sliding_window" in f.values else 4096)
    if f.kind == "mistral":
        return window
    if f.kind == "llama" or not f.flag("use_sliding_window", False):
        return 0
    layers, first = f.size("num_hidden_layers"), f.number("max_window_layers", 28)
    kinds = f.values.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if not window or set(kinds) == {"full_attention"}:
        return 0
    if set(kinds) != {"sliding_attention"}:
        raise f.not_ours("layer_types" if f.values.get("layer_types") else "max_window_layers", "a window in all layers or in none")
    return window


_READERS: dict[str, Callable[[_Fields], tuple[Any, Callable[[Any, str], Model]]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "t5": _t5,
}

_HEADS = {
    "bert": ("BertForPreTraining", "BertForMaskedLM"),
    "gpt2": ("GPT2LMHeadModel",),
    "llama": ("LlamaForCausalLM",),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    "t5": ("T5ForConditionalGeneration",),
}
"""What transformers calls the models that ours are."""
