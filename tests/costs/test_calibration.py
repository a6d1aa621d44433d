"""The committed calibration: it comes from a measured profile, fits it, and carries over to other devices by their peaks."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.clusters import resolve_cluster, resolve_device
from penstock.costs.efficiency import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    Point,
    adds_up,
    calibrate,
    load_calibration,
    op_class,
    predicted_s,
)
from penstock.costs.profile import coordinates, read_profile
from penstock.costs.roofline import Roofline
from penstock.models import Shape, resolve_model


@cache
def script() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "calibrate.py"
    spec = importlib.util.spec_from_file_location("benchmark_calibrate", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def points() -> Any:
    return script().measured_points(read_profile(script().PROFILE).devices[script().DEVICE])


def test_the_committed_curves_come_from_the_profile() -> None:
    again, committed = script().fitted(points()), json.loads(CALIBRATION_FILE.read_text())
    assert set(again["devices"]) == set(committed["devices"])
    for name, device in committed["devices"].items():
        assert set(device["classes"]) == set(again["devices"][name]["classes"]), "run python benchmarks/calibrate.py"
    errors = [np.abs(script().relative_errors(points(), Calibration.from_dict(plain, "test"))).mean() for plain in (again, committed)]
    assert errors[1] == pytest.approx(errors[0], rel=0.05), "the profile has changed: run python benchmarks/calibrate.py"
    assert script().as_text(committed) == CALIBRATION_FILE.read_text()


def test_curves_are_sane() -> None:
    for device in load_calibration().devices.values():
        for name, curves in device.classes.items():
            for curve in curves:
                assert 0 < curve.e_max <= 1 and 0 <= curve.half_s < 1e-3, name
    work = np.logspace(6, 15, 50)
    for curves in load_calibration().of("h200-141gb").classes.values():
        efficiencies = [curves.flops.efficiency(w, 989e12) for w in work]
        times = [curves.flops.time_s(w, 989e12) for w in work]
        assert (np.diff(efficiencies) > -1e-12).all() and (np.diff(times) > 0).all()


def test_large_linear_and_attention_ops_are_predicted_well() -> None:
    models = ("gpt-1.3b", "llama-1b", "bert-large")
    chosen = [m for m in points() if m.model in models and m.op.kind in ("linear", "attention") and m.size >= 1024]
    errors = np.abs(script().relative_errors(chosen, load_calibration()))
    assert len(chosen) > 500 and errors.mean() < 0.15
    linear = np.array([m.op.kind == "linear" for m in chosen])
    assert errors[linear].mean() < 0.10 and errors[~linear].mean() < 0.20


def test_every_class_is_predicted_better_than_a_guess() -> None:
    errors = np.abs(script().relative_errors(points(), load_calibration()))
    assert errors.mean() < 0.25
    large = np.array([m.size >= (8 if m.model == "wide-resnet-500m" else 1024) for m in points()])
    names = np.array([m.point.op_class for m in points()])
    means = {name: float(errors[large & (names == name)].mean()) for name in set(names)}
    assert max(means.values()) < 0.6, means


def test_the_table_says_what_the_curves_say() -> None:
    shape, cluster, curves = Shape.padded(16, 512), resolve_cluster("8xh200"), load_calibration().of("h200-141gb")
    for name in ("gpt-1.3b", "llama-1b", "bert-large"):
        model = resolve_model(name)
        table = Roofline(in_company=False).table(model, [shape], [1], cluster)
        for index, op in enumerate(model.distinct_ops):
            here = [m for m in points() if m.op is not None and m.op.signature == op.signature and m.layout != "packed"
                    and (m.size, m.length) == coordinates(op, shape)]  # fmt: skip
            for m in here:
                column = table.backward_s if m.point.op_class.endswith("_backward") else table.forward_s
                assert column[index, 0, 0, 0, 0] == pytest.approx(predicted_s(curves, m.point)), op.name


def test_other_devices_scale_by_their_peaks() -> None:
    shape, models = Shape.padded(64, 1024), ("gpt-1.3b", "llama-1b")
    h200, a100 = resolve_device("h200"), resolve_device("a100-80gb")
    for name in models:
        model = resolve_model(name)
        here, there = (Roofline().table(model, [shape], [1], resolve_cluster(f"1x{device.name}")) for device in (h200, a100))
        by_flops = h200.peak_flops_per_s("bf16") / a100.peak_flops_per_s("bf16")
        by_bytes = h200.memory_bandwidth_bytes_per_s / a100.memory_bandwidth_bytes_per_s
        low, high = sorted((by_flops, by_bytes))
        slower = (there.forward_s + there.backward_s)[..., 0, 0] / (here.forward_s + here.backward_s)[..., 0, 0]
        assert (slower > 0.95 * min(low, 1)).all() and (slower < 1.02 * high).all()
        up = here.op_names.index("up")
        assert slower[up, 0, 0] == pytest.approx(by_flops, rel=0.05)


def test_convolutions_in_fp32_use_the_matrix_units_and_products_do_not() -> None:
    model, a100 = resolve_model("resnet-50"), resolve_cluster("1xa100-40gb")
    table = Roofline().table(model, [Shape.images(64)], [1], a100)
    efficiency = load_calibration().of("a100-40gb")
    expected_s = efficiency.curves("conv").flops.time_s(2 * 9 * 64 * 64 * 56 * 56 * 64, 156e12) + efficiency.launch_s
    assert table.forward_s[table.op_names.index("conv2"), 0, 0, 0, 0] == pytest.approx(expected_s)


def test_classes_of_ops() -> None:
    assert op_class("attention", {"fused": True, "rotary": None}) == "attention"
    assert op_class("attention", {"fused": True, "rotary": {"theta": 1}}) == "attention_rotary"
    assert op_class("attention", {"fused": True, "rotary": {"theta": 1}}, "packed") == "attention_rotary_packed"
    assert op_class("attention", {"fused": False}) == "attention_unfused"
    assert [op_class("norm", {"rms": rms}) for rms in (True, False)] == ["rms_norm", "layer_norm"]
    assert [name for name in ("gemm", "attention", "attention_rotary", "attention_unfused", "rms_norm") if adds_up(name)] == [
        "attention", "attention_rotary", "attention_unfused"]  # fmt: skip
    cpu = load_calibration().of("cpu")  # which has general classes only
    assert cpu.curves("attention_rotary", backward=True) == cpu.curves("attention") and cpu.curves("rms_norm") == cpu.curves("elementwise")


def test_attention_curves_are_found_again() -> None:
    compute, moving, launch_s = Curve(0.5, 0.0), Curve(0.7, 3e-6), load_calibration().of("cuda").launch_s
    work = [(10.0**a, 10.0**b) for a in (9, 10, 11, 12) for b in (7, 8, 9)]
    made = [Point("attention", f, b, compute.time_s(f, 1e15) + moving.time_s(b, 5e12) + launch_s, 1e15, 5e12) for f, b in work]
    found = Calibration.from_dict(calibrate(made), "fit").of("h200-141gb")
    for point in made:
        assert predicted_s(found, point) == pytest.approx(point.time_s, rel=1e-3)
    assert found.curves("attention").flops.e_max == pytest.approx(0.5, rel=1e-3)
    one = Point("attention", 1e12, 1e6, 4e-3, 1e15, 5e12)  # One point cannot tell the two apart.
    assert predicted_s(Calibration.from_dict(calibrate([one]), "fit").of("h200-141gb"), one) == pytest.approx(4e-3, rel=0.05)
