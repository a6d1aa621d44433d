"""Efficiency curves, the calibration file, and fitting curves to points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.costs.efficiency import (
    CALIBRATION_FILE,
    Calibration,
    Curve,
    Curves,
    DeviceEfficiency,
    Point,
    calibrate,
    load_calibration,
    op_class,
    predicted_s,
)
from penstock.errors import InputError

PEAK, BANDWIDTH = 1e15, 5e12
LAUNCH_S = load_calibration().of("h200-141gb").launch_s


def test_curve_by_hand() -> None:
    curve = Curve(0.8, 1e-5)
    assert curve.efficiency(1e10, PEAK) == pytest.approx(0.4)  # half of the best at 10 µs of work
    assert curve.time_s(1e10, PEAK) == pytest.approx(1e10 / (PEAK * 0.4))
    assert curve.time_s(0, PEAK) == curve.efficiency(0, PEAK) == 0


@settings(deadline=None)
@given(st.floats(1e6, 1e15), st.floats(1.0, 1e3))
def test_more_work_is_done_more_efficiently_but_takes_longer(work: float, factor: float) -> None:
    curve = Curve(0.75, 8e-6)
    assert curve.efficiency(work, PEAK) <= curve.efficiency(work * factor, PEAK) * (1 + 1e-12) <= curve.e_max * (1 + 2e-12)
    assert curve.time_s(work, PEAK) <= curve.time_s(work * factor, PEAK) * (1 + 1e-12)
    assert curve.time_s(work, PEAK) == pytest.approx(work / (PEAK * curve.efficiency(work, PEAK)))
    assert curve.efficiency(work * factor, PEAK * factor) == pytest.approx(curve.efficiency(work, PEAK))


def test_a_pass_by_hand() -> None:
    """Arithmetic of 4 ms and traffic of 3 ms: products hide one behind the other, attention adds them; each kernel is launched."""
    curves = Curves(Curve(0.5, 0.0), Curve(0.8, 4e-4))
    efficiency = DeviceEfficiency(1e-3, {"gemm": curves, "attention": curves})
    for name, expected_s in (("gemm", 4e-3), ("gemm_backward", 4e-3), ("attention", 7e-3), ("attention_rotary_packed", 7e-3)):
        for kernels in (1, 3):
            point = Point(name, 2e12, 1e10, 0.0, 1e15, 5e12, kernels)
            assert predicted_s(efficiency, point) == pytest.approx(expected_s + kernels * 1e-3)


def test_attention_of_mixed_lengths_is_a_class_of_its_own() -> None:
    found = [
        op_class("attention", config, layout) for config in ({}, {"rotary": True}, {"fused": False}) for layout in ("padded", "packed")
    ]
    assert found == ["attention", "attention_packed", "attention_rotary", "attention_rotary_packed", *["attention_unfused"] * 2]


def test_nothing_is_faster_than_its_peak() -> None:
    """Whatever a clock said of the one size that was measured."""
    point = Point("gemm", 1e12, 1e3, LAUNCH_S + 0.5e-3, PEAK, BANDWIDTH)
    assert Calibration.from_dict(calibrate([point, point]), "fit").of("h200-141gb").curves("gemm").flops.e_max == 1.0


def test_the_package_has_curves_for_every_class() -> None:
    calibration = load_calibration()
    for kind in ("linear", "attention", "norm", "embedding", "loss", "conv", "batch_norm", "imported"):
        for device in ("h200-141gb", "cpu"):
            curves = calibration.of(device).curves(op_class(kind), backward=True)
            assert 0 < curves.flops.e_max <= 1 and 0 < curves.bytes.e_max <= 1
    assert calibration.of("cpu").launch_s < calibration.of("a10g").launch_s


def gemm(flops: float, num_bytes: float, compute: Curve, moving: Curve) -> Point:
    time_s = max(compute.time_s(flops, PEAK), moving.time_s(num_bytes, BANDWIDTH)) + LAUNCH_S
    return Point("gemm", flops, num_bytes, time_s, PEAK, BANDWIDTH)


@settings(deadline=None)
@given(st.floats(0.3, 0.95), st.floats(1e-6, 5e-5), st.floats(0.3, 0.95), st.floats(5e-7, 1e-5))
def test_calibrate_finds_the_curves_points_came_from(e_flops: float, half_flops: float, e_bytes: float, half_bytes: float) -> None:
    compute, moving = Curve(e_flops, half_flops), Curve(e_bytes, half_bytes)
    heavy = [gemm(10.0**n, 1e3, compute, moving) for n in (10, 10.5, 11, 11.5, 12, 13)]
    light = [gemm(1e6, 10.0**n, compute, moving) for n in (9, 9.5, 10, 10.5, 11)]
    found = Calibration.from_dict(calibrate([*heavy, *light]), "fit").of("h200-141gb").curves("gemm")
    for point in (*heavy, *light):
        predicted = max(found.flops.time_s(point.flops, PEAK), found.bytes.time_s(point.bytes, BANDWIDTH)) + LAUNCH_S
        assert predicted == pytest.approx(point.time_s, rel=0.02)
    assert found.flops.e_max == pytest.approx(e_flops, rel=0.02)


def test_calibrate_changes_only_what_it_has_points_for(tmp_path: Path) -> None:
    point = gemm(1e12, 1e6, Curve(0.6, 0.0), Curve(0.75, 0.0))
    plain = calibrate([Point("conv_backward", 1e12, 1e6, 2e-3, PEAK, BANDWIDTH), point], device="my-gpu")
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(plain))
    fitted, usual = load_calibration(file), load_calibration()
    assert fitted.of("cpu") == usual.of("cpu") and fitted.of("h200-141gb") == usual.of("h200-141gb")
    mine = fitted.of("my-gpu")
    assert mine.curves("attention") == usual.of("my-gpu").curves("attention")
    assert mine.curves("gemm").bytes == usual.of("my-gpu").curves("gemm").bytes
    assert mine.curves("gemm").flops.time_s(1e12, PEAK) + LAUNCH_S == pytest.approx(point.time_s)
    assert mine.curves("conv", backward=True).flops.time_s(1e12, PEAK) + LAUNCH_S == pytest.approx(2e-3)


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    data = json.loads(CALIBRATION_FILE.read_text())
    file = tmp_path / "bad.json"
    del data["devices"]["cpu"]["classes"]["gemm"]
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match="cpu: gemm"):
        load_calibration(file)
    data["devices"]["cuda"]["classes"]["gemm"]["flops"]["e_max"] = 0
    file.write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"damaged.*e_max"):
        load_calibration(file)
    with pytest.raises(InputError, match="unknown op classes"):
        calibrate([Point("gem", 1, 1, 1, 1, 1)])
