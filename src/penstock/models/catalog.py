"""Finding a model by name, by a YAML file of a family's sizes, by a Hugging Face config, or by a traced description."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import InputError, PenstockError, near_misses
from penstock.files import read_json, read_yaml, short_repr
from penstock.models.config import MAX_LAYERS, config_from_mapping
from penstock.models.ops import ITEM_BYTES, Model

__all__ = ["FAMILIES", "TRACED", "model_from_mapping", "model_names", "resolve_model"]


@dataclass(frozen=True)
class Family:
    """Where a family lives: its module, the table of named sizes, its configuration class and its builder."""

    module: str
    sizes: str
    config: str
    build: str

    def parts(self) -> tuple[Mapping[str, Any], type, Callable[[Any, str], Model]]:
        """The three things themselves; the module is imported only now."""
        module = importlib.import_module(self.module)
        return getattr(module, self.sizes), getattr(module, self.config), getattr(module, self.build)


FAMILIES = {
    "gpt": Family("penstock.models.gpt", "GPT_SIZES", "GptConfig", "gpt"),
    "llama": Family("penstock.models.llama", "LLAMA_SIZES", "LlamaConfig", "llama"),
    "bert": Family("penstock.models.bert", "BERT_SIZES", "BertConfig", "bert"),
    "t5": Family("penstock.models.t5", "T5_SIZES", "T5Config", "t5"),
    "resnet": Family("penstock.models.resnet", "RESNET_SIZES", "ResNetConfig", "resnet"),
    "vgg": Family("penstock.models.vgg", "VGG_SIZES", "VggConfig", "vgg"),
}


TRACED = "traced"
"""The family of models that are somebody's modules: their ops are units of it, and a plan has the whole description."""


def model_names() -> dict[str, str]:
    """Every named size and its family."""
    return {size: name for name, family in FAMILIES.items() for size in family.parts()[0]}


def resolve_model(text: str) -> Model:
    """The model meant by a name (`gpt-1.3b`), a file (`mine.yaml`, `traced.json`), `hf:PATH/config.json` or `module:FILE.py:FUNCTION`;
    `transformers:PATH` is the module that transformers has, of a family of ours too."""
    if text.startswith("hf:"):
        return _hugging_face(text)
    if text.startswith(("module:", "transformers:")):
        return _described(text.replace("transformers:", "hf:", 1))
    if text.endswith((".yaml", ".yml")):
        return model_from_mapping(read_yaml(text, "model file"), f"model file '{text}'", Path(text).stem)
    if text.endswith(".json"):
        return _from_json(text)
    return _named(text)


def _from_json(file: str) -> Model:
    from penstock.models.description import model_from_description

    values = read_json(file, "model description")
    if isinstance(values, dict) and "model_type" in values:
        raise InputError(f"model '{file}' is a Hugging Face config. Give it as hf:{file}")
    return model_from_description(values, f"model description '{file}'")


def _hugging_face(text: str) -> Model:
    """A family of ours where it is one; otherwise the model as transformers has it, cut into the parts that it is made of."""
    from penstock.models.huggingface import NotOurs, model_from_hf

    try:
        return model_from_hf(text.removeprefix("hf:"))
    except NotOurs as unknown:
        if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
            raise
        try:
            found = _described(text)
            return replace(found, notes=(*found.notes, *unknown.notes))
        except InputError as error:
            raise InputError(f"{unknown} As transformers has it: {error}") from error.__cause__


def _described(text: str) -> Model:
    """Somebody's module, which is made and run to be described: whatever it raises is told as what is wrong with it."""
    from penstock.models.huggingface import named_dtype
    from penstock.models.modules.cutting.describing import describe_origin

    dtype = named_dtype(text.removeprefix("hf:")) if text.startswith("hf:") else ""
    try:
        return replace(describe_origin(text, dtype), open_dtype=False) if dtype else describe_origin(text)
    except PenstockError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise InputError(f"model '{text}' fails where it is made or tried on two samples: {type(error).__name__}: {first}") from error


def _named(name: str) -> Model:
    names = model_names()
    if name not in names:
        raise InputError(
            f"unknown model '{name}'. {near_misses(name, names)} A YAML file of sizes or hf:PATH/config.json works too."
        )
    sizes, _, build = FAMILIES[names[name]].parts()
    return build(sizes[name], name)


def model_from_mapping(values: Any, where: str, name: str) -> Model:
    """A model from `family:` (or `base:`, a named size to start from) and the fields that differ."""
    if not isinstance(values, dict):
        raise InputError(f"{where}: expected fields such as 'family: gpt', got {type(values).__name__}.")
    if values.get("family") == TRACED:
        from penstock.models.description import model_from_description

        return model_from_description(values.get("description"), f"{where}: field 'description'")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    name, base, family = str(fields.pop("name", name)), fields.pop("base", None), fields.pop("family", None)
    names = model_names()
    if base is not None and (not isinstance(base, str) or base not in names):
        raise InputError(f"{where}: field 'base' is {base!r}. {near_misses(str(base), names)}")
    family = family or (names[base] if base else None)
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{where}: field 'family' is {family!r}. {near_misses(str(family), FAMILIES)}")
    if base is not None and names[base] != family:
        raise InputError(f"{where}: field 'base' is {base!r}, which is of family '{names[base]}', but field 'family' is {family!r}.")
    sizes, kind, build = FAMILIES[family].parts()
    start = {} if base is None else vars(sizes[base])
    config: Any = config_from_mapping(kind, {**start, **fields}, where)
    _check_sizes(config, where)
    return build(config, name)


def _check_sizes(config: Any, where: str) -> None:
    """Refuses sizes that make no model."""
    for name in ("layers", "hidden", "heads", "kv_heads", "vocab", "seq_length", "head_width"):
        optional = name == "head_width"
        if getattr(config, name, 1) < (0 if optional else 1):
            raise InputError(f"{where}: field '{name}' is {getattr(config, name)}; expected at least 1.")
    for name in ("layers", "dec_layers", "blocks", "convs"):
        value = getattr(config, name, 0)
        if (sum(value) if isinstance(value, tuple) else value) > MAX_LAYERS:
            raise InputError(f"{where}: field '{name}' is {short_repr(value)}; expected at most {MAX_LAYERS} in all.")
    if config.dtype not in ITEM_BYTES or config.dtype == "int64":
        raise InputError(f"{where}: field 'dtype' is {config.dtype!r}; expected bf16, fp16 or fp32.")
