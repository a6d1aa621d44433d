"""Tensor parallelism of somebody's module: which of its parts are divided, as a `tp_plan` of transformers says it.

    style                             weight       enters                leaves
    colwise                           rows         whole                 its own columns
    colwise_gather_output             rows         whole                 whole
    rowwise                           columns      its own columns       whole: a sum over ranks
    rowwise_split_input               columns      whole                 whole: a sum over ranks
    embedding_rowwise                 vocabulary   ids                   whole: a sum over ranks
    replicated_with_grad_allreduce    whole        its own heads         its own heads; the gradient is a sum over ranks

Parts that a plan does not name are whole on every rank, and so are those of styles that are not here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn import functional as F

from penstock.errors import InputError
from penstock.models.modules.parallel import TensorParallel, copy_to, gather, reduce_from, slice_to

__all__ = ["Division", "Styles", "divided_weights", "styles_of", "tp_plan_of", "whole_degrees"]

Styles = dict[str, str]
"""By the path of a part."""
_ALIASES = {"colwise_rep": "colwise_gather_output"}
_LINEAR = {"colwise": 0, "colwise_gather_output": 0, "rowwise": 1, "rowwise_split_input": 1}
"""The dimension of a linear part's weight that is divided."""
_VOCABULARY = "embedding_rowwise"
_SUMMED = "replicated_with_grad_allreduce"


def divided_weights(part: str, style: str) -> dict[str, int]:
    """Weights of a part (its name in a unit, perhaps empty) that ranks have parts of, and the dimension."""
    at = f"{part}." if part else ""
    if style == _VOCABULARY:
        return {f"{at}weight": 0}
    if style not in _LINEAR:
        return {}
    return {f"{at}weight": 1} if _LINEAR[style] else {f"{at}weight": 0, f"{at}bias": 0}


def tp_plan_of(module: nn.Module) -> tuple[Mapping[str, str], bool]:
    """The plan that a module brings, as models of transformers do; whether somebody wrote it for this very module."""
    found = getattr(module, "tp_plan", None)
    return (found, not hasattr(module, "supports_tp_plan")) if isinstance(found, Mapping) else ({}, False)


def styles_of(module: nn.Module, plan: Mapping[str, str], *, strict: bool) -> tuple[Styles, tuple[str, ...]]:
    """The parts that a plan divides, and names of the plan for which parts stay whole. With `strict` a name must mean a part."""
    parts = dict(module.named_modules())
    weights = [name for name, _ in module.named_parameters()]
    found: Styles = {}
    whole = []
    for name, asked in plan.items():
        style = _ALIASES.get(asked, asked)
        pattern = re.compile(re.escape(name).replace(r"\*", "[^.]+"))
        meant = {path: fitting for path, part in parts.items() if pattern.fullmatch(path) and (fitting := _fitting(part, style))}
        if strict and not meant:
            raise InputError(f"tp_plan names '{name}': {_unknown(style, any(map(pattern.fullmatch, parts)), type(module).__name__)}")
        if not meant and any(pattern.match(path) for path in (*parts, *weights)):
            whole.append(name)
        found |= meant
    return _without_conflicts(module, found), tuple(whole)


def _unknown(style: str, is_part: bool, name: str) -> str:
    if not is_part:
        return f"no part of {name} is called so."
    return f"'{style}' is none of {', '.join([*_LINEAR, _VOCABULARY, _SUMMED])}, or does not fit that part (nn.Linear, nn.Embedding)."


def _fitting(part: nn.Module, style: str) -> str:
    """The style in which a part can be divided; empty where it cannot."""
    if isinstance(part, nn.Embedding):
        return _VOCABULARY if style in (_VOCABULARY, "rowwise") else ""
    if style == _SUMMED:
        return style
    return style if isinstance(part, nn.Linear) and style in _LINEAR else ""


def _without_conflicts(module: nn.Module, styles: Styles) -> Styles:
    """A weight that several parts share stays whole, unless all of them divide its rows."""
    ways: dict[int, set[int | None]] = {}
    users: Counter[int] = Counter()
    for path, part in module.named_modules():
        dims = divided_weights("", styles.get(path, ""))
        for name, p in part._parameters.items():
            if p is not None:
                ways.setdefault(id(p), set()).add(dims.get(name))
                users[id(p)] += 1
    return {
        path: style
        for path, style in styles.items()
        if all(p is None or ways[id(p)] in ({None}, {0}) or users[id(p)] == 1 for p in module.get_submodule(path)._parameters.values())
    }


def whole_degrees(module: nn.Module, styles: Styles) -> int:
    """A number that every possible degree divides, by sizes: of what stays divided between two parts, and of attention's heads."""
    sizes = [
        module.get_submodule(path).get_parameter("weight").shape[_LINEAR[style]]
        for path, style in styles.items()
        if style in ("colwise", "rowwise", "rowwise_split_input")
    ]
    config: Any = getattr(module, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads = [getattr(text, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return math.gcd(*sizes, *(int(one) for one in heads if one))


@dataclass
class Division:
    """A module whose parts ask, when they are called, which part of them this rank has."""

    module: nn.Module
    styles: Styles
    tps: dict[str, TensorParallel] = field(default_factory=dict)
    """By part; those without one are whole."""
    told: Callable[[str, str, torch.Tensor], None] | None = None
    """Is told collectives while a module is traced: kind, in which pass, and the whole tensor."""
    _copied: tuple[ReferenceType[torch.Tensor], ReferenceType[torch.Tensor]] | None = None
    """The last tensor that entered divided parts: what q, k and v are given is one, and so is the sum of their gradients."""

    def __post_init__(self) -> None:
        for path, style in self.styles.items():
            part = self.module.get_submodule(path)
            part.forward = self._wrapped(path, part, style, part.forward)  # type: ignore[method-assign]

    def close(self) -> None:
        """Gives the module back as it was."""
        for path in self.styles:
            with suppress(KeyError):
                del self.module.get_submodule(path).__dict__["forward"]

    def _wrapped(self, path: str, part: Any, style: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        dim = _LINEAR.get(style, 0)
        size = part.num_embeddings if style == _VOCABULARY else (part.in_features if dim else part.out_features) if style in _LINEAR else 0

        def run(*args: Any, **kwargs: Any) -> Any:
            tp = self.tps.get(path)
            if tp is None or tp.size == 1 or (size and part.weight.shape[dim] == size):
                return forward(*args, **kwargs)
            if next(part.parameters()).is_meta:
                tp = replace(tp, lone=True)
            if style == _SUMMED:
                return self._summed(tp, part, forward, *args, **kwargs)
            if not args:
                args = (kwargs.pop(next(iter(kwargs))),)
            if style == _VOCABULARY:
                return self._looked_up(tp, size, part, forward, *args)
            return (self._rows if dim else self._columns)(tp, size, style, part, forward, *args)

        return run

    def _columns(self, tp: TensorParallel, size: int, style: str, part: Any, forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(self._entering(tp, x))
        if style == "colwise":
            return out
        each = -(-size // tp.size)
        whole = gather(F.pad(out, (0, each - out.shape[-1])), tp)[..., :size]
        self._tell("all_gather", "forward", whole)
        return whole

    def _entering(self, tp: TensorParallel, x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._copied is not None and self._copied[0]() is x and (before := self._copied[1]()) is not None:
            return before
        copied = copy_to(x, tp)
        self._copied = ref(x), ref(copied)
        self._tell("all_reduce", "backward", x)
        return copied

    def _rows(self, tp: TensorParallel, size: int, style: str, part: Any, forward: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        bias, part._parameters["bias"] = part._parameters["bias"], None
        try:
            out: torch.Tensor = forward(slice_to(x, tp) if style == "rowwise_split_input" else x)
        finally:
            part._parameters["bias"] = bias
        self._tell("all_reduce", "forward", out)
        out = reduce_from(out, tp)
        return out if bias is None else out + bias

    def _looked_up(self, tp: TensorParallel, size: int, part: Any, forward: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
        here = tp.shard(size)
        padding, part.padding_idx = part.padding_idx, None
        outside = (ids < here.start) | (ids >= here.stop)
        if padding is not None and here.start <= padding < here.stop:
            part.padding_idx = padding - here.start
        try:
            out: torch.Tensor = forward((ids - here.start).masked_fill(outside, 0))
        finally:
            part.padding_idx = padding
        out = out.masked_fill(outside[..., None], 0.0)
        self._tell("all_reduce", "forward", out)
        return reduce_from(out, tp)

    def _summed(self, tp: TensorParallel, part: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = dict(part._parameters)
        for name, p in saved.items():
            if p is not None:
                part._parameters[name] = copy_to(p, tp)
                self._tell("all_reduce", "backward", p)
        try:
            return forward(*args, **kwargs)
        finally:
            part._parameters.update(saved)

    def _tell(self, kind: str, when: str, whole: torch.Tensor) -> None:
        if self.told is not None:
            self.told(kind, when, whole)
