"""Turning a mapping (a YAML file, a Hugging Face config) into a family's configuration, with errors that name the field."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import InputError, near_misses
from penstock.files import short_repr

__all__ = ["MAX_LAYERS", "MAX_SIZE", "config_from_mapping", "expected_number", "require_divides"]

Config = TypeVar("Config")

MAX_LAYERS = 10_000
"""Far beyond any model; a number above it is a slip that would take hours to build."""
MAX_SIZE = 10**15
"""Beyond any width, vocabulary or count; products of a few such numbers still fit into a float."""
_EXPECTED = {int: "an int of 0 or more, up to 10^15", float: "a finite number"}


def expected_number(name: str, value: float) -> str:
    """What a field of this name may hold, if not this value; empty if it may. Names are ours or those of Hugging Face configs."""
    if not math.isfinite(value):
        return "a finite number"
    if "dropout" in name or "pdrop" in name:
        return "" if 0 <= value < 1 else "a probability, at least 0 and below 1"
    if "eps" in name:
        return "" if 0 < value < 1 else "a small number above 0"
    if name in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"):
        return "" if value > 0 else "a number above 0"
    return ""


def config_from_mapping(kind: type[Config], values: Mapping[str, Any], where: str) -> Config:
    """An instance of the dataclass `kind`; unknown fields and wrong types are refused by name."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if name not in hints:
            raise InputError(f"{where}: unknown field '{name}'. {near_misses(str(name), hints)}")
        if not _fits(value, hints[name]):
            expected = _EXPECTED.get(hints[name]) or getattr(hints[name], "__name__", str(hints[name]))
            raise InputError(f"{where}: field '{name}' is {short_repr(value)}; expected {expected}.")
        if isinstance(value, float | int) and (expected := expected_number(name, value)):
            raise InputError(f"{where}: field '{name}' is {value!r}; expected {expected}.")
    missing = [f.name for f in dataclasses.fields(kind) if _required(f) and f.name not in values]  # type: ignore[arg-type]
    if missing:
        raise InputError(f"{where}: missing {'field' if len(missing) == 1 else 'fields'} {', '.join(missing)}.")
    return kind(**values)


def require_divides(divisor_name: str, divisor: int, name: str, value: int) -> None:
    """Refuses sizes that do not divide, with both numbers in the message."""
    if divisor <= 0 or value % divisor:
        raise InputError(f"{name}={value} must be divisible by {divisor_name}={divisor}. Change one of the two.")


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(v, get_args(hint)[0]) for v in value)
    if origin is not None:
        return isinstance(value, origin)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_SIZE
    return isinstance(value, hint)
