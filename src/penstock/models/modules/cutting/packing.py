"""Samples that lie end to end in one row: attention kept inside each, whoever wrote it, and dropout that no placement changes.

A module of transformers gets an attention function of ours, which makes no mask. Elsewhere `scaled_dot_product_attention` without a mask is
called once for each sample. Whether that is all a module needs is tried out: two samples together against each alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from penstock.errors import InputError
from penstock.models.modules.cutting.absent import Absent
from penstock.models.modules.cutting.seen import Loss, SeenMicroBatch
from penstock.models.modules.cutting.shaken import shaken
from penstock.models.modules.dropout import keyed_dropout
from penstock.models.modules.init import stable_hash

__all__ = ["Keeper", "SeenDropout", "attention_dropout", "has_dropout", "keep_layers", "kept", "packs", "sample_attention"]

_CURRENT: ContextVar[SeenMicroBatch | None] = ContextVar("micro_batch", default=None)
"""What runs now; a unit that is recomputed runs with its own again."""
_LENGTHS = 9, 14
"""Of the two samples that are tried."""
_LONGER = 41, 70
"""Of two that are tried after them, if the module takes such: some look only far back."""
_ATTENTION_DROPOUT = "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"
"""What configs of transformers call it."""
_WIDEST = 256
"""Head that flash attention takes."""
_DROPOUT_OF_HEADS = 10
"""Its place among the arguments of torch's `multi_head_attention_forward`."""
_UNSAID: Any = object()
"""No window was spoken of, which is not the same as `None`: a layer that looks at the whole sample."""
_CHUNKED, _WINDOWED = "chunked_attention", "sliding_attention"
"""Kinds of layers, as configs of transformers name them."""


class Keeper:
    """Calls torch for a module that runs on a micro-batch: attention stays inside samples, and dropout is keyed by sample and place.

    Attention itself drops nothing: which of its probabilities would be, no cut and no packing could leave as it is.
    """

    def __init__(self, micro_batch: SeenMicroBatch) -> None:
        self._micro_batch = micro_batch

    def __call__(self, func: Any, args: Any, kwargs: Any, place: object) -> Any:
        """`func(*args, **kwargs)`, the call numbered `place` of the module's pass."""
        if func is F.scaled_dot_product_attention:
            args, kwargs = _without_dropout(args, kwargs, 4)
        elif func is F.multi_head_attention_forward:
            args, kwargs = _without_dropout(args, kwargs, _DROPOUT_OF_HEADS)
        if func is F.scaled_dot_product_attention and self._lies_packed(args, kwargs):
            pieces = self._micro_batch.bounds
            parts = [[x[..., a:b, :] for x in args[:3]] for a, b in pieces]
            return torch.cat([func(*part, *args[3:], **kwargs) for part in parts], -2)
        if func is F.dropout:
            return self._dropped(func, args, kwargs, place)
        return func(*args, **kwargs)

    def _lies_packed(self, args: Any, kwargs: Any) -> bool:
        """Whether attention is asked for over all samples at once; one with a mask of its own is left alone."""
        bounds = self._micro_batch.bounds
        has_mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None) is not None
        if len(bounds) < 2 or has_mask or len(args) < 3 or isinstance(args[0], Absent) or args[0].is_meta:
            return False
        return bool(args[0].shape[-2] == args[1].shape[-2] == bounds[-1][1])

    def _dropped(self, func: Any, args: Any, kwargs: Any, place: object) -> Any:
        x, keys = args[0], self._keys(args[0])
        if self._is_attention(x, keys):
            return x
        probability, training = _drops(args, kwargs)
        if not training or not probability or keys is None or isinstance(x, Absent) or x.is_meta:
            return func(*args, **kwargs)
        key = stable_hash(self._micro_batch.key, place)
        return keyed_dropout(x.reshape(-1, x.shape[-1]), keys, probability, key).view(x.shape)

    def _is_attention(self, x: torch.Tensor, keys: torch.Tensor | None) -> bool:
        """Whether these are probabilities (…, queries, keys) and not rows of tokens."""
        lengths = {side.shape[-1] for side in (self._micro_batch.ids, self._micro_batch.decoder_ids) if side is not None and side.ndim == 2}
        return x.ndim > 2 and (x.ndim > 3 or keys is None) and {*x.shape[-2:]} <= lengths

    def _keys(self, x: torch.Tensor) -> torch.Tensor | None:
        """Of the side whose positions a tensor has; where it may be either, the keys are the same."""
        both = self._micro_batch.keys, self._micro_batch.dec_keys
        return next((keys for keys in both if keys is not None and keys.numel() == x.shape[:-1].numel()), None)


def _drops(args: Any, kwargs: Any) -> tuple[float, bool]:
    """How much a call of `functional.dropout` drops, and whether it does."""
    return kwargs.get("p", args[1] if len(args) > 1 else 0.5), kwargs.get("training", args[2] if len(args) > 2 else True)


def _without_dropout(args: Any, kwargs: Any, at: int) -> tuple[Any, Any]:
    """The arguments of a call with `dropout_p`, its argument `at` or named, as zero."""
    named = {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
    return (*args[:at], *(0.0 for _ in args[at : at + 1]), *args[at + 1 :]), {**kwargs, **named}


@contextmanager
def kept(micro_batch: SeenMicroBatch) -> Iterator[None]:
    """Attention functions of ours find the micro-batch meanwhile."""
    token = _CURRENT.set(micro_batch)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def has_dropout(module: nn.Module) -> bool:
    """Whether a module drops anything, as far as it can be seen from outside."""
    config = getattr(module, "config", None)
    named = vars(config) if hasattr(config, "model_type") else {}
    in_config = any(isinstance(value, float) and value > 0 and ("dropout" in name or "pdrop" in name) for name, value in named.items())
    return in_config or attention_dropout(module) > 0 or any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())


class SeenDropout(TorchFunctionMode):
    """Notices dropout that no part of a module stands for: of modules that call `functional.dropout` themselves."""

    drops = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            probability, training = _drops(args, kwargs)
            self.drops |= bool(probability and training)
        return func(*args, **kwargs)


def attention_dropout(module: nn.Module) -> float:
    """The largest share of attention's probabilities that a module asks to be dropped, as far as it can be seen from outside."""
    config = getattr(module, "config", None)
    values = [getattr(config, name, 0.0) for name in _ATTENTION_DROPOUT if hasattr(config, "model_type")]
    parts = (part for part in module.modules() if "Attention" in type(part).__name__)
    values += [value for part in parts for name, value in vars(part).items() if "drop" in name]
    return max((float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)), default=0.0)


def keep_layers(module: nn.Module) -> tuple[str, ...]:
    """Turns LayerDrop off, which skips layers by chance: stages must agree on what runs. A note if there was any."""
    holders = {id(one): one for part in module.modules() for one in (part, getattr(part, "config", None)) if hasattr(one, "__dict__")}
    found = [
        (one, name, value) for one in holders.values() for name, value in vars(one).items()
        if name.endswith("layerdrop") and isinstance(value, (int, float)) and value > 0
    ]  # fmt: skip
    for one, name, _ in found:
        setattr(one, name, 0.0)
    largest = max((value for _, _, value in found), default=0.0)
    return (f"layerdrop of {largest:g} is left out: every layer runs for every micro-batch.",) if found else ()


def sample_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, scaling: float | None = None,
    dropout: float = 0.0, sliding_window: int | None = _UNSAID, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention as transformers calls it, (rows, heads, length, width): inside each sample, without a mask that somebody made."""
    if attention_mask is not None:  # models are told to make none
        raise InputError(
            f"{type(module).__name__} makes a mask of its own, which attention that stays inside samples would not see. Make the model in "
            "a file of your own (module:net.py:make), where its attention stays as it is."
        )
    micro_batch = _CURRENT.get()
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window, chunk = _reach(module, sliding_window)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    is_plain = softcap is None and s_aux is None and (causal or not window)
    is_plain &= chunk is None or micro_batch is None or micro_batch.longest <= chunk
    if is_plain and micro_batch is not None and micro_batch.edges is not None and _is_for_kernel(query):
        return _at_once(query, key, value, micro_batch.edges, micro_batch.longest, scaling, causal, window), None
    bounds = micro_batch.bounds if micro_batch is not None and micro_batch.bounds else ((0, query.shape[2]),)
    padding = None if micro_batch is None or causal or micro_batch.mask is None else micro_batch.mask.bool()
    parts = [
        _attended(*(x[:, :, a:b] for x in (query, key, value)), scaling, causal, window, chunk, softcap, s_aux, padding) for a, b in bounds
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).transpose(1, 2).contiguous(), None


def _reach(module: Any, said: Any) -> tuple[int | None, int | None]:
    """The window of a layer, and the chunks that it stays in: what the layer says, else what its config says of layers of that kind."""
    config, place = getattr(module, "config", None), getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None) or ()
    kind = kinds[place] if isinstance(place, int) and place < len(kinds) else None
    chunk = getattr(config, "attention_chunk_size", None) if kind == _CHUNKED else None
    if said is _UNSAID:
        in_config = getattr(config, "sliding_window", None) if kind in (None, _WINDOWED) else None
        said = getattr(module, "sliding_window", in_config)
    return said, chunk


def _is_for_kernel(query: torch.Tensor) -> bool:
    """Whether torch's kernel for samples end to end takes this, and gives the same bits every time where that is asked for."""
    is_half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if not is_half or query.shape[-1] % 8 or query.shape[-1] > _WIDEST or torch.are_deterministic_algorithms_enabled():
        return False
    return _has_windows()


@functools.cache
def _has_windows() -> bool:
    """Whether this release of torch has the kernel with a scale and a window of one's own."""
    from torch.nn.attention.varlen import varlen_attn

    return {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()


def _at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: torch.Tensor, longest: int, scaling: float | None, causal: bool,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """All samples of one row in one call, which a GPU's host issues as fast as it would one sample: (rows, length, heads, width)."""
    from torch.nn.attention.varlen import varlen_attn

    tokens = (x[0].transpose(0, 1) for x in (query, key, value))
    seen = (window - 1 if window else -1, 0 if causal else -1)
    return varlen_attn(*tokens, edges, edges, longest, longest, scale=scaling, window_size=seen)[None]


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, causal: bool, window: int | None, chunk: int | None,
    softcap: float | None, sinks: torch.Tensor | None, padding: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """One sample, or rows of them; `padding` is true where a row has a token."""
    length = q.shape[2]
    windowed, chunked = bool(window and length > window), bool(chunk and length > chunk)
    if softcap is None and sinks is None and not windowed and not chunked and padding is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1, scale=scaling)
    at = torch.arange(length, device=q.device)
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device)
    if causal:
        seen &= at[:, None] >= at
    if windowed and window is not None:
        seen &= (at[:, None] - at).abs() < window
    if chunked and chunk is not None:
        seen &= at[:, None] // chunk == at // chunk
    allowed = seen if padding is None else seen & (padding[:, None, None, :] | torch.eye(length, dtype=torch.bool, device=q.device))
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scaling)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v
    both = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)], -1)
    return torch.softmax(both - both.amax(-1, keepdim=True), -1)[..., :-1] @ v


class _Calls(TorchFunctionMode):
    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.keeper(func, args, kwargs or {}, 0)


@torch.no_grad()
def packs(module: nn.Module, loss: Loss, vocab: int, stays_inside: bool = False) -> tuple[bool, bool]:
    """Whether the loss of two samples is the sum of each one's: in padded rows, and end to end. The module needs its weights.

    `stays_inside`: its attention is ours already, and nobody will call torch for it.
    """
    training = module.training
    module.eval()
    try:
        with shaken(module):
            padded, packed = _adds_up(module, loss, vocab, stays_inside, _LENGTHS)
            if packed:
                with suppress(RuntimeError, ValueError, IndexError):  # longer than any that the module takes
                    packed = _adds_up(module, loss, vocab, stays_inside, _LONGER)[1]
    finally:
        module.train(training)
    return padded, packed


def _adds_up(module: nn.Module, loss: Loss, vocab: int, stays_inside: bool, lengths: tuple[int, int]) -> tuple[bool, bool]:
    """The same of two samples of these lengths."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(1, vocab, (2, length), generator=generator) for length in lengths]
    if (masked := getattr(getattr(module, "config", None), "mask_token_id", None)) is not None:  # ESM weighs by how many there are
        drawn[1][:, 3] = min(int(masked), vocab - 1)
    weights = [torch.rand(length, generator=generator) for length in lengths]

    def micro_batch(rows: list[list[int]], width: int) -> SeenMicroBatch:
        ids, labels, places, mask = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(4))
        parts = torch.zeros(len(rows), width)
        bounds, at = [], 0
        for row, samples in enumerate(rows):
            at = 0
            for sample in samples:
                length = lengths[sample]
                here = slice(at, at + length)
                ids[row, here], labels[row, here] = drawn[sample]
                parts[row, here], places[row, here], mask[row, here] = weights[sample], torch.arange(length), 1
                bounds.append((at, at + length))
                at += length
        together = len(rows) == 1 and len(rows[0]) > 1
        full = bool(mask.all())
        return SeenMicroBatch(ids, labels, parts, places, None if full else mask, tuple(bounds) if together else ())

    def of(one: SeenMicroBatch) -> float:
        with kept(one), nullcontext() if stays_inside else _Calls(Keeper(one)):
            return loss(module, one).item()

    alone = sum(of(micro_batch([[sample]], lengths[sample])) for sample in (0, 1))
    padded = of(micro_batch([[0], [1]], max(lengths)))
    try:
        packed = of(micro_batch([[0, 1]], sum(lengths)))
    except (RuntimeError, ValueError, IndexError):  # a row of many samples is longer than any that the module takes
        packed = float("nan")
    return abs(padded - alone) <= 1e-5 * abs(alone), abs(packed - alone) <= 1e-5 * abs(alone)
