"""Where somebody's module comes from, `module:FILE.py:FUNCTION` or `hf:FOLDER`, and all that its training needs to know of it."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError, PenstockError, near_misses
from penstock.files import readable_file
from penstock.models.modules.cutting.first_values import FirstValues
from penstock.models.modules.cutting.packing import keep_layers
from penstock.models.modules.cutting.seen import Loss, SeenMicroBatch, logits_loss

__all__ = [
    "FORM_OF_SOURCE", "Made", "call_function", "load_function", "made_of", "make_origin", "origin_file", "parse_origin",
    "two_sided_example",
]  # fmt: skip

FORM_OF_SOURCE = "module:PATH.py:FUNCTION"
_TINY = 2, 8
"""Samples and length of the micro-batch on which the order of calls is found."""
_WRAPPERS = {
    "OptimizedModule": "without torch.compile; `parallelize(…, compile=True)` compiles its parts", "DataParallel": "its `.module`",
    "DistributedDataParallel": "its `.module`", "FullyShardedDataParallel": "its `.module`",
}  # fmt: skip
"""Of torch: what divides or compiles a module as a whole, and where the module is."""


@dataclass(frozen=True)
class Made:
    """A module, and how it is trained."""

    name: str
    module: nn.Module
    loss: Loss
    example: Callable[..., SeenMicroBatch]
    """A micro-batch of so many samples of such a length; of an encoder and a decoder two lengths, if they are to differ."""
    values: FirstValues
    form: str = "decoder"
    """How samples enter it, as `data.forms` names it."""
    vocab: int = 0
    positions: int = 0
    """The longest sample that it takes; 0: not known."""
    tp_plan: Mapping[str, str] | None = None
    """How tensor parallelism divides it, where not its own attribute of that name says so."""
    stays_inside: bool = False
    """Whether its attention stays inside samples by itself: it is ours."""
    notes: tuple[str, ...] = ()
    """What it trains without, though it was asked for."""

    def tiny(self) -> SeenMicroBatch:
        """A micro-batch to trace with."""
        return self.example(*_TINY)


def make_origin(text: str, *, seed: int = 0) -> Made:
    """The module of a text, with first weights that `seed` decides."""
    if text.startswith("hf:"):
        from penstock.models.modules.cutting.transformers_models import made_by_transformers

        return made_by_transformers(text.removeprefix("hf:"), seed)
    path, function = parse_origin(text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = call_function(load_function(path, function), text)
    return made_of(*made, name=function, seed=seed)


def origin_file(text: str) -> Path:
    """The file that decides what a text makes: the module's, or the config of a model of transformers."""
    if not text.startswith("hf:"):
        return parse_origin(text)[0]
    path = Path(text.removeprefix("hf:"))
    return path if path.suffix == ".json" else path / "config.json"


def parse_origin(source: str) -> tuple[Path, str]:
    """The file and the function of `module:PATH.py:FUNCTION`."""
    file, _, function = source.partition(":")[2].rpartition(":")
    if not file or not function.isidentifier():
        raise InputError(f"SOURCE is '{source}'; {FORM_OF_SOURCE} was expected, as in module:net.py:make.")
    path = readable_file(file, "SOURCE: file")
    if path.suffix != ".py":
        raise InputError(f"SOURCE is '{source}': '{file}' is not a Python file (.py).")
    return path, function


def load_function(path: Path, function: str) -> Callable[[], Any]:
    """The function of a file, whose neighbours it may import."""
    spec = importlib.util.spec_from_file_location(f"penstock_imported_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their own module up
    sys.path.insert(0, str(path.parent.resolve()))
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a user's folder stays as it was
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise InputError(f"file '{path}' cannot be imported: {type(error).__name__}: {error}.") from error
    finally:
        sys.path.pop(0)
        sys.dont_write_bytecode = before
    found = getattr(module, function, None)
    if not callable(found):
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise InputError(f"file '{path}' has no function '{function}'. {near_misses(function, names) if names else 'It has none at all.'}")
    return found  # type: ignore[no-any-return]


def call_function(function: Callable[[], Any], source: str) -> tuple[nn.Module, Any, Loss | None]:
    """What the function returns: a module, an example of its inputs, and, where it brings one, its loss. A module with an embedding may
    come alone: it reads token ids."""
    try:
        made = function()
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"the function of '{source}' failed: {type(error).__name__}: {error}.") from error
    if isinstance(made, nn.Module) and any(isinstance(part, nn.Embedding) for part in made.modules()):
        return made, _token_ids, None
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        return made[0], made[1], made[2] if len(made) == 3 else None
    raise InputError(
        f"the function of '{source}' returned {_describe(made)}; (torch module, example inputs) was expected, and perhaps its loss behind. "
        "A module with an embedding, which reads token ids, may come alone."
    )


def _token_ids(samples: int, length: int) -> tuple[torch.Tensor]:
    return (torch.zeros(samples, length, dtype=torch.long),)


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(part).__name__ for part in value)})"
    return f"a {type(value).__name__}"


def made_of(module: nn.Module, example: Any = None, loss: Loss | None = None, *, name: str = "", seed: int = 0) -> Made:
    """A module in memory, ready to be trained. `example` is what `trace_module` takes; without one it is taken to read token ids."""
    if (kind := type(module).__name__) in _WRAPPERS:
        raise InputError(f"the module is wrapped as {kind}. Give the module that it wraps ({_WRAPPERS[kind]}): Penstock divides it itself.")
    vocab = next((part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)), 0)
    first = _first_input(example, vocab, name or type(module).__name__)
    images, notes = first(*_TINY).is_floating_point(), keep_layers(module)
    if not images and "decoder_input_ids" in inspect.signature(module.forward).parameters:
        return Made(name or type(module).__name__, module, loss or logits_loss, two_sided_example, FirstValues(module, seed),
                    "encoder-decoder", vocab, notes=notes)  # fmt: skip
    return Made(
        name or type(module).__name__, module, loss or logits_loss, lambda samples, length: _micro_batch(first(samples, length)),
        FirstValues(module, seed), "images" if images else "decoder", 0 if images else vocab, notes=notes,
    )  # fmt: skip


def two_sided_example(samples: int, length: int, dec_length: int = 0) -> SeenMicroBatch:
    """A micro-batch of source and target."""
    ids, targets = (torch.ones(samples, size, dtype=torch.long) for size in (length, dec_length or length))
    return SeenMicroBatch(ids, targets, torch.full(targets.shape, 1.0 / targets.numel()), torch.arange(length).expand(ids.shape), ids,
                          decoder_ids=targets, decoder_mask=targets)  # fmt: skip


def _first_input(example: Any, vocab: int, name: str) -> Callable[[int, int], torch.Tensor]:
    """A function from (samples, length) to the ids or images of an example."""
    if example is None:
        if not vocab:
            raise InputError(f"{name} has no embedding, so that its inputs are not token ids. Give an example of its inputs.")
        return lambda samples, length: torch.zeros(samples, length, dtype=torch.long)
    if callable(example) and not isinstance(example, torch.Tensor):

        def ask(samples: int, length: int) -> torch.Tensor:
            given = example(samples, length)
            return _lead(list(given.values()) if isinstance(given, Mapping) else given, name)

        return ask
    lead = _lead(example, name)
    if lead.is_floating_point():
        return lambda samples, length: torch.zeros(samples, *lead.shape[1:], dtype=lead.dtype)
    return lambda samples, length: torch.zeros(samples, length, dtype=torch.long)


def _lead(given: Any, name: str) -> torch.Tensor:
    first = next(iter(given)) if isinstance(given, tuple | list) and given else given
    if not isinstance(first, torch.Tensor):
        raise InputError(f"the example inputs of {name} begin with a {type(first).__name__}; a tensor of ids or images was expected.")
    return first


def _micro_batch(first: torch.Tensor) -> SeenMicroBatch:
    if first.is_floating_point():
        return SeenMicroBatch(first, torch.zeros(len(first), dtype=torch.long), torch.full((len(first),), 1.0 / len(first)))
    weights = torch.full(first.shape, 1.0 / first.numel())
    positions = torch.arange(first.shape[1]).expand(first.shape)
    return SeenMicroBatch(first, torch.zeros_like(first), weights, positions)


