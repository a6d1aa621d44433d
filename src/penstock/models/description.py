"""A model's description as a JSON file: what the tracer writes for a user's own module, and what plans can carry along.

    {"format": "penstock-model", "version": 1, "name": …, "dtype": "bf16", "runs": [
        {"block": "layers", "copies": 24, "ops": [
            {"name": "up", "kind": "linear", "flops": {"split": {"tokens": 33554432.0}}, …}]}]}

A form is written as its terms, and what has its default is left out.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import InputError, near_misses
from penstock.files import short_repr
from penstock.models.config import MAX_LAYERS, MAX_SIZE
from penstock.models.ops import ITEM_BYTES, Block, Model, Op, TensorSpec
from penstock.models.shapes import FEATURES, Form

__all__ = ["FORMAT", "VERSION", "model_from_description", "model_to_description"]

FORMAT, VERSION = "penstock-model", 1
MAX_OPS = 32 * MAX_LAYERS
"""More than any family makes of the most layers that it may have."""

T = TypeVar("T")


def model_to_description(model: Model) -> dict[str, Any]:
    """The JSON value of `model`."""
    runs = [{"block": block.name, "copies": copies, "ops": _encode(block.ops)} for block, copies in model.runs]
    return {"format": FORMAT, "version": VERSION, **_encode(dataclasses.replace(model, runs=())), "runs": runs}


def model_from_description(value: Any, where: str) -> Model:
    """The model of a JSON value; `where` names the file in errors, which also name the field and what it holds."""
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise InputError(f'{where}: not a model description: "format" is {found!r}, expected "{FORMAT}". `penstock` writes such files.')
    if value.get("version") != VERSION:
        raise InputError(f"{where}: version {value.get('version')!r} is not known; this Penstock reads version {VERSION}.")
    fields = {name: part for name, part in value.items() if name not in ("format", "version", "runs")}
    model = _Reader(where).dataclass(Model, {**fields, "runs": []}, "")
    runs = tuple(_run(part, where, f"runs[{index}]") for index, part in enumerate(_list(value.get("runs"), where, "runs")))
    # A family's sizes are tuples; JSON knows only lists.
    config = {name: tuple(part) if isinstance(part, list) else part for name, part in model.config.items()}
    model = dataclasses.replace(model, runs=runs, config=config)
    _check(model, where)
    return model


def _run(value: Any, where: str, path: str) -> tuple[Block, int]:
    reader = _Reader(where)
    if not isinstance(value, dict) or set(value) != {"block", "copies", "ops"}:
        raise InputError(f"{where}: {path} must hold exactly block, copies and ops.")
    copies = reader.read(value["copies"], int, f"{path}.copies")
    if copies < 1:
        raise InputError(f"{where}: {path}.copies is {copies}; at least 1 was expected.")
    block = reader.dataclass(Block, {"name": value["block"], "ops": value["ops"]}, path)
    if not block.ops:
        raise InputError(f"{where}: {path} holds no ops.")
    return block, copies


def _encode(value: Any) -> Any:
    if isinstance(value, Form):
        return value.terms()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value) if getattr(value, f.name) != _default(f)}
    if isinstance(value, Mapping):
        return {name: _encode(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return value


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _list(value: Any, where: str, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: {path} is {value!r}; expected a list.")
    return value


class _Reader:
    """Reads JSON values as the types of the description; errors say where in the file they are."""

    def __init__(self, where: str) -> None:
        self.where = where

    def wrong(self, path: str, value: Any, expected: str) -> InputError:
        return InputError(f"{self.where}: {path} is {short_repr(value)}; expected {expected}.")

    def read(self, value: Any, hint: Any, path: str) -> Any:
        origin = get_origin(hint)
        if hint is Any:
            return value
        if hint is Form:
            return self.form(value, path)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.dataclass(hint, value, path)
        if origin is tuple:
            parts = _list(value, self.where, path)
            return tuple(self.read(part, get_args(hint)[0], f"{path}[{index}]") for index, part in enumerate(parts))
        if origin in (Union, types.UnionType, Literal):
            choices = get_args(hint)
            if (value if origin is Literal else type(value)) in choices:
                return value
            raise self.wrong(path, value, " or ".join(getattr(choice, "__name__", repr(choice)) for choice in choices))
        kind = dict if origin is not None else hint
        if type(value) is not kind:
            raise self.wrong(path, value, "a mapping" if kind is dict else kind.__name__)
        return value

    def form(self, value: Any, path: str) -> Form:
        if not isinstance(value, dict):
            raise self.wrong(path, value, f"terms over {', '.join(FEATURES)}")
        for name, amount in value.items():
            if name not in FEATURES:
                raise InputError(f"{self.where}: {path} has unknown feature '{name}'. {near_misses(name, FEATURES)}")
            if isinstance(amount, bool) or not isinstance(amount, int | float) or not abs(amount) <= 1e300:
                raise self.wrong(f"{path}.{name}", amount, "a number")
        return Form.of(**value)

    def dataclass(self, kind: type[T], value: Any, path: str) -> T:
        prefix = f"{path}." if path else ""
        if not isinstance(value, dict):
            raise self.wrong(path, value, "a mapping")
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name in value:
            if name not in fields:
                raise InputError(f"{self.where}: unknown field '{prefix}{name}'. {near_misses(name, fields)}")
        missing = [name for name, field in fields.items() if _default(field) is dataclasses.MISSING and name not in value]
        if missing:
            raise InputError(f"{self.where}: {path or 'the file'} lacks {', '.join(missing)}.")
        hints = get_type_hints(kind)
        return kind(**{name: self.read(part, hints[name], prefix + name) for name, part in value.items()})


def _check(model: Model, where: str) -> None:
    """Refuses what no chain can mean: names that lead nowhere, unknown dtypes and sizes."""
    if not model.num_ops:
        raise InputError(f"{where}: runs holds no ops.")
    if model.num_ops > MAX_OPS:
        raise InputError(f"{where}: runs holds {model.num_ops:,} ops with all copies; at most {MAX_OPS:,} were expected.")
    if model.dtype not in ITEM_BYTES:
        raise InputError(f"{where}: dtype is {model.dtype!r}. {near_misses(model.dtype, ITEM_BYTES)}")
    names = Counter(placed.name for placed in model.ops)
    double = [name for name, count in names.items() if count > 1]
    if double:
        raise InputError(f"{where}: op name '{min(double)}' appears more than once.")
    _check_carry(model.inputs, "inputs", where)
    carry = model.inputs
    for placed in model.ops:
        op = placed.op
        _check_carry(op.carry, f"op '{placed.name}'", where)
        _check_splits(op, placed.name, {spec.name for spec in carry}, where)
        if op.tied_to and op.tied_to not in names:
            raise InputError(f"{where}: op '{placed.name}' is tied to unknown op '{op.tied_to}'. {near_misses(op.tied_to, names)}")
        carry = op.carry


def _check_carry(carry: tuple[TensorSpec, ...], owner: str, where: str) -> None:
    for spec in carry:
        if spec.dtype != "compute" and spec.dtype not in ITEM_BYTES:
            raise InputError(f"{where}: {owner}: tensor '{spec.name}' has dtype {spec.dtype!r}. {near_misses(spec.dtype, ITEM_BYTES)}")
        features = [dim for dim in spec.dims if isinstance(dim, str)]
        sizes = [dim for dim in spec.dims if isinstance(dim, int)]
        if len(features) > 1 or not set(features) <= set(FEATURES) or min(sizes, default=1) < 1 or math.prod(sizes) > MAX_SIZE:
            raise InputError(f"{where}: {owner}: tensor '{spec.name}' has sizes {short_repr(list(spec.dims))}; at most one may be text, a "
                             f"feature such as 'tokens', and numbers at least 1, with a product up to 10^15.")  # fmt: skip


def _check_splits(op: Op, name: str, entering: set[str], where: str) -> None:
    if not op.splits:
        raise InputError(f"{where}: op '{name}' has no splits; one is needed even without tensor parallelism.")
    made = op.config.get("made", [])
    if not isinstance(made, list) or not all(isinstance(tensor, str) for tensor in made):
        raise InputError(f"{where}: op '{name}': config.made is {short_repr(made)}; a list of names of tensors was expected.")
    leaving = {spec.name for spec in op.carry}
    for split in op.splits:
        for what, saved, there in (("saves_in", split.saves_in, entering), ("saves_out", split.saves_out, leaving)):
            for tensor in saved:
                if tensor not in there:
                    raise InputError(f"{where}: op '{name}': {what} names '{tensor}', but its carry there is {sorted(there)}.")
