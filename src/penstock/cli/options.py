"""Checks of options that many verbs have, made while the command line is read and so before any work: numbers, and names to write to."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.errors import InputError
from penstock.files import check_folder, check_new_folder, check_writable, reserve_output, short_repr

__all__ = [
    "BATCH", "BIG", "MAX_PLANNERS", "MAX_SEARCH_STEPS", "SEED", "Gradients", "Precision", "SeqLength", "file_to_go_on_with",
    "file_to_write", "folder_to_write", "new_folder_to_write", "options_said", "parse_steps", "slower_ranks", "within",
]  # fmt: skip

SEED = 2**63 - 1
"""Generators of random numbers are seeded with 64 bits, one of which is a sign."""
BIG = 10**15
"""Above any number of steps, tokens or seconds that somebody could mean; sums and products of such numbers still fit into 64 bits or a
float."""
BATCH = 10**8
"""Samples of an iteration, tokens of a sample: beyond it even counting takes longer than anybody waits."""
MAX_SEARCH_STEPS = 100_000_000
"""Steps of search for one batch: an hour and more of a processor."""
MAX_PLANNERS = 64
"""Processes on one machine, each of which holds a copy of the planner."""

Callback = Callable[..., Any]


def options_said(verb: Callable[..., None], values: Mapping[str, Any]) -> list[str]:
    """Which options of a verb have other values than their defaults, by the names of its arguments as a command line has them."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(verb).parameters.items()}
    return [name.strip("_").replace("_", "-") for name, default in defaults.items() if values[name] != default]


def within(low: float, high: float, *, above: bool = False) -> Callback:
    """A callback that refuses a number that is not finite, below `low` (or equal to it, with `above`), or beyond `high`; None passes."""

    def check(param: typer.CallbackParam, value: Any) -> Any:
        if value is None:
            return value
        name = param.opts[0]
        if math.isnan(value) or value < low or (above and value == low):
            expected = f"more than {low:g} was" if above else f"{low:,} or more was"
            raise InputError(f"{name} is {value}; {expected} expected.")
        if value > high:
            raise InputError(f"{name} is {value}; at most {high:,} was expected.")
        return value

    return check


def file_to_write(param: typer.CallbackParam, value: Any) -> Any:
    """A callback that refuses a name under which no file can be written, or which another option has."""
    if value is not None:
        file_to_go_on_with(param, value)
        _named(param, lambda: reserve_output(value))
    return value


def file_to_go_on_with(param: typer.CallbackParam, value: Any) -> Any:
    """A callback that refuses a name under which no file can be written; one that is there is read first, and gets more into it."""
    if value is not None:
        _named(param, lambda: check_writable(value))
    return value


def folder_to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """A callback that refuses a name that is no folder and cannot become one."""
    if value is not None:
        _named(param, lambda: check_folder(value))
    return value


def new_folder_to_write(param: typer.CallbackParam, value: Path | None) -> Path | None:
    """A callback that refuses a name that is no folder and cannot become one, or a folder with something in it."""
    if value is not None:
        _named(param, lambda: check_new_folder(value))
    return value


def _named(param: typer.CallbackParam, check: Callable[[], None]) -> None:
    try:
        check()
    except InputError as error:
        raise InputError(f"{param.opts[0]}: {error}") from None


def parse_steps(text: str) -> tuple[int, int]:
    """`--steps` of a run: the first and the last of 20 or 20-24."""
    first, dash, last = (part.strip() for part in text.partition("-"))
    if not first.isdecimal() or (dash and not last.isdecimal()) or max(len(first), len(last)) > len(str(BIG)):
        raise InputError(f"--steps is {short_repr(text)}; a step such as 3, or a range such as 10-19, was expected.")
    if dash and int(last) < int(first):
        raise InputError(f"--steps is '{text}', which ends before it begins.")
    return int(first), int(last or first)


def slower_ranks(given: list[str]) -> dict[int, float]:
    """`--slow` of ranks: texts such as 3=1.5."""
    found = {}
    for text in given:
        rank, _, factor = text.partition("=")
        try:
            found[int(rank)] = float(factor)
        except ValueError:
            raise InputError(f"--slow is '{text}'; a rank and a factor such as 3=1.5 were expected.") from None
    return found


SeqLength = Annotated[
    int | None,
    typer.Option(callback=within(1, BATCH), help="Tokens of a sample; the model's usual length, but at most 4096, if not given."),
]
Precision = Annotated[
    str | None,
    typer.Option(help="Weights and activations in fp32, bf16 or fp16; if not given, the model's own, or fp16 on devices without bf16."),
]
Gradients = Annotated[
    str | None,
    typer.Option(help="Sum gradients in fp32, or in bf16 (fp16) like the weights; if not given, fp32 unless nothing would fit."),
]
