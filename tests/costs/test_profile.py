"""The profile file: written, read back, merged; anything else is refused with what is wrong."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.costs.profile import (
    COLUMNS,
    BesidePoint,
    DeviceProfile,
    LinkPoint,
    OptimizerPoint,
    Profile,
    SeriesKey,
    WholeFactors,
    coordinates,
    read_profile,
    series_key,
)
from penstock.costs.sources import beside_loads, open_costs
from penstock.errors import InputError
from penstock.models import Shape, resolve_model

GPT, T5, BERT, RESNET = (resolve_model(name) for name in ("gpt-tiny", "t5-tiny", "bert-tiny", "resnet-tiny"))
LINEAR = SeriesKey("linear {}", "bf16")


def device(size: float = 256.0, **more: Any) -> DeviceProfile:
    made = DeviceProfile({"device": "NVIDIA H200", "torch": "2.13.0"}, **more)
    for factor in (1, 4):
        made.add(LINEAR, "linear", **{**dict.fromkeys(COLUMNS, 0.25), "size": size * factor})
    return made


def whole() -> Profile:
    return Profile({
        "h200-141gb": device(
            optimizer=[OptimizerPoint("bf16", 1e8, 10, 0.5)], links=[LinkPoint("all_reduce", 2, 1, 1024, 1e-5)],
            whole={"linear {}": WholeFactors(1.5, 0.5, 1e-4)}, base_bytes=2.0**26, held_out=[("gpt size 512", -0.0125)],
            out_of_memory=["gpt Shape(…)"], done=["gpt sizes tp1"]),
    })  # fmt: skip


@pytest.mark.parametrize("name", ["profile.json", "profile.json.gz"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / "deeper" / name
    whole().write(path)
    assert read_profile(path) == whole()
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith("gz")
    before = path.read_bytes()
    read_profile(path).write(path)
    assert path.read_bytes() == before


def test_numbers_keep_five_digits(tmp_path: Path) -> None:
    profile = Profile({"cpu": device(123456.0)})
    profile.write(tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json").devices["cpu"].series[LINEAR].columns["size"] == [123460.0, 493820.0]


def damaged(tmp_path: Path, change: Any) -> Path:
    whole().write(tmp_path / "good.json")
    data = json.loads((tmp_path / "good.json").read_text())
    change(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(version=2), r"version 2; this Penstock reads version 1"),
        (lambda d: d.pop("version"), r"version None"),
        (lambda d: d.update(format="penstock-plan"), "is not a profile"),
        (lambda d: d.pop("devices"), "damaged: KeyError 'devices'"),
        (lambda d: d.update(devices=[]), "damaged"),
        (lambda d: d["devices"]["h200-141gb"].pop("series"), "damaged: KeyError 'series'"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].pop("forward_s"), "damaged: KeyError 'forward_s'"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0]["size"].pop(), "damaged"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update({name: [] for name in COLUMNS}), "no points"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(size=[0, 1]), "without a size"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(forward_s=[float("nan"), 1]), "finite"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(forward_s=["x", 1]), "forward_s in a series of .* is 'x'"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(forward_s=[None, 1]), "is None; a finite number"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(backward_s=[-1e-3, 1]), "backward_s .* is -0.001"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0].update(backward_s=[1e300, 1]), "is 1e\\+300"),
        (lambda d: d["devices"]["h200-141gb"]["series"][0]["key"].update(colour="red"), "damaged: TypeError"),
        (lambda d: d["devices"]["h200-141gb"]["links"].append({"kind": "ring"}), "damaged: TypeError"),
    ],
)
def test_a_damaged_or_other_file_is_refused(change: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        read_profile(damaged(tmp_path, change))


def test_what_is_no_profile_at_all_is_refused(tmp_path: Path) -> None:
    whole().write(tmp_path / "good.json.gz")
    packed = (tmp_path / "good.json.gz").read_bytes()
    garbled = packed[:40] + bytes(byte ^ 0x5A for byte in packed[40:60]) + packed[60:]
    cases = {"half": packed[: len(packed) // 2], "garbled": garbled, "text": b"size, length\n", "binary": bytes(range(256)), "empty": b"",
             "list": b"[]", "packed text": gzip.compress(b"hello")}  # fmt: skip
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError, match=name):
            read_profile(path)
    with pytest.raises(InputError, match=r"does not exist.*penstock profile"):
        read_profile(tmp_path / "missing.json")
    with pytest.raises(InputError, match="is a directory"):
        read_profile(tmp_path)


def test_merging_adds_devices_and_points() -> None:
    first, other = whole(), device(64.0, done=["gpt sizes tp1", "gpt lengths tp1"], base_bytes=1.0)
    first.merge(Profile({"h200-141gb": other, "cpu": device()}))
    mine = first.devices["h200-141gb"]
    assert set(first.devices) == {"h200-141gb", "cpu"}
    assert mine.series[LINEAR].columns["size"] == [256, 1024, 64]  # the point at 256 is the same in both
    assert mine.done == ["gpt sizes tp1", "gpt lengths tp1"] and mine.base_bytes == 2.0**26
    assert mine.whole == whole().devices["h200-141gb"].whole
    compared = {"another": WholeFactors(1.1, 0.9, 2e-6), **dict.fromkeys(mine.whole, WholeFactors(1.3))}
    first.merge(Profile({"h200-141gb": replace(device(), whole=compared)}))
    assert mine.whole == compared  # what was measured last


def test_merging_the_same_profile_again_changes_nothing() -> None:
    profile = whole()
    profile.merge(whole())
    assert profile == whole()


def test_keys_tell_apart_only_what_costs_differently() -> None:
    by_name = {op.name: op for op in GPT.distinct_ops}
    norm, qkv, attention = by_name["norm1"], by_name["qkv"], by_name["attention"]
    assert series_key(norm, "bf16", 8, 1, "packed") == series_key(norm, "bf16", 1, 0, "padded") == SeriesKey(norm.signature, "bf16")
    assert series_key(qkv, "bf16", 1, 1, "packed") == series_key(qkv, "bf16", 1, 0, "padded")
    assert series_key(qkv, "bf16", 2, 1, "packed") == SeriesKey(qkv.signature, "bf16", 2, 1)
    assert series_key(attention, "bf16", 2, 1, "packed") == SeriesKey(attention.signature, "bf16", 2, 0, "packed")
    assert series_key(qkv, "fp32", 1, 0, "padded") != series_key(qkv, "bf16", 1, 0, "padded")


def test_coordinates_of_each_side() -> None:
    shape = Shape.padded(4, 100, 30)
    found = {place.name: coordinates(place.op, shape) for place in T5.ops}
    assert found["encoder.0.qkv"] == (400, 0) and found["encoder.0.attention"] == (400, 100)
    assert found["decoder.0.qkv"] == (120, 0) and found["decoder.0.attention"] == (120, 30)
    assert found["decoder.0.cross_attention"] == (120, 100)  # 120 queries that see 100 keys each
    assert coordinates(next(op for op in BERT.distinct_ops if op.kind == "pooler"), Shape.padded(4, 100)) == (4, 0)
    assert {coordinates(op, Shape.images(7)) for op in RESNET.distinct_ops} == {(7, 0)}
    packed = Shape.packed([10, 30])
    assert coordinates(next(op for op in GPT.distinct_ops if op.kind == "attention"), packed) == (40, 1000 / 40)


def test_what_was_measured_beside_loads_is_kept_and_merged(tmp_path: Path) -> None:
    point = BesidePoint("gpt", "matmul", 0.5, 1.0, 1.5)
    profile = Profile({"cpu": DeviceProfile({}, beside=[point])})
    profile.merge(Profile({"cpu": DeviceProfile({}, beside=[point, replace(point, load=1.0)])}))
    profile.write(tmp_path / "profile.json")
    assert beside_loads(open_costs(f"profile:{tmp_path / 'profile.json'}")) == [point, replace(point, load=1.0)]
    assert beside_loads(open_costs("roofline")) == []


def test_rounds_of_comparisons_count_alike_on_the_device_and_the_calmest_for_the_host() -> None:
    first, second, third = WholeFactors(1.0, 1.5, 2e-6), WholeFactors(1.2, 1.1, 1e-6), WholeFactors(1.7, 1.3, 3e-6)
    first, second = replace(first, mark_s=3e-6), replace(second, mark_s=6e-6)
    found = first.joined(second, 1).joined(third, 2)
    assert (found.device, found.mark_s) == pytest.approx((1.3, 3e-6)) and (found.host, found.recompute_host_s) == (1.1, 1e-6)


def test_a_mark_is_no_part_of_an_op() -> None:
    """A pass is never all mark."""
    factors = WholeFactors(device=1.1, mark_s=3e-6)
    assert factors.of_device(np.array([13e-6, 4e-6, 3e-6])) == pytest.approx([11e-6, 1.1e-6, 0.66e-6])
