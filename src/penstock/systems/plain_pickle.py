"""Reads pickles that hold plain data, without unpickling them: nothing that a file names is looked up, imported or called.

Opcodes are interpreted one by one, those for numbers, texts, bytes, tuples, lists and dicts. Of the few classes that published cost
files name, `defaultdict` becomes a dict, and arrays and numbers of numpy become lists and floats; any other name is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from penstock.errors import InputError
from penstock.files import short_repr

__all__ = ["read_plain_pickle"]


@dataclass(frozen=True)
class _Name:
    """A class or function that the file names; it stands for itself and is never looked up."""

    module: str
    name: str


@dataclass(frozen=True)
class _Dtype:
    """numpy's kind of numbers, by its code."""

    code: Any


class _Array(list[Any]):
    """An array of numpy, whose numbers come with its state."""


_MARK = object()
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_KNOWN = {("collections", "defaultdict"), ("numpy", "dtype"), ("numpy", "ndarray"),
          *((module, name) for module in ("builtins", "__builtin__") for name in ("list", "float", "int", "dict")),
          *((module, name) for module in _NUMPY for name in ("_reconstruct", "scalar"))}  # fmt: skip
_NUMBERS = ("f8", "f4", "i8", "i4", "u8", "u4")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_GIVEN = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "BINUNICODE",
          "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}  # fmt: skip
"""Opcodes whose argument is the value."""
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_plain_pickle(data: bytes, where: str) -> Any:
    """The value in a pickle; `where` names its origin in errors."""
    try:
        return _Reader(where).run(data)
    except InputError:
        raise
    except Exception as error:  # whatever a broken or hostile file provokes in the parser
        raise InputError(f"{where} is not a pickle of plain data: {short_repr(str(error))}.") from None


class _Reader:
    """The stack and the memo of one pickle."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """The value that is left at the end."""
        for opcode, argument, position in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._stack.pop()
            step: Callable[[str, Any], None] | None = getattr(self, f"_do_{_HANDLERS.get(name, '')}", None)
            if step is None:
                raise InputError(f"{self._where} is refused: byte {position} asks for {name}, which plain data never does.")
            step(name, argument)
        raise ValueError("it has no end")

    def _do_skip(self, name: str, argument: Any) -> None:
        """A frame or a version."""

    def _do_push(self, name: str, argument: Any) -> None:
        self._stack.append(_CONSTANTS.get(name, argument))

    def _do_mark(self, name: str, argument: Any) -> None:
        self._stack.append(_MARK)

    def _do_empty(self, name: str, argument: Any) -> None:
        self._stack.append({} if name == "EMPTY_DICT" else [])

    def _do_tuple(self, name: str, argument: Any) -> None:
        count = _TUPLES.get(name)
        taken = self._since_mark() if count is None else self._taken(count)
        self._stack.append(tuple(taken))

    def _do_collect(self, name: str, argument: Any) -> None:
        taken = self._since_mark()
        self._stack.append(taken if name == "LIST" else _pairs(taken))

    def _do_add(self, name: str, argument: Any) -> None:
        taken = self._since_mark() if name.endswith("S") else self._taken(1 if name == "APPEND" else 2)
        target = self._stack[-1]
        if name.startswith("APPEND") and isinstance(target, list):
            target += taken
        elif name.startswith("SETITEM") and isinstance(target, dict):
            target |= _pairs(taken)
        else:
            self._refuse(f"{name} of a {type(target).__name__}")

    def _do_put(self, name: str, argument: Any) -> None:
        self._memo[len(self._memo) if name == "MEMOIZE" else argument] = self._stack[-1]

    def _do_get(self, name: str, argument: Any) -> None:
        self._stack.append(self._memo[argument])

    def _do_name(self, name: str, argument: Any) -> None:
        module, attribute = argument.split(" ", 1) if name == "GLOBAL" else self._taken(2)
        if (module, attribute) not in _KNOWN:
            self._refuse(f"the name {short_repr(f'{module}.{attribute}')}")
        self._stack.append(_Name(module, attribute))

    def _do_call(self, name: str, argument: Any) -> None:
        called, args = self._taken(2)
        if not isinstance(called, _Name) or not isinstance(args, tuple):
            self._refuse("a call of something that is not a name")
        if called.name == "defaultdict":
            self._stack.append({})
        elif called.name == "_reconstruct":
            self._stack.append(_Array())
        elif called.name == "dtype":
            self._stack.append(_Dtype(args[0]))
        elif called.name == "scalar":
            self._stack.append(_numbers(args[0], args[1])[0])
        else:
            self._refuse(f"a call of {called.name}")

    def _do_build(self, name: str, argument: Any) -> None:
        (state,) = self._taken(1)
        target = self._stack[-1]
        if isinstance(target, _Array):  # (version, shape, dtype, order, values)
            _, shape, kind, _, values = state
            if len(shape) > 1:
                self._refuse(f"an array of {len(shape)} dimensions")
            target += values if isinstance(values, list) else _numbers(kind, values)
        elif not isinstance(target, _Dtype):  # its byte order is in its code
            self._refuse(f"a state of a {type(target).__name__}")

    def _since_mark(self) -> list[Any]:
        at = len(self._stack) - 1 - next(i for i, value in enumerate(reversed(self._stack)) if value is _MARK)
        taken = self._stack[at + 1 :]
        del self._stack[at:]
        return taken

    def _taken(self, count: int) -> list[Any]:
        if count > len(self._stack):
            raise ValueError("its stack is too short")
        at = len(self._stack) - count
        taken = self._stack[at:]
        del self._stack[at:]
        return taken

    def _refuse(self, what: str) -> NoReturn:
        raise InputError(f"{self._where} is refused: it holds {what}; expected numbers, texts, lists and dicts only.")


_HANDLERS = {
    "PROTO": "skip", "FRAME": "skip", "MARK": "mark", "EMPTY_DICT": "empty", "EMPTY_LIST": "empty", "TUPLE": "tuple", "LIST": "collect",
    "DICT": "collect", "APPEND": "add", "APPENDS": "add", "SETITEM": "add", "SETITEMS": "add", "GLOBAL": "name", "STACK_GLOBAL": "name",
    "REDUCE": "call", "BUILD": "build",
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), "put"), **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), "get"),
    **dict.fromkeys((*_GIVEN, *_CONSTANTS), "push"), **dict.fromkeys(_TUPLES, "tuple"),
}  # fmt: skip


def _pairs(taken: list[Any]) -> dict[Any, Any]:
    return dict(zip(taken[::2], taken[1::2], strict=True))


def _numbers(kind: Any, data: Any) -> list[float]:
    """Numbers in the bytes of a numpy array or scalar."""
    if not isinstance(kind, _Dtype) or kind.code not in _NUMBERS or not isinstance(data, bytes):
        raise ValueError("an array is not of plain numbers")
    return [float(value) for value in np.frombuffer(data, np.dtype(kind.code))]
