"""Models of transformers as modules to be cut: made from a folder's `config.json`, with neither caches nor dropout of attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.errors import InputError
from penstock.models.modules.cutting.first_values import FirstValues, weights_made_on_meta
from penstock.models.modules.cutting.origins import Made, two_sided_example
from penstock.models.modules.cutting.packing import keep_layers, sample_attention
from penstock.models.modules.cutting.seen import SeenMicroBatch, first_position, logits_loss

__all__ = ["made_by_transformers", "pretrained_state", "save_config", "use_our_attention"]

_ATTENTION = "penstock"
_SMALL_BYTES = 2**30
"""A model below this is made with weights, exactly as transformers would make it; a larger one draws them part by part."""


def made_by_transformers(folder: str, seed: int) -> Made:
    """The model of a folder or a config file, with random weights."""
    kind, config = _class_and_config(folder)
    for one in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}) if hasattr(config, name))):
        one.use_cache = False
    with weights_made_on_meta():
        module = kind(config)
    if sum(p.numel() * 4 for p in module.parameters()) < _SMALL_BYTES:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = kind(config)
    form = _form(kind.__name__, config)
    # The decoder of an encoder-decoder looks at another sequence too; images never lie end to end, and Swin adds a bias to scores.
    ours = _chooses_attention(module) and form not in ("encoder-decoder", "images")
    if ours:
        use_our_attention(module)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = int(getattr(text, "vocab_size", 0) or 0)
    size = int(getattr(config, "image_size", 0) or 0)
    positions = next((int(n) for name in _POSITIONS if (n := getattr(text, name, None))), 0)
    return Made(
        _path(folder).resolve().name, module, logits_loss, lambda *sizes: _example(form, size, config, *sizes),
        FirstValues(module, seed, module._init_weights), form, 0 if form == "images" else vocab,
        0 if form == "images" or not positions else positions - first_position(module),
        stays_inside=ours, notes=keep_layers(module),
    )  # fmt: skip


_POSITIONS = "max_position_embeddings", "n_positions", "max_seq_len"
"""What configs call the longest sample; those of ALiBi and of recurrent models have none."""


def _chooses_attention(module: Any) -> bool:
    """Whether ours can stand for the model's attention: not where a layer chooses what is seen, for which it needs a mask."""
    chosen = any(type(part).__name__.endswith("Indexer") or hasattr(part, "prepare_dynamic_mask") for part in module.modules())
    return bool(getattr(module, "_supports_attention_backend", False)) and not chosen


def use_our_attention(module: Any) -> None:
    """Attention that stays inside samples, where the model lets attention be chosen."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if not _chooses_attention(module):
        return
    # Where samples lie is another thing in every micro-batch: it would be compiled anew for each. Said here, where a model is made, because
    # it imports torch's compiler, for which every start of a run would wait.
    AttentionInterface.register(_ATTENTION, torch.compiler.disable(sample_attention))
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    for config in {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}.values():
        config._attn_implementation = _ATTENTION


def _path(folder: str) -> Path:
    return Path(folder).parent if folder.endswith("config.json") else Path(folder)


def _class_and_config(folder: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"model 'hf:{folder}' is none of Penstock's own families, and needs transformers. Run: pip install penstock[hf]"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(str(_path(folder)))
    except (OSError, ValueError) as error:
        raise InputError(f"model 'hf:{folder}' cannot be read: {next(iter(str(error).splitlines()), '')}") from None
    named = config.architectures or []
    kind = getattr(transformers, named[0], None) if named else transformers.AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None:
        raise InputError(f"model 'hf:{folder}' is a {', '.join(named) or config.model_type}, which transformers {transformers.__version__} "
                         "does not have. Use a newer one.")  # fmt: skip
    return kind, config


def pretrained_state(folder: str) -> dict[str, torch.Tensor]:
    """The weights of a folder under the names that the model has for them, as transformers reads them."""
    kind, _ = _class_and_config(folder)
    return dict(kind.from_pretrained(str(_path(folder))).state_dict())


def save_config(folder: str, out: Path, dtype: torch.dtype) -> None:
    """Writes the model's config beside exported weights."""
    kind, config = _class_and_config(folder)
    config.architectures, config.dtype = [kind.__name__], dtype
    config.save_pretrained(str(out))


def _form(name: str, config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    if name.endswith("ForImageClassification"):
        return "images"
    return "masked" if name.endswith("ForMaskedLM") else "decoder"


def _example(form: str, size: int, config: Any, samples: int, length: int, dec_length: int = 0) -> SeenMicroBatch:
    if form == "encoder-decoder":
        return two_sided_example(samples, length, dec_length)
    if form == "images":
        images = torch.zeros(samples, getattr(config, "num_channels", 3), size, size)
        return SeenMicroBatch(images, torch.zeros(samples, dtype=torch.long), torch.full((samples,), 1.0 / samples))
    ids = torch.ones(samples, length, dtype=torch.long)
    return SeenMicroBatch(ids, ids, torch.full(ids.shape, 1.0 / ids.numel()), torch.arange(length).expand(ids.shape))
