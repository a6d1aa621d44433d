"""The catalogue: every entry resolves, its figures are sane, wrong names are answered with the near ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.clusters import DEVICES, INSTANCES, resolve_cluster, resolve_device, resolve_instance
from penstock.clusters.links import LINKS, resolve_link
from penstock.errors import InputError

# fmt: off
EXPECTED_DEVICES = (
    "v100-16gb", "v100-32gb", "a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "b200", "a10g",
    "a10", "l4", "l40s", "t4", "rtx3090", "rtx4090", "mi300x", "cpu",
)
EXPECTED_INSTANCES = (
    "p3.2xlarge", "p3.8xlarge", "p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge",
    "p5.48xlarge", "p5e.48xlarge", "g5.xlarge", "g5.12xlarge", "g5.24xlarge", "g5.48xlarge",
    "g6.xlarge", "g6.12xlarge", "g6.24xlarge", "g6.48xlarge", "a2-highgpu-1g", "a2-highgpu-2g",
    "a2-highgpu-4g", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g", "g2-standard-4",
    "g2-standard-24", "g2-standard-48", "g2-standard-96", "Standard_ND96asr_v4", "Standard_ND96amsr_A100_v4", "Standard_ND96isr_H100_v5",
    "Standard_ND96isr_H200_v5", "ND40rs_v2",
)
# fmt: on


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
