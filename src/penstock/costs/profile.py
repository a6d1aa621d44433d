"""The profile: measured times and bytes of ops on one or more devices, as one JSON file."""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, shell_words
from penstock.files import MAX_TEXT_BYTES, decoded, parsed_json, readable_bytes, short_repr, write_bytes
from penstock.models.ops import Op
from penstock.models.shapes import Shape

__all__ = [
    "DEVICE_COLUMNS", "HOST_COLUMNS", "BesidePoint", "DeviceProfile", "LinkPoint", "OptimizerPoint", "Profile", "Series", "SeriesKey",
    "WholeFactors", "coordinates", "read_profile", "series_key",
]  # fmt: skip

FORMAT, VERSION = "penstock-profile", 1

COLUMNS = (
    "size", "length", "forward_s", "backward_s", "spread", "forward_host_s", "backward_host_s",
    "growth_bytes", "forward_peak_bytes", "backward_peak_bytes",
)  # fmt: skip
"""What is kept of each measured point. Host times are what issuing the op takes, whatever its size. Bytes are above what was
allocated when the op's pass began: after its forward pass (`growth`, what it keeps and returns less what it gave up), and at
the fullest moment of either pass."""


DEVICE_COLUMNS = ("forward_s", "backward_s")
HOST_COLUMNS = ("forward_host_s", "backward_host_s")
_LEAST_LEFT = 0.2
"""Of a measured time, however much of it is a mark's."""


@dataclass(frozen=True, slots=True)
class SeriesKey:
    """What a series of points was measured for."""

    op: str
    """The op's signature."""
    dtype: str
    tp: int = 1
    algo: int = 0
    layout: str = "any"
    """Only attention runs different kernels in `padded` and `packed`; other ops say `any`."""


def series_key(op: Op, dtype: str, tp: int, algo: int, layout: str) -> SeriesKey:
    """The key under which `op` is measured and looked up. An op that tp does not divide costs the same at any degree, and so does one
    that works on some rows of the tokens, but for their number."""
    divided = op.sequence != "rows" and bool(op.parameters.split.terms() or op.flops.split.terms() or op.traffic.split.terms())
    swapped = algo if tp > 1 and len(op.splits) > 1 else 0
    return SeriesKey(op.signature, dtype, tp if divided else 1, swapped, layout if op.kind in ("attention", "traced") else "any")


def coordinates(op: Op, shape: Shape) -> tuple[float, float]:
    """(size, length) of an op's work: token positions (or samples), and for attention, or what may hold one, the mean key length per
    query."""
    decoder = op.config.get("side") == "decoder"
    tokens, squares = (shape.dec_tokens, shape.dec_squares) if decoder else (shape.tokens, shape.squares)
    if op.kind == "attention":
        return float(tokens), (shape.cross if op.config.get("cross_source") else squares) / max(tokens, 1)
    if op.kind == "pooler" or not tokens:
        return float(shape.samples), 0.0
    if op.kind == "traced":
        return float(tokens), squares / tokens
    return float(tokens), 0.0


@dataclass
class Series:
    """Points of one key, column by column."""

    key: SeriesKey
    kind: str
    columns: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in COLUMNS})

    def add(self, **values: float) -> None:
        """Appends one point; every column must be given."""
        for name in COLUMNS:
            self.columns[name].append(float(values[name]))

    def rows(self) -> list[tuple[float, ...]]:
        """The points one by one, in the order of `COLUMNS`."""
        return list(zip(*(self.columns[name] for name in COLUMNS), strict=True))

    def __len__(self) -> int:
        return len(self.columns["size"])


@dataclass(frozen=True)
class OptimizerPoint:
    """Time of one optimizer step (gradients set to zero included)."""

    dtype: str
    num_parameters: float
    num_tensors: float
    """Ops whose weights were updated, as plans count them."""
    time_s: float


@dataclass(frozen=True)
class LinkPoint:
    """Time of one collective or transfer among `num_ranks` ranks."""

    kind: str
    num_ranks: int
    num_nodes: int
    size_bytes: float
    time_s: float
    modelled: bool = False


@dataclass(frozen=True)
class BesidePoint:
    """What the ops of one class took in one pass of a model, alone and beside a load on the same device."""

    model: str
    op_class: str
    """One of `costs.speeds.OpClass`."""
    load: float
    """Processes that keep the device busy."""
    alone_s: float
    beside_s: float


@dataclass(frozen=True)
class WholeFactors:
    """What a chain's ops take together, run for seconds without marks, over the sum of their measured parts."""

    device: float = 1.0
    """Of large work: above 1 where clocks fall under lasting load, below where one op finds in the cache what another left there."""
    host: float = 1.0
    """Of small work at the host's own pace."""
    recompute_host_s: float = 0.0
    """What recomputing one op costs the host, its second forward pass included."""
    mark_s: float = 0.0
    """What marks add to an op's pass on the device, seen by small work that is played from a recording, where there are none."""

    def joined(self, another: WholeFactors, count: int) -> WholeFactors:
        """What `count` comparisons gave, which this is, and another one: the mean for the device, and for the host the calmer of both,
        since whatever else a machine has to do only slows its host."""
        calmer = min(self, another, key=lambda factors: factors.host)
        device, mark_s = ((count * getattr(self, name) + getattr(another, name)) / (count + 1) for name in ("device", "mark_s"))
        return replace(calmer, device=device, mark_s=mark_s)

    def of_device(self, measured_s: Floats) -> Floats:
        """What an op's pass takes on the device in a whole chain, given what was measured between marks."""
        return self.device * np.maximum(measured_s - self.mark_s, _LEAST_LEFT * measured_s)


@dataclass
class DeviceProfile:
    """Everything measured on one kind of device."""

    about: dict[str, Any]
    """Device name as its driver gives it, memory, driver and torch versions, date."""
    series: dict[SeriesKey, Series] = field(default_factory=dict)
    optimizer: list[OptimizerPoint] = field(default_factory=list)
    links: list[LinkPoint] = field(default_factory=list)
    whole: dict[str, WholeFactors] = field(default_factory=dict)
    """By op signature: how its chain as a whole compares with the sum of its parts."""
    beside: list[BesidePoint] = field(default_factory=list)
    """How much foreign loads slow classes of ops, if that was asked for."""
    base_bytes: float = 0.0
    """Allocated by libraries (matrix workspaces) whatever the model."""
    held_out: list[tuple[str, float]] = field(default_factory=list)
    """(what, relative error) of predictions made for points before they were measured."""
    out_of_memory: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    """Units of work finished, so that a killed run goes on where it stopped."""

    def add(self, key: SeriesKey, kind: str, **values: float) -> None:
        """Adds one point to the series of `key`."""
        self.series.setdefault(key, Series(key, kind)).add(**values)

    def merge(self, other: DeviceProfile) -> None:
        """Takes over the points of another profile of the same kind of device; what is known already is not doubled."""
        for key, series in other.series.items():
            mine = self.series.setdefault(key, Series(key, series.kind))
            known = set(mine.rows())
            for row in series.rows():
                if row not in known:
                    mine.add(**dict(zip(COLUMNS, row, strict=True)))
        self.optimizer += [point for point in other.optimizer if point not in self.optimizer]
        self.links += [point for point in other.links if point not in self.links]
        self.beside += [point for point in other.beside if point not in self.beside]
        self.whole.update(other.whole)
        self.base_bytes = max(self.base_bytes, other.base_bytes)
        self.held_out += [error for error in other.held_out if error not in self.held_out]
        self.out_of_memory += [what for what in other.out_of_memory if what not in self.out_of_memory]
        self.done += [unit for unit in other.done if unit not in self.done]


@dataclass
class Profile:
    """Measurements by device name (as in the device catalogue)."""

    devices: dict[str, DeviceProfile] = field(default_factory=dict)

    def merge(self, other: Profile) -> None:
        """Adds what another profile measured."""
        for name, device in other.devices.items():
            if name in self.devices:
                self.devices[name].merge(device)
            else:
                self.devices[name] = device

    def write(self, path: str | Path) -> None:
        """Writes the file in one step; a name that ends in `.gz` is compressed."""
        text = json.dumps({"format": FORMAT, "version": VERSION, "devices": {n: _encode(d) for n, d in self.devices.items()}})
        data = text.replace('{"key"', '\n{"key"').encode()
        write_bytes(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _short(value: float) -> float | int:
    """Five significant digits: more than a measurement has."""
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _encode(device: DeviceProfile) -> dict[str, Any]:
    rows = [
        {"key": asdict(s.key), "kind": s.kind, **{name: [_short(v) for v in column] for name, column in s.columns.items()}}
        for s in device.series.values()
    ]
    return {
        "about": device.about, "base_bytes": device.base_bytes,
        "whole": {signature: asdict(factors) for signature, factors in device.whole.items()},
        "optimizer": [asdict(p) for p in device.optimizer],
        "links": [asdict(p) for p in device.links], "held_out": [[what, _short(e)] for what, e in device.held_out],
        "out_of_memory": device.out_of_memory, "done": device.done, "series": rows,
        **({"beside": [asdict(p) for p in device.beside]} if device.beside else {}),
    }  # fmt: skip


_LARGEST = 1e15
"""Above any time in seconds and any size in bytes."""
_SIGNED = ("growth_bytes", "spread")
"""What an op gives up may be more than what it keeps."""


def _number(value: Any, what: str, low: float = 0.0) -> float:
    """A measured number, if it can be one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and low <= value <= _LARGEST):
        raise ValueError(f"{what} is {short_repr(value)}; a finite number from {low:g} to {_LARGEST:g} was expected")
    return float(value)


def _series(row: dict[str, Any]) -> Series:
    what = f"a series of {row['kind']}"
    columns = {
        name: [_number(value, f"{name} in {what}", -_LARGEST if name in _SIGNED else 0.0) for value in row[name]] for name in COLUMNS
    }
    series = Series(_of_fields(SeriesKey, row["key"]), str(row["kind"]), columns)
    if not series.rows() or min(series.columns["size"]) <= 0:
        raise ValueError(f"{what} has no points, or one without a size")
    return series


def _of_fields(kind: type[Any], row: dict[str, Any]) -> Any:
    """One of the small records, its numbers checked."""
    found = kind(**row)
    for entry in fields(kind):
        value = getattr(found, entry.name)
        if entry.type in ("float", "int"):
            _number(value, f"{entry.name} of {kind.__name__}")
        elif entry.type == "str" and not isinstance(value, str):
            raise ValueError(f"{entry.name} of {kind.__name__} is {short_repr(value)}; text was expected")
    return found


def _decode(data: dict[str, Any]) -> DeviceProfile:
    series: Iterable[Series] = map(_series, data["series"])
    optimizer = [{name: value for name, value in row.items() if name != "host_s"} for row in data["optimizer"]]  # which they once had
    return DeviceProfile(
        about=dict(data["about"]), series={s.key: s for s in series}, optimizer=[_of_fields(OptimizerPoint, row) for row in optimizer],
        links=[_of_fields(LinkPoint, p) for p in data["links"]], base_bytes=_number(data["base_bytes"], "base_bytes"),
        whole={signature: _of_fields(WholeFactors, factors) for signature, factors in data["whole"].items()},
        held_out=[(str(what), float(error)) for what, error in data["held_out"]], out_of_memory=list(data["out_of_memory"]),
        done=list(data["done"]), beside=[_of_fields(BesidePoint, p) for p in data.get("beside", [])],
    )  # fmt: skip


def read_profile(path: str | Path) -> Profile:
    """Reads a profile; anything else is refused with what is wrong."""
    path = Path(path)
    if not os.path.lexists(path):
        raise InputError(f"profile '{path}' does not exist. Make one with `penstock profile --model M {shell_words('--out', path)}`.")
    raw = readable_bytes(path, "profile", MAX_TEXT_BYTES)
    try:
        plain = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"profile '{path}' cannot be read: {error}.") from None
    data = parsed_json(decoded(plain, path, "profile"), path, "profile")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError(f"'{path}' is not a profile (expected \"format\": \"{FORMAT}\").")
    if data.get("version") != VERSION:
        raise InputError(f"profile '{path}' has version {data.get('version')!r}; this Penstock reads version {VERSION}. Measure it again.")
    try:
        return Profile({name: _decode(device) for name, device in data["devices"].items()})
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"profile '{path}' is damaged: {type(error).__name__} {error}. Measure it again.") from None
