"""The device catalogue: what each accelerator kind can hold and do, with where the figures come from.

Memory is what the driver reports (`memory.total` of nvidia-smi or rocm-smi), as for `local`: 79.6 GiB of an "80 GB" H100. What CUDA and
NCCL keep of it for themselves is no part of it; plans count that, see `costs.memory`. Rates are dense and accumulate in fp32, as training
does.
"""

from __future__ import annotations

from penstock.clusters.hardware import Device, unknown_name
from penstock.clusters.links import resolve_link
from penstock.errors import InputError

__all__ = ["CPU_CORES", "DEVICES", "find_device", "resolve_device"]


# The network, and its rails, of the usual eight-device machine with such links (DGX-1, DGX A100, DGX H100, a server of PCIe cards).
_NETWORKS = {
    "nvlink2": ("infiniband-400g", 4),
    "nvlink3": ("infiniband-1600g", 8),
    "nvlink4": ("infiniband-3200g", 8),
    "nvlink5": ("infiniband-3200g", 8),
    "xgmi": ("infiniband-3200g", 8),
    "pcie3": ("ethernet-25g", 1),
    "pcie4": ("ethernet-100g", 1),
    "shared-memory": ("ethernet-10g", 1),
}


def _device(
    name: str,
    source: str,
    *,
    memory_mib: int,
    gb_per_s: float,
    fp32: float,
    tf32: float | None = None,
    fp16: float | None = None,
    bf16: float | None = None,
    fp8: float | None = None,
    intra: str = "pcie4",
) -> Device:
    """A catalogue entry; rates in 10¹² per second."""
    inter, num_rails = _NETWORKS[intra]

    def rate(tera: float | None) -> float | None:
        return None if tera is None else tera * 1e12

    return Device(
        name=name,
        memory_bytes=memory_mib * 2**20,
        memory_bandwidth_bytes_per_s=gb_per_s * 1e9,
        fp32_flops_per_s=fp32 * 1e12,
        tf32_flops_per_s=rate(tf32),
        fp16_flops_per_s=rate(fp16),
        bf16_flops_per_s=rate(bf16),
        fp8_flops_per_s=rate(fp8),
        intra=resolve_link(intra),
        inter=resolve_link(inter),
        num_rails=num_rails,
        source=source,
    )


_V100 = "NVIDIA V100 datasheet (SXM2), 2020"
_A100 = "NVIDIA A100 datasheet (SXM4), 2021"
_H100 = "NVIDIA H100 datasheet (SXM5), 2023; its rates with sparsity, halved"
_H200 = "NVIDIA H200 datasheet (SXM5), 2024; its rates with sparsity, halved"
_B200 = "NVIDIA HGX B200 datasheet, 2024; an eighth of the board, its rates with sparsity, halved"
_A10G = "NVIDIA A10G datasheet (AWS G5), 2021"
_L4 = "NVIDIA L4 datasheet, 2023; its rates with sparsity, halved"
_AMPERE = "NVIDIA GA102 whitepaper, 2021; matrix rates with fp32 accumulation"
_ADA = "NVIDIA Ada whitepaper, 2022; matrix rates with fp32 accumulation"
_AMD = "AMD Instinct MI300X data sheet, 2023"
_CPU = "assumed, not a datasheet: 4 cores with 50 Gflop/s and 10 GB/s each; bf16 is emulated"

_CATALOGUE = (
    _device("v100-16gb", _V100, memory_mib=16384, gb_per_s=900, fp32=15.7, fp16=125, intra="nvlink2"),
    _device("v100-32gb", _V100, memory_mib=32768, gb_per_s=900, fp32=15.7, fp16=125, intra="nvlink2"),
    _device("a100-40gb", _A100, memory_mib=40960, gb_per_s=1555, fp32=19.5, tf32=156, fp16=312, bf16=312, intra="nvlink3"),
    _device("a100-80gb", _A100, memory_mib=81920, gb_per_s=2039, fp32=19.5, tf32=156, fp16=312, bf16=312, intra="nvlink3"),
    _device("h100-80gb", _H100, memory_mib=81559, gb_per_s=3350, fp32=67, tf32=494.5, fp16=989, bf16=989, fp8=1979, intra="nvlink4"),
    _device("h200-141gb", _H200, memory_mib=143771, gb_per_s=4800, fp32=67, tf32=494.5, fp16=989, bf16=989, fp8=1979, intra="nvlink4"),
    _device("b200", _B200, memory_mib=183359, gb_per_s=8000, fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500, intra="nvlink5"),
    _device("a10g", _A10G, memory_mib=23028, gb_per_s=600, fp32=31.5, tf32=35, fp16=70, bf16=70),
    _device("a10", "NVIDIA A10 datasheet, 2021", memory_mib=23028, gb_per_s=600, fp32=31.2, tf32=62.5, fp16=125, bf16=125),
    _device("l4", _L4, memory_mib=23034, gb_per_s=300, fp32=30.3, tf32=60, fp16=121, bf16=121, fp8=242.5),
    _device("l40s", "NVIDIA L40S datasheet, 2023", memory_mib=46068, gb_per_s=864, fp32=91.6, tf32=183, fp16=362, bf16=362, fp8=733),
    _device("t4", "NVIDIA T4 datasheet, 2019", memory_mib=15360, gb_per_s=320, fp32=8.1, fp16=65, intra="pcie3"),
    _device("rtx3090", _AMPERE, memory_mib=24576, gb_per_s=936, fp32=35.6, tf32=35.6, fp16=71.2, bf16=71.2),
    _device("rtx4090", _ADA, memory_mib=24564, gb_per_s=1008, fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3),
    _device("mi300x", _AMD, memory_mib=196592, gb_per_s=5300, fp32=163.4, tf32=653.7, fp16=1307.4, bf16=1307.4, fp8=2614.9, intra="xgmi"),
    _device("cpu", _CPU, memory_mib=16384, gb_per_s=40, fp32=0.2, intra="shared-memory"),
)
DEVICES = {device.name: device for device in _CATALOGUE}
CPU_CORES = 4
"""Cores behind the rates of the catalogue's `cpu`."""
_ALIASES = {"h100": "h100-80gb", "h200": "h200-141gb"}


def find_device(name: str) -> Device | None:
    """The device of a catalogue name or alias, None if there is none; a name that fits several ('a100') is refused."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    sizes = [known for known in DEVICES if known.startswith(f"{key}-")]
    if sizes:
        raise InputError(f"device {name!r} comes in several sizes; say which: {' or '.join(repr(size) for size in sizes)}.")
    return DEVICES.get(key)


def resolve_device(name: str) -> Device:
    """The device of a name; an unknown one is refused with the nearest."""
    device = find_device(name)
    if device is None:
        raise unknown_name("device", name, DEVICES)
    return device
