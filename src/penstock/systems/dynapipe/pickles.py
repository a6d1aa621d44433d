"""DynaPipe's cost model as it saves it: one pickle of `{(tp, recompute): pickle of five dicts}`, read as plain data.

The five are times, stored and peak activations by component, length and micro-batch, the size of each layer, and the best throughput,
which is not needed:

    ("encoder", "forward") → {length: [(micro-batch, ms, tokens/ms), …]}     "encoder" → {length: [(micro-batch, MB), …]}

Decoders are by (encoder length, decoder length). Of several values at one point, as T5's encoder has, the largest counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files import readable_bytes
from penstock.systems.dynapipe.inputs import RECOMPUTE
from penstock.systems.plain_pickle import read_plain_pickle

__all__ = ["CostPoints", "LayerSizes", "read_cost_pickle"]

_MAX_BYTES = 2**28
Point = tuple[float, ...]
CostPoints = dict[tuple[int, str, str], list[tuple[list[float], list[float]]]]
"""(tp, recompute, component) → points (micro-batch and lengths) with forward and backward ms, stored and peak MB."""
LayerSizes = dict[tuple[int, str, str], float]
"""(tp, recompute, component) → MB of a layer's fp16 weights."""


def read_cost_pickle(path: Path) -> tuple[CostPoints, LayerSizes]:
    """Every profiled point and layer size of a saved cost model."""
    where = f"DynaPipe cost model '{path}'"
    points: CostPoints = {}
    sizes: LayerSizes = {}
    try:
        for (tp, mode), data in read_plain_pickle(readable_bytes(path, "DynaPipe cost model", _MAX_BYTES), where).items():
            if not isinstance(tp, int) or mode not in RECOMPUTE:
                raise ValueError(f"the key {(tp, mode)!r} is no (tp, recompute)")
            times, stored, peak, weights, _ = read_plain_pickle(data, f"{where}, tp {tp}, recompute '{mode}'")
            for component in dict.fromkeys(component for component, _ in times):
                parts = (times[component, "forward"], times[component, "backward"], stored.get(component, {}), peak.get(component, {}))
                points[tp, mode, component] = list(_points(component, *map(_largest, parts)))
            sizes |= {(tp, mode, component): float(size) for component, size in weights.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{where} is not as DynaPipe saves it: {error}.") from None
    return points, sizes


def _largest(by_length: dict[Any, list[tuple[float, ...]]]) -> dict[Point, float]:
    """The largest value at each (micro-batch, lengths)."""
    found: dict[Point, float] = {}
    for lengths, values in by_length.items():
        for micro_batch, value, *_ in values:
            at = (float(micro_batch), *map(float, lengths if isinstance(lengths, tuple) else (lengths,)))
            if not (value >= 0 and all(math.isfinite(number) and number > 0 for number in at)):
                raise ValueError(f"the point {at} has the value {value!r}")
            found[at] = max(found.get(at, 0.0), float(value))
    return found


def _points(component: str, *quantities: dict[Point, float]) -> Iterator[tuple[list[float], list[float]]]:
    """Points with four costs; the head keeps nothing, what else is missing was not measured."""
    absent = 0.0 if component == "postprocess" else math.nan
    for at in dict.fromkeys(point for quantity in quantities for point in quantity):
        yield list(at), [quantity.get(at, math.nan if column < 2 else absent) for column, quantity in enumerate(quantities)]
