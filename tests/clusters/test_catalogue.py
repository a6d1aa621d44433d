"""The catalogue: every entry resolves, its figures are sane, wrong names are answered with the near ones."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from penstock.clusters import DEVICES, INSTANCES, resolve_cluster, resolve_device, resolve_instance
from penstock.clusters.links import LINKS, resolve_link
from penstock.clusters.shorthand import plain_node
from penstock.errors import InputError

# fmt: off
FIGURES = (
    # MiB, GB/s, dense Tflop/s in fp32, tf32, fp16, bf16 and fp8, the link inside a node, a node's network and its rails
    ("v100-16gb", 16384, 900, 15.7, None, 125, None, None, "nvlink2", "infiniband-400g", 4),
    ("v100-32gb", 32768, 900, 15.7, None, 125, None, None, "nvlink2", "infiniband-400g", 4),
    ("a100-40gb", 40960, 1555, 19.5, 156, 312, 312, None, "nvlink3", "infiniband-1600g", 8),
    ("a100-80gb", 81920, 2039, 19.5, 156, 312, 312, None, "nvlink3", "infiniband-1600g", 8),
    ("h100-80gb", 81559, 3350, 67, 494.5, 989, 989, 1979, "nvlink4", "infiniband-3200g", 8),
    ("h200-141gb", 143771, 4800, 67, 494.5, 989, 989, 1979, "nvlink4", "infiniband-3200g", 8),
    ("b200", 183359, 8000, 75, 1100, 2250, 2250, 4500, "nvlink5", "infiniband-3200g", 8),
    ("a10g", 23028, 600, 31.5, 35, 70, 70, None, "pcie4", "ethernet-100g", 1),
    ("a10", 23028, 600, 31.2, 62.5, 125, 125, None, "pcie4", "ethernet-100g", 1),
    ("l4", 23034, 300, 30.3, 60, 121, 121, 242.5, "pcie4", "ethernet-100g", 1),
    ("l40s", 46068, 864, 91.6, 183, 362, 362, 733, "pcie4", "ethernet-100g", 1),
    ("t4", 15360, 320, 8.1, None, 65, None, None, "pcie3", "ethernet-25g", 1),
    ("rtx3090", 24576, 936, 35.6, 35.6, 71.2, 71.2, None, "pcie4", "ethernet-100g", 1),
    ("rtx4090", 24564, 1008, 82.6, 82.6, 165.2, 165.2, 330.3, "pcie4", "ethernet-100g", 1),
    ("mi300x", 196592, 5300, 163.4, 653.7, 1307.4, 1307.4, 2614.9, "xgmi", "infiniband-3200g", 8),
    ("cpu", 16384, 40, 0.2, None, None, None, None, "shared-memory", "ethernet-10g", 1),
)
RENTED = (
    # devices, the link between them, the network of a node, its rails, USD an hour
    ("p3.2xlarge", 1, "v100-16gb", "nvlink2", "ethernet-10g", 1, 3.06),
    ("p3.8xlarge", 4, "v100-16gb", "nvlink2", "ethernet-10g", 1, 12.24),
    ("p3.16xlarge", 8, "v100-16gb", "nvlink2", "ethernet-25g", 1, 24.48),
    ("p3dn.24xlarge", 8, "v100-32gb", "nvlink2", "efa-100g", 1, 31.212),
    ("p4d.24xlarge", 8, "a100-40gb", "nvlink3", "efa-400g", 4, 32.7726),
    ("p4de.24xlarge", 8, "a100-80gb", "nvlink3", "efa-400g", 4, 40.96575),
    ("p5.48xlarge", 8, "h100-80gb", "nvlink4", "efa-3200g", 8, 98.32),
    ("p5e.48xlarge", 8, "h200-141gb", "nvlink4", "efa-3200g", 8, 43.26),
    ("g5.xlarge", 1, "a10g", "pcie4", "ethernet-10g", 1, 1.006),
    ("g5.12xlarge", 4, "a10g", "pcie4", "ethernet-40g", 1, 5.672),
    ("g5.24xlarge", 4, "a10g", "pcie4", "ethernet-50g", 1, 8.144),
    ("g5.48xlarge", 8, "a10g", "pcie4", "ethernet-100g", 1, 16.288),
    ("g6.xlarge", 1, "l4", "pcie4", "ethernet-10g", 1, 0.8048),
    ("g6.12xlarge", 4, "l4", "pcie4", "ethernet-40g", 1, 4.6016),
    ("g6.24xlarge", 4, "l4", "pcie4", "ethernet-50g", 1, 6.6752),
    ("g6.48xlarge", 8, "l4", "pcie4", "ethernet-100g", 1, 13.3504),
    ("a2-highgpu-1g", 1, "a100-40gb", "nvlink3", "ethernet-24g", 1, 3.6734),
    ("a2-highgpu-2g", 2, "a100-40gb", "nvlink3", "ethernet-32g", 1, 7.3468),
    ("a2-highgpu-4g", 4, "a100-40gb", "nvlink3", "ethernet-50g", 1, 14.6935),
    ("a2-highgpu-8g", 8, "a100-40gb", "nvlink3", "ethernet-100g", 1, 29.3871),
    ("a2-ultragpu-8g", 8, "a100-80gb", "nvlink3", "ethernet-100g", 1, 40.5504),
    ("a3-highgpu-8g", 8, "h100-80gb", "nvlink4", "ethernet-800g", 4, 88.49),
    ("a3-megagpu-8g", 8, "h100-80gb", "nvlink4", "ethernet-1600g", 8, 93.4),
    ("g2-standard-4", 1, "l4", "pcie4", "ethernet-10g", 1, 0.7068),
    ("g2-standard-24", 2, "l4", "pcie4", "ethernet-32g", 1, 1.9984),
    ("g2-standard-48", 4, "l4", "pcie4", "ethernet-50g", 1, 3.9968),
    ("g2-standard-96", 8, "l4", "pcie4", "ethernet-100g", 1, 7.9937),
    ("Standard_ND40rs_v2", 8, "v100-32gb", "nvlink2", "infiniband-100g", 1, 22.032),
    ("Standard_ND96asr_v4", 8, "a100-40gb", "nvlink3", "infiniband-1600g", 8, 27.197),
    ("Standard_ND96amsr_A100_v4", 8, "a100-80gb", "nvlink3", "infiniband-1600g", 8, 32.77),
    ("Standard_ND96isr_H100_v5", 8, "h100-80gb", "nvlink4", "infiniband-3200g", 8, 98.32),
    ("Standard_ND96isr_H200_v5", 8, "h200-141gb", "nvlink4", "infiniband-3200g", 8, 84.8),
)
BANDWIDTHS = {  # GB/s one way
    "nvlink2": 150, "nvlink3": 300, "nvlink4": 450, "nvlink5": 900, "xgmi": 448, "pcie3": 16, "pcie4": 32, "pcie5": 64, "shared-memory": 5,
}
# fmt: on
EXPECTED_DEVICES = tuple(row[0] for row in FIGURES)
EXPECTED_INSTANCES = ("ND40rs_v2", *(row[0] for row in RENTED))


@pytest.mark.parametrize("row", FIGURES, ids=EXPECTED_DEVICES)
def test_devices_have_the_figures_of_their_datasheets(row: tuple[Any, ...]) -> None:
    name, memory_mib, gb_per_s, *tera, intra, inter, rails = row
    device = resolve_device(name)
    assert (device.memory_bytes, device.memory_bandwidth_bytes_per_s) == (memory_mib * 2**20, gb_per_s * 1e9)
    rates = (getattr(device, f"{dtype}_flops_per_s") for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8"))
    assert [None if rate is None else rate / 1e12 for rate in rates] == pytest.approx(tera)
    assert (device.intra, device.inter, device.num_rails) == (LINKS[intra], LINKS[inter], rails)
    node = plain_node(device, 2)
    assert (node.intra, node.inter, node.num_rails, node.price_usd_per_h) == (device.intra, device.inter, rails, None)


@pytest.mark.parametrize("row", RENTED, ids=[row[0] for row in RENTED])
def test_instances_are_those_of_the_price_lists(row: tuple[Any, ...]) -> None:
    name, count, device, intra, inter, rails, usd_per_h = row
    node = resolve_instance(name)
    assert (node.num_devices, node.device, node.intra, node.num_rails) == (count, DEVICES[device], LINKS[intra], rails)
    kind, gbit_per_s = inter.removesuffix("g").split("-")
    assert (node.inter.kind, node.inter.bandwidth_bytes_per_s) == (inter, float(gbit_per_s) * 1e9 / 8)
    assert node.inter.latency_s == LINKS[f"{kind}-100g"].latency_s
    assert node.price_usd_per_h == usd_per_h
    assert re.fullmatch(r"20\d\d-\d\d", node.price_date) and " list" in node.price_source


def test_links_have_the_figures_of_their_standards() -> None:
    inside = {kind: link for kind, link in LINKS.items() if kind in BANDWIDTHS}
    assert {kind: link.bandwidth_bytes_per_s / 1e9 for kind, link in inside.items()} == BANDWIDTHS
    delays = {"nvlink": 4, "xgmi": 5, "pcie": 10, "shared-memory": 20, "ethernet": 30, "efa": 20, "infiniband": 6}
    for kind, link in LINKS.items():
        assert link.latency_s == pytest.approx(next(us for name, us in delays.items() if kind.startswith(name)) / 1e6)
        if kind not in BANDWIDTHS:
            assert link.bandwidth_bytes_per_s == float(kind.removesuffix("g").split("-")[1]) * 1e9 / 8


@pytest.mark.parametrize("name", EXPECTED_DEVICES)
def test_every_device_resolves_with_sane_figures(name: str) -> None:
    device = resolve_device(name)
    assert device.name == name and device.source
    assert device.memory_bytes >= 15 * 2**30
    assert 0 < device.fp32_flops_per_s <= device.peak_flops_per_s("tf32") <= device.peak_flops_per_s("fp16")
    assert device.peak_flops_per_s("bf16") in (device.peak_flops_per_s("fp16"), device.fp32_flops_per_s)
    assert device.peak_flops_per_s("bf16") <= device.peak_flops_per_s("fp8")
    assert device.peak_flops_per_s("torch.bfloat16") == device.peak_flops_per_s("bf16")
    assert device.memory_bandwidth_bytes_per_s > device.intra.bandwidth_bytes_per_s
    assert resolve_cluster(f"3x{name}").kinds == ((device, 3),)


@pytest.mark.parametrize("name", EXPECTED_INSTANCES)
def test_every_instance_resolves_with_sane_figures(name: str) -> None:
    node = resolve_instance(name)
    assert node.name.removeprefix("Standard_") == name.removeprefix("Standard_")
    assert node.num_devices in (1, 2, 4, 8) and node.device.name in DEVICES
    assert node.price_usd_per_h is not None and 0.1 < node.price_usd_per_h / node.num_devices < 13
    assert node.price_date and node.price_source
    assert 1e9 <= node.inter.bandwidth_bytes_per_s <= 400e9
    assert node.inter.latency_s > node.intra.latency_s > 0
    assert resolve_cluster(f"2x{name}").num_devices == 2 * node.num_devices


def test_the_catalogue_holds_nothing_untested() -> None:
    assert set(DEVICES) == set(EXPECTED_DEVICES)
    assert {name.removeprefix("Standard_") for name in INSTANCES} == {name.removeprefix("Standard_") for name in EXPECTED_INSTANCES}


def test_known_figures() -> None:
    h200 = resolve_device("h200")
    assert (h200.memory_bytes, h200.bf16_flops_per_s, h200.memory_bandwidth_bytes_per_s) == (143771 * 2**20, 989e12, 4.8e12)
    assert resolve_device("h100").memory_bytes / 2**30 == pytest.approx(79.6, abs=0.1)
    assert h200.intra.bandwidth_bytes_per_s == 450e9
    p4d = resolve_instance("p4d.24xlarge")
    assert (p4d.price_usd_per_h, p4d.inter.bandwidth_bytes_per_s, p4d.intra.bandwidth_bytes_per_s) == (32.7726, 50e9, 300e9)
    assert resolve_instance("G5.24XLARGE").price_usd_per_h == 8.144


@pytest.mark.parametrize("name", ["t4", "v100-16gb", "v100-32gb"])
def test_devices_without_bf16_answer_with_fp32_which_emulates_it_and_say_so(name: str) -> None:
    device = resolve_device(name)
    assert device.bf16_flops_per_s is None and not device.supports("bf16") and device.supports("fp16")
    assert device.peak_flops_per_s("bf16") == device.fp32_flops_per_s


def test_unknown_names_are_answered_with_near_ones() -> None:
    with pytest.raises(InputError, match=r"'a100-40g'.*Did you mean 'a100-40gb'"):
        resolve_device("a100-40g")
    with pytest.raises(InputError, match="'a100-40gb' or 'a100-80gb'"):
        resolve_device("a100")
    with pytest.raises(InputError, match=r"'p4d\.24xlarge' or 'p4de\.24xlarge'"):
        resolve_instance("p4d")
    with pytest.raises(InputError, match=r"'nvlink9'.*nvlink"):
        resolve_link("nvlink9")
    with pytest.raises(InputError, match=r"dtype 'bf61'.*'bf16'"):
        resolve_device("cpu").peak_flops_per_s("bf61")


def test_every_link_kind_resolves() -> None:
    for kind in LINKS:
        assert resolve_link(kind.upper()).kind == kind


def test_import_brings_no_heavy_module() -> None:
    script = (
        "import sys, penstock.clusters; print([m for m in ('torch', 'numba', 'numpy', 'pydantic', 'yaml', 'msgspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "[]"
