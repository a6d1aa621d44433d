"""Weights of Hugging Face checkpoints in our ops and back: which names belong to which parameter, and how they are combined."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InputError, near_misses
from penstock.files import read_json, readable_file
from penstock.models.modules.base import OpModule
from penstock.models.modules.build import Chain, build_op
from penstock.models.ops import Model, PlacedOp

__all__ = ["HF_FILES", "HfState", "HfWeight", "Safetensors", "export_hf_weights", "hf_names", "load_hf_weights", "read_safetensors"]

HF_FILES = ("model.safetensors", "model.safetensors.index.json")
"""What a folder of weights has one of."""


@dataclass(frozen=True)
class HfWeight:
    """What one of our parameters is called in a Hugging Face state."""

    names: tuple[str, ...]
    """Laid one below another they form our parameter (q, k and v; gate and up)."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each name, as Hugging Face stores it."""
    transposed: bool = False
    """GPT-2 stores its matrices as (inputs, outputs)."""
    copies: tuple[str, ...] = ()
    """Further names of the same weight."""

    def combine(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """Our parameter from the tensors of `names`."""
        parts = [tensor.t() if self.transposed else tensor for tensor in tensors]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def divide(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of `names` from our parameter, each with memory of its own."""
        if self.transposed:
            return [whole.t().clone(memory_format=torch.contiguous_format)]
        return [part.clone() for part in whole.split([shape[0] for shape in self.shapes])]


# "block.op" → modules whose parameters have our names (weight, bias); "block.op.parameter" → full names. {i} counts the block's copies.
_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_LLAMA = {
    "embedding.embedding": ("model.embed_tokens",),
    "layers.norm1": ("model.layers.{i}.input_layernorm",),
    "layers.qkv": tuple(f"{_ATTENTION}{x}_proj" for x in "qkv"),
    "layers.attention.q_norm": (f"{_ATTENTION}q_norm.weight",),
    "layers.attention.k_norm": (f"{_ATTENTION}k_norm.weight",),
    "layers.out": (f"{_ATTENTION}o_proj",),
    "layers.norm2": ("model.layers.{i}.post_attention_layernorm",),
    "layers.up": (f"{_MLP}gate_proj", f"{_MLP}up_proj"),
    "layers.down": (f"{_MLP}down_proj",),
    "head.norm": ("model.norm",),
    "head.logits": ("lm_head",),
}
_GPT = {
    "embedding.embedding": ("transformer.wte",),
    "embedding.embedding.positions": ("transformer.wpe.weight",),
    "layers.norm1": ("transformer.h.{i}.ln_1",),
    "layers.qkv": ("transformer.h.{i}.attn.c_attn",),
    "layers.out": ("transformer.h.{i}.attn.c_proj",),
    "layers.norm2": ("transformer.h.{i}.ln_2",),
    "layers.up": ("transformer.h.{i}.mlp.c_fc",),
    "layers.down": ("transformer.h.{i}.mlp.c_proj",),
    "head.norm": ("transformer.ln_f",),
    "head.logits": ("lm_head",),
}
_LAYER = "bert.encoder.layer.{i}."
_BERT = {
    "embedding.embedding": ("bert.embeddings.word_embeddings",),
    "embedding.embedding.positions": ("bert.embeddings.position_embeddings.weight",),
    "embedding.embedding.types": ("bert.embeddings.token_type_embeddings.weight",),
    "embedding.norm": ("bert.embeddings.LayerNorm",),
    "layers.qkv": tuple(f"{_LAYER}attention.self.{x}" for x in ("query", "key", "value")),
    "layers.out": (f"{_LAYER}attention.output.dense",),
    "layers.norm1": (f"{_LAYER}attention.output.LayerNorm",),
    "layers.up": (f"{_LAYER}intermediate.dense",),
    "layers.down": (f"{_LAYER}output.dense",),
    "layers.norm2": (f"{_LAYER}output.LayerNorm",),
    "head.pooler.dense": ("bert.pooler.dense.weight",),
    "head.pooler.dense_bias": ("bert.pooler.dense.bias",),
    "head.pooler.classifier": ("cls.seq_relationship.weight",),
    "head.pooler.classifier_bias": ("cls.seq_relationship.bias",),
    "head.transform": ("cls.predictions.transform.dense",),
    "head.transform_norm": ("cls.predictions.transform.LayerNorm",),
    "head.logits": ("cls.predictions.decoder",),
    "head.logits.bias": ("cls.predictions.bias",),
}


def _t5_side(side: str, mlp: int, gated: bool) -> dict[str, tuple[str, ...]]:
    """One stack of a T5: its layers hold self attention, in the decoder cross attention, and the MLP as layer number `mlp`."""
    layer = f"{side}.block.{{i}}.layer."
    attention, dense = f"{layer}0.SelfAttention.", f"{layer}{mlp}.DenseReluDense."
    return {
        f"{side}.norm1": (f"{layer}0.layer_norm",),
        f"{side}.qkv": tuple(f"{attention}{x}" for x in "qkv"),
        f"{side}.out": (f"{attention}o",),
        f"{side}.norm3": (f"{layer}{mlp}.layer_norm",),
        f"{side}.up": (f"{dense}wi_0", f"{dense}wi_1") if gated else (f"{dense}wi",),
        f"{side}.down": (f"{dense}wo",),
    }


def _t5(gated: bool) -> dict[str, tuple[str, ...]]:
    layer = "decoder.block.{i}.layer.1."
    first = "{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return {
        "embedding.embedding": ("shared",),
        "embedding.embedding.bias": (first.format(side="encoder"),),
        **_t5_side("encoder", 1, gated),
        "bridge.norm": ("encoder.final_layer_norm",),
        "bridge.embedding": ("decoder.embed_tokens",),
        "bridge.embedding.bias": (first.format(side="decoder"),),
        **_t5_side("decoder", 2, gated),
        "decoder.norm2": (f"{layer}layer_norm",),
        "decoder.cross_q": (f"{layer}EncDecAttention.q",),
        "decoder.cross_kv": (f"{layer}EncDecAttention.k", f"{layer}EncDecAttention.v"),
        "decoder.cross_out": (f"{layer}EncDecAttention.o",),
        "head.norm": ("decoder.final_layer_norm",),
        "head.logits": ("lm_head",),
    }


_COPIES = {"shared.weight": ("encoder.embed_tokens.weight",), "cls.predictions.bias": ("cls.predictions.decoder.bias",)}
_PREFIXES = {"llama": "model.", "gpt": "transformer.", "bert": "bert."}
"""What the names lack in a checkpoint of the model without its head."""
_IGNORED = re.compile(
    r"rotary_emb\.inv_freq$|\battn\.(masked_)?bias$|embeddings\.(position|token_type)_ids$"  # buffers that old checkpoints hold
    r"|^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"  # a slip of the first T5 checkpoints
)


def _table(model: Model) -> dict[str, tuple[str, ...]]:
    if model.family == "t5":
        return _t5(bool(model.config["gated"]))
    tables = {"llama": _LLAMA, "gpt": _GPT, "bert": _BERT}
    if model.family not in tables:
        raise InputError(f"model '{model.name}' is of family '{model.family}', which has no Hugging Face names. "
                         f"{near_misses(model.family, [*tables, 't5'])}")  # fmt: skip
    return tables[model.family]


def hf_names(model: Model) -> dict[str, HfWeight]:
    """For each parameter of the model ('op.parameter') its names in a Hugging Face state, and how these are combined."""
    table = _table(model)
    shapes_of = {op.signature: build_op(PlacedOp(0, op.name, "", op), device="meta").whole_shapes for op in model.distinct_ops}
    found: dict[str, HfWeight] = {}
    copies_seen: dict[tuple[str, str], int] = {}
    for placed in model.ops:
        key = (placed.block, placed.op.name)
        number = copies_seen[key] = copies_seen.get(key, -1) + 1
        for parameter, shape in shapes_of[placed.op.signature].items():
            weight = _weight(table, placed, parameter, shape, number, model.family)
            owner = f"{placed.op.tied_to}.{parameter}"
            if placed.op.tied_to and parameter == "weight":
                found[owner] = replace(found[owner], copies=(*found[owner].copies, *weight.names))
            else:
                found[f"{placed.name}.{parameter}"] = weight
    for placed in model.ops:
        if placed.op.tied_to:
            found[f"{placed.name}.weight"] = found[f"{placed.op.tied_to}.weight"]
    return found


def _weight(
    table: Mapping[str, tuple[str, ...]], placed: PlacedOp, parameter: str, shape: tuple[int, ...], number: int, family: str
) -> HfWeight:
    place = f"{placed.block}.{placed.op.name}"
    named = table.get(f"{place}.{parameter}") or tuple(f"{module}.{parameter}" for module in table[place])
    names = tuple(name.format(i=number) for name in named)
    transposed = family == "gpt" and placed.op.kind == "linear" and len(shape) == 2
    rows = placed.op.config["parts"] if len(names) > 1 else shape[:1]
    shapes = tuple(shape[::-1] if transposed else (part, *shape[1:]) for part in rows)
    return HfWeight(names, shapes, transposed, _COPIES.get(names[0], ()))


class HfState:
    """A Hugging Face state under the names of this model, whatever variant of them it uses."""

    def __init__(self, model: Model, state: Mapping[str, torch.Tensor]) -> None:
        self.model, self.weights, self.state = model, hf_names(model), state
        known = {name for weight in self.weights.values() for name in (*weight.names, *weight.copies)}
        prefix = _PREFIXES.get(model.family, "")
        self.given: dict[str, str] = {}
        unknown = []
        for name in state:
            modern = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
            canonical = modern if modern in known else prefix + modern
            if canonical in known:
                self.given[canonical] = name
            elif not _is_ignored(model, name):
                unknown.append(name)
        if unknown:
            raise InputError(f"model '{model.name}' has no place for {_listed(unknown)}. Do the weights belong to its config.json?")

    def missing(self, key: str) -> list[str]:
        """Names without which parameter `key` cannot be loaded."""
        return [name for name in self.weights[key].names if self._source(name, self.weights[key]) is None]

    def require_all(self, keys: Iterable[str]) -> None:
        """Refuses a state that lacks something of these parameters."""
        missing = list(dict.fromkeys(name for key in keys for name in self.missing(key)))
        if missing:
            raise InputError(f"the weights lack {_listed(missing)}, which model '{self.model.name}' needs.")

    def sources(self, key: str) -> list[tuple[str, tuple[int, ...]]]:
        """What parameter `key` is made of: names as the state has them, each with the shape that is expected of it."""
        weight = self.weights[key]
        found = [self._source(name, weight) for name in weight.names]
        return [(name, shape) for name, shape in zip(found, weight.shapes, strict=True) if name is not None]

    def _source(self, name: str, weight: HfWeight) -> str | None:
        return next((self.given[other] for other in (name, *weight.copies) if other in self.given), None)

    def tensor(self, key: str) -> torch.Tensor:
        """Parameter `key`, its shape and its copies checked."""
        tensors = []
        for source, shape in self.sources(key):
            tensors.append(self.state[source])
            if tuple(tensors[-1].shape) != shape:
                raise InputError(f"weight '{source}' has shape {tuple(tensors[-1].shape)}; {shape} is expected for '{key}'.")
        self.compare_copies(key)
        return self.weights[key].combine(tensors)

    def compare_copies(self, key: str) -> None:
        """Refuses names of one and the same weight whose values differ."""
        weight = self.weights[key]
        given = [self.given[name] for name in (weight.names[0], *weight.copies) if name in self.given]
        for other in given[1:]:
            if not torch.equal(self.state[other], self.state[given[0]]):
                raise InputError(
                    f"weights '{other}' and '{given[0]}' differ, but the model shares them. "
                    "If they are meant to differ, set tie_word_embeddings to false in config.json."
                )


def _is_ignored(model: Model, name: str) -> bool:
    unused_head = model.family == "bert" and not model.config["next_sentence"] and ("pooler." in name or "seq_relationship." in name)
    return unused_head or bool(_IGNORED.search(name))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def load_hf_weights(chain: Chain, model: Model, state: Mapping[str, torch.Tensor]) -> None:
    """Sets every parameter of `chain` (the model or a slice of it, divided under tp or not) from a Hugging Face state."""
    source = HfState(model, state)
    keys = [(module, name, f"{module.name}.{name}") for module, name in _parameters(chain)]
    source.require_all(key for _, _, key in keys)
    for module, name, key in keys:
        module.load(name, source.tensor(key))


def _parameters(chain: Chain) -> Iterator[tuple[OpModule, str]]:
    """(op, parameter name) of each parameter in the chain; one that two ops share comes once."""
    seen: set[int] = set()
    for module in chain.ops:
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield module, name


@torch.no_grad()
def export_hf_weights(chain: Chain, model: Model, *, copies: bool = True) -> dict[str, torch.Tensor]:
    """A copy of the chain's weights as a Hugging Face state; without `copies`, shared ones come once, as safetensors wants them."""
    weights = hf_names(model)
    state: dict[str, torch.Tensor] = {}
    for module, name in _parameters(chain):
        if module.tp.size > 1:
            raise InputError(
                f"op '{module.name}' is divided over tp={module.tp.size}; only whole weights can be exported: build with tp=1."
            )
        weight = weights[f"{module.name}.{name}"]
        parts = weight.divide(module.get_parameter(name).detach())
        state.update(zip(weight.names, parts, strict=True))
        if copies:
            state.update(dict.fromkeys(weight.copies, parts[0]))
    return state


class Safetensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read from its file only when it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files
        self._open: dict[Path, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._ask(name, lambda file: file.get_tensor(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it."""
        return tuple(self._ask(name, lambda file: file.get_slice(name).get_shape()))

    def _ask(self, name: str, question: Callable[[Any], Any]) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = _open_safetensors(path)
        try:
            return question(self._open[path])
        except Exception as error:
            raise InputError(f"weight '{name}' cannot be read from '{path}': {error}.") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    readable_file(path, "weight file")
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"weight file '{path}' cannot be read: {error}.") from None


def read_safetensors(folder: str | Path) -> Safetensors:
    """The weights of a Hugging Face folder: `model.safetensors`, or the files that `model.safetensors.index.json` names."""
    folder = Path(folder)
    single, index = (folder / name for name in HF_FILES)
    if single.is_file():
        return Safetensors(dict.fromkeys(_open_safetensors(single).keys(), single))
    if not index.is_file():
        raise InputError(
            f"folder '{folder}' holds neither {' nor '.join(HF_FILES)}. "
            "Pickled weights (pytorch_model.bin) are never read; save them with transformers' save_pretrained first."
        )
    entries = read_json(index, "weight index")
    places = entries.get("weight_map") if isinstance(entries, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) and file == Path(file).name for file in places.values()):
        raise InputError(f"weight index '{index}' has no field 'weight_map' of tensor names and file names in its own folder.")
    return Safetensors({name: folder / file for name, file in places.items()})
