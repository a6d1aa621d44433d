"""The roofline's efficiency curves, fitted to a measured profile, and how well they then do.

    python benchmarks/calibrate.py              fit, print the errors of both calibrations, write src/penstock/costs/calibration.json
    python benchmarks/calibrate.py --dry-run    the same without writing

Only ops on one rank count: what tensor parallelism divides is then predicted by the same curves from smaller amounts. Measured times
are the device's own; the launch time of a kernel stays as it was, since it stands for a host that issues small work slowly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.clusters import resolve_device
from penstock.costs.efficiency import (
    CALIBRATION_FILE,
    Calibration,
    Point,
    arithmetic_dtype,
    calibrate,
    load_calibration,
    op_class,
    predicted_s,
)
from penstock.costs.interpolation import MeasuredCurves
from penstock.costs.profile import DeviceProfile, Series, coordinates, read_profile
from penstock.costs.roofline import BACKWARD_KERNELS, OPTIMIZER_PASSES
from penstock.files import write_text
from penstock.models import Shape, resolve_model
from penstock.models.ops import Op

MODELS = ("gpt-1.3b", "llama-1b", "bert-large", "t5-770m", "wide-resnet-500m")
DEVICE = "h200-141gb"
PROFILE = Path(__file__).parent / "results/h200/profile-2026-11-15.json.gz"
"""Of large work, with gradients summed in bf16. The shipped one is newer, but curves fitted to it (many points are of small work) make
large steps 13 % too fast."""
STEADY = 0.05
"""Points that spread more than this were disturbed."""
STATE_BYTES = 16.0
"""Of a weight under AdamW, in bf16 with an fp32 master as in fp32: weight, gradient, master and moments."""


@dataclass(frozen=True)
class Measured:
    """A point of the profile and where it comes from."""

    model: str
    op: Op | None
    size: float
    length: float
    layout: str
    point: Point


def shape_at(op: Op, size: float, length: float) -> Shape:
    """A micro-batch in which `op` has these coordinates in a profile; what it does not depend on is zero."""
    count, squares = round(size), round(size * length)
    if op.config.get("cross_source"):
        shape = Shape(0, dec_tokens=count, cross=squares)
    elif op.config.get("side") == "decoder":
        shape = Shape(0, dec_tokens=count, dec_squares=squares)
    elif op.kind == "pooler" or "side" not in op.config:
        shape = Shape(count)
    else:
        shape = Shape(0, tokens=count, squares=squares)
    assert np.allclose(coordinates(op, shape), (size, length), rtol=1e-3), (op.name, size, length)
    return shape


def _grid(series: Series) -> Iterator[tuple[float, float, float, float]]:
    """(size, length, forward, backward) of each measured shape, repeated ones as one, disturbed ones left out."""
    columns = series.columns
    steady = {(size, length) for size, length, spread in zip(columns["size"], columns["length"], columns["spread"], strict=True)
              if spread <= STEADY}  # fmt: skip
    curves = MeasuredCurves(series)
    for size, length in sorted(steady):
        where = np.array([size]), np.array([length])
        forward_s, backward_s = (float(curves(name, *where, log=True)[0]) for name in ("forward_s", "backward_s"))
        yield size, length, forward_s, backward_s


def measured_points(profile: DeviceProfile) -> list[Measured]:
    """Every op of the five models on one rank, and the optimizer's steps, as points."""
    device = resolve_device(DEVICE)
    bandwidth = device.memory_bandwidth_bytes_per_s
    found: dict[tuple[str, str], tuple[str, Op]] = {}
    for name in MODELS:
        model = resolve_model(name)
        for op in model.distinct_ops:
            found.setdefault((op.signature, model.dtype), (name, op))
    points = []
    for key, series in profile.series.items():
        if key.tp > 1 or (key.op, key.dtype) not in found:
            continue
        model_name, op = found[key.op, key.dtype]
        kind = op_class(op.kind, op.config, key.layout)
        peak = device.peak_flops_per_s(arithmetic_dtype(kind, key.dtype))
        for size, length, *times in _grid(series):
            shape = shape_at(op, size, length)
            amounts = ((op.flops, op.traffic, 1), (op.backward_flops, op.backward_traffic, BACKWARD_KERNELS))
            for suffix, time_s, (flops, traffic, times_kernels) in zip(("", "_backward"), times, amounts, strict=True):
                work = flops.at(shape), traffic.at(shape)
                if any(work):
                    point = Point(kind + suffix, *work, time_s, peak, bandwidth, op.num_kernels * times_kernels)
                    points.append(Measured(model_name, op, size, length, key.layout, point))
    for step in profile.optimizer:
        moved = step.num_parameters * STATE_BYTES * OPTIMIZER_PASSES
        point = Point("optimizer", 0.0, moved, step.time_s, device.peak_flops_per_s("fp32"), bandwidth, 0)
        points.append(Measured("", None, step.num_parameters, 0.0, "any", point))
    return points


def relative_errors(points: list[Measured], calibration: Calibration) -> np.ndarray:
    """Predicted over measured, less one."""
    curves = calibration.of(DEVICE)
    return np.array([predicted_s(curves, measured.point) / measured.point.time_s - 1 for measured in points])


def fitted(points: list[Measured]) -> dict[str, Any]:
    """The package's calibration with the curves of all CUDA devices fitted to the points; four digits, as many as they deserve."""
    plain = calibrate([measured.point for measured in points], "cuda")
    for device in plain["devices"].values():
        for sides in device["classes"].values():
            for curve in sides.values():
                curve.update({name: float(f"{value:.4g}") if value > 1e-9 else 0.0 for name, value in curve.items()})
    about = f"cuda: fitted by benchmarks/calibrate.py to {len(points)} points measured on one H200; cpu: set by hand."
    return {"version": plain["version"], "about": about, "devices": plain["devices"]}


def as_text(plain: dict[str, Any]) -> str:
    """JSON with one class on each line."""
    devices = []
    for name, device in plain["devices"].items():
        classes = ",\n".join(f"        {json.dumps(kind)}: {json.dumps(sides)}" for kind, sides in device["classes"].items())
        launch = f'      "launch_s": {device["launch_s"]},\n'
        devices.append(f'    {json.dumps(name)}: {{\n{launch}      "classes": {{\n{classes}\n      }}\n    }}')
    head = f'  "version": {plain["version"]},\n  "about": {json.dumps(plain["about"])},\n'
    return "{\n" + head + '  "devices": {\n' + ",\n".join(devices) + "\n  }\n}\n"


def print_errors(points: list[Measured], before: Calibration, after: Calibration) -> None:
    """One line per class: mean and worst relative error of both calibrations."""
    errors = [np.abs(relative_errors(points, calibration)) for calibration in (before, after)]
    names = np.array([measured.point.op_class for measured in points])
    print(f"{'class':28s} {'points':>6s} {'mean before':>12s} {'worst before':>12s} {'mean after':>12s} {'worst after':>12s}")
    for name in [*sorted(set(names)), "all"]:
        which = (names == name) | (name == "all")
        cells = (f"{value:12.1%}" for error in errors for value in (error[which].mean(), error[which].max()))
        print(f"{name:28s} {which.sum():6d} {' '.join(cells)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    points = measured_points(read_profile(arguments.profile).devices[DEVICE])
    before = load_calibration()
    plain = fitted(points)
    print_errors(points, before, Calibration.from_dict(plain, "the new calibration"))
    if not arguments.dry_run:
        write_text(CALIBRATION_FILE, as_text(plain))
        print(f"wrote {CALIBRATION_FILE}")


if __name__ == "__main__":
    main()
