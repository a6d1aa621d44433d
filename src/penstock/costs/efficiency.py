"""How much of a device's peak each class of ops reaches, as curves over the size of the work, and fitting them to measurements.

An op class has one curve for arithmetic and one for memory traffic. Small work cannot fill a device, so the share of the peak grows
with the work w and saturates; half of the best share is reached at `half_s` seconds of work at the peak rate P, that is, a
device twice as fast needs twice the work:

    efficiency(w) = e_max · w / (w + half_s · P)        time(w) = w / (P · efficiency(w)) = (w / P + half_s) / e_max

Arithmetic and traffic overlap, so that the longer of the two counts; attention works through its keys tile by tile, and there
the two were measured to add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.errors import InputError
from penstock.files import read_json

__all__ = [
    "CALIBRATION_FILE", "Calibration", "Curve", "DeviceEfficiency", "Point", "adds_up", "arithmetic_dtype", "calibrate", "load_calibration",
    "op_class", "predicted_s",
]  # fmt: skip

CALIBRATION_FILE = Path(__file__).with_name("calibration.json")

_CLASSES = {
    "linear": "gemm", "logits": "gemm", "fc": "gemm", "pooler": "gemm", "attention": "attention", "embedding": "embedding",
    "loss": "loss", "class_loss": "loss", "conv": "conv", "downsample": "conv", "batch_norm": "batch_norm",
}  # fmt: skip
_NEEDED = {*_CLASSES.values(), "elementwise", "optimizer"}
_GENERAL = {
    "attention_rotary": "attention", "attention_unfused": "attention", "attention_packed": "attention",
    "attention_rotary_packed": "attention", "layer_norm": "elementwise", "rms_norm": "elementwise",
}  # fmt: skip
"""Classes that a device need not have: the class that stands for each of them where it is missing."""


def op_class(kind: str, config: Mapping[str, Any] | None = None, layout: str = "padded") -> str:
    """The efficiency class of an op; kinds that only move data are `elementwise`.

    Packed attention is its own class: sequences of mixed lengths leave parts of the device idle.
    """
    config = config or {}
    if kind == "norm":
        return "rms_norm" if config.get("rms") else "layer_norm"
    if kind == "attention" and not config.get("fused", True):
        return "attention_unfused"
    if kind == "attention":
        return "attention" + ("_rotary" if config.get("rotary") else "") + ("_packed" if layout == "packed" else "")
    return _CLASSES.get(kind, "elementwise")


def adds_up(name: str) -> bool:
    """Whether arithmetic and traffic of a class take turns, instead of overlapping."""
    return _GENERAL.get(name, name) == "attention"


def arithmetic_dtype(name: str, dtype: str) -> str:
    """The dtype whose peak rate counts: torch runs fp32 convolutions, but not matrix products, as tf32 unless told otherwise."""
    return "tf32" if name == "conv" and dtype == "fp32" else dtype


@dataclass(frozen=True, slots=True)
class Curve:
    """A saturating share of a peak rate."""

    e_max: float
    half_s: float

    def efficiency(self, work: float, peak: float) -> float:
        """The share of `peak` that this much work reaches."""
        return self.e_max * work / (work + self.half_s * peak) if work else 0.0

    def time_s(self, work: float, peak: float) -> float:
        """Time of this much work; no work takes none."""
        return (work / peak + self.half_s) / self.e_max if work else 0.0


class Curves(NamedTuple):
    """Both curves of an op class."""

    flops: Curve
    bytes: Curve


@dataclass(frozen=True)
class DeviceEfficiency:
    """The curves of one device kind."""

    launch_s: float
    """What each kernel adds, whatever its work."""
    classes: Mapping[str, Curves]

    def curves(self, name: str, backward: bool = False) -> Curves:
        """Curves of a class, or of the more general one; the backward pass has its own only where they were given."""
        general = _GENERAL.get(name, name)
        names = (f"{name}_backward", name, f"{general}_backward", general) if backward else (name, general)
        return next(self.classes[known] for known in names if known in self.classes)


@dataclass(frozen=True)
class Calibration:
    """Curves by device name; `cuda` and `cpu` stand for the devices that have none of their own."""

    devices: Mapping[str, DeviceEfficiency]

    def of(self, device: str) -> DeviceEfficiency:
        """The curves to use for a device of the catalogue."""
        return self.devices.get(device) or self.devices["cpu" if device.startswith("cpu") else "cuda"]

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Calibration:
        """Reads the plain form; `where` names its origin in errors."""
        try:
            devices = {name: _device(entry) for name, entry in data["devices"].items()}
            missing = {"cuda", "cpu"} - set(devices)
            missing |= {f"{name}: {kind}" for name, device in devices.items() for kind in _NEEDED - set(device.classes)}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{where} is damaged: {type(error).__name__} {error}. Compare it with {CALIBRATION_FILE}.") from None
        if missing:
            raise InputError(f"{where} lacks {', '.join(sorted(missing))}. Compare it with {CALIBRATION_FILE}.")
        return cls(devices)


def _device(entry: Mapping[str, Any]) -> DeviceEfficiency:
    classes = {name: Curves(_curve(sides["flops"]), _curve(sides["bytes"])) for name, sides in entry["classes"].items()}
    return DeviceEfficiency(float(entry["launch_s"]), classes)


def _curve(entry: Mapping[str, Any]) -> Curve:
    curve = Curve(float(entry["e_max"]), float(entry["half_s"]))
    if not (curve.e_max > 0 and curve.half_s >= 0):
        raise ValueError(f"e_max={curve.e_max} and half_s={curve.half_s} must be above 0 and at least 0")
    return curve


def load_calibration(path: str | Path = CALIBRATION_FILE) -> Calibration:
    """The curves of a calibration file, by default the one in the package."""
    return Calibration.from_dict(read_json(path, "calibration"), f"calibration '{path}'")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured pass of one op."""

    op_class: str
    """As in the file: `gemm`, or `gemm_backward` for a backward pass."""
    flops: float
    bytes: float
    time_s: float
    peak_flops_per_s: float
    bandwidth_bytes_per_s: float
    num_kernels: int = 1


def predicted_s(efficiency: DeviceEfficiency, point: Point) -> float:
    """What the curves say of a point."""
    name = point.op_class.removesuffix("_backward")
    curves = efficiency.curves(name, name != point.op_class)
    compute = curves.flops.time_s(point.flops, point.peak_flops_per_s)
    moving = curves.bytes.time_s(point.bytes, point.bandwidth_bytes_per_s)
    return (compute + moving if adds_up(name) else max(compute, moving)) + point.num_kernels * efficiency.launch_s


def calibrate(points: Iterable[Point], device: str = "cuda", start: Calibration | None = None) -> dict[str, Any]:
    """A calibration whose curves for `device` are fitted to measured points; classes without points stay as they were.

    Curves have the least sum of squared relative errors. Where the longer of arithmetic and traffic counts, each point is taken
    as bound by the one that the curves so far say, both are fitted, and this is repeated until no point changes sides.
    """
    before = start or load_calibration()
    base = before.of(device)
    by_class: dict[str, list[Point]] = {}
    for point in points:
        by_class.setdefault(point.op_class, []).append(point)
    known = {*base.classes, *_GENERAL}
    unknown = set(by_class) - known - {f"{name}_backward" for name in known}
    if unknown:
        raise InputError(f"measured points of unknown op classes {sorted(unknown)}; known: {', '.join(sorted(known))}.")
    fitted = {}
    for name, here in by_class.items():
        plain = name.removesuffix("_backward")
        fitted[name] = (_fit_sum if adds_up(plain) else _fit_longer)(here, base.curves(plain, name != plain), base.launch_s)
    devices = {**before.devices, device: DeviceEfficiency(base.launch_s, {**base.classes, **fitted})}
    return {"version": 1, "devices": {name: _plain(entry) for name, entry in devices.items()}}


def _plain(entry: DeviceEfficiency) -> dict[str, Any]:
    sides = {name: {side: {"e_max": curve.e_max, "half_s": curve.half_s} for side, curve in curves._asdict().items()}
             for name, curves in entry.classes.items()}  # fmt: skip
    return {"launch_s": entry.launch_s, "classes": sides}


def _arrays(points: Sequence[Point], launch_s: float) -> tuple[Floats, Floats, Floats, Floats]:
    """Of each point the seconds of arithmetic and of traffic at the peaks, the time, and the time less launches."""
    total = np.array([p.time_s for p in points])
    net = np.maximum(total - launch_s * np.array([p.num_kernels for p in points]), 0.0)
    flops, moved = np.array([[p.flops / p.peak_flops_per_s, p.bytes / p.bandwidth_bytes_per_s] for p in points]).T
    return flops, moved, total, net


def _fit_sum(points: Sequence[Point], curves: Curves, launch_s: float) -> Curves:
    """Both curves of a class whose arithmetic and traffic add up; they share one offset, which goes to the traffic."""
    from scipy.optimize import lsq_linear

    flops, moved, total, net = _arrays(points, launch_s)
    unit = float(np.median(total))
    rows = np.stack([flops, moved, np.where(moved > 0, unit, 0.0)], axis=1) / total[:, None]
    if np.linalg.matrix_rank(rows) < 3:
        return _fit_longer(points, curves, launch_s)
    slope, rate, offset = lsq_linear(rows, net / total, bounds=([1.0, 1.0, 0.0], [np.inf] * 3)).x
    return Curves(Curve(float(1 / slope), 0.0), Curve(float(1 / rate), float(offset * unit / rate)))


def _fit_longer(points: Sequence[Point], curves: Curves, launch_s: float) -> Curves:
    """Both curves of a class whose longer side counts: the best of several starts."""
    flops, moved, total, net = _arrays(points, launch_s)
    starts = [(a, b) for a in (0.4, 0.8) for b in (0.2, 0.5, 1.0)]
    fits = [fit for start in starts for fit in _alternate(flops, moved, total, net, start, curves)]

    def squares(fit: Curves) -> float:
        longer = np.maximum(_times(fit.flops, flops), _times(fit.bytes, moved))
        return float((((longer + total - net) / total - 1) ** 2).sum())

    return min(fits, key=squares)


def _alternate(flops: Floats, moved: Floats, total: Floats, net: Floats, start: tuple[float, float], before: Curves) -> list[Curves]:
    """The curves on the way from a start to where no point changes sides any more; a side without points stays as it was before."""
    found: list[Curves] = []
    curves = Curves(Curve(start[0], 0.0), Curve(start[1], 0.0))
    sides: NDArray[np.bool_] | None = None
    for _ in range(20):
        by_flops = _times(curves.flops, flops) > _times(curves.bytes, moved)
        if sides is not None and np.array_equal(by_flops, sides):
            break
        sides = by_flops
        curves = Curves(
            _fit_curve(flops[by_flops], net[by_flops], total[by_flops], before.flops),
            _fit_curve(moved[~by_flops], net[~by_flops], total[~by_flops], before.bytes),
        )
        found.append(curves)
    return found


def _times(curve: Curve, work_s: Floats) -> Floats:
    return np.asarray((work_s + curve.half_s) / curve.e_max * (work_s > 0))


def _fit_curve(work_s: Floats, net_s: Floats, total_s: Floats, curve: Curve) -> Curve:
    """The curve with the least sum of squared relative errors; one size alone can only tell `e_max`."""
    if not len(work_s):
        return curve
    if np.ptp(work_s) <= 1e-9 * work_s.max():
        slope = float(np.median(net_s / (work_s + curve.half_s)))
        return Curve(1 / max(slope, 1.0), curve.half_s)
    from scipy.optimize import lsq_linear

    # time = slope · work + offset, with slope = 1 / e_max and offset = half_s / e_max; the unit of the offset is a typical time.
    unit = float(np.median(total_s))
    rows = np.stack([work_s, np.full_like(work_s, unit)], axis=1) / total_s[:, None]
    slope, offset = lsq_linear(rows, net_s / total_s, bounds=([1.0, 0.0], [np.inf, np.inf])).x
    return Curve(float(1 / slope), float(offset * unit / slope))
