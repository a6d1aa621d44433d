"""Detection of this machine, on texts as nvidia-smi prints them."""

from __future__ import annotations

import pytest

from penstock.clusters import local, resolve_cluster
from penstock.clusters.local import cpu_cluster, gpu_cluster, match_device, parse_meminfo
from penstock.clusters.topology import Gpu, order_by_link, pair_link, parse_gpus, parse_topology, visible_gpus


def _query(name: str, memory_mib: int, count: int, generation: str = "4") -> str:
    return "".join(f"{i}, GPU-{i:04x}, {memory_mib}, {generation}, 16, {name}\n" for i in range(count))


# Four cards in two NVLink pairs, 0-2 and 1-3; with network cards, escape codes and the legend.
PAIRS = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tSYS\tNV4\tSYS\tPHB\t0-31\t0\t\tN/A
GPU1\tSYS\t X \tSYS\tNV4\tSYS\t32-63\t1\t\tN/A
GPU2\tNV4\tSYS\t X \tSYS\tPHB\t0-31\t0\t\tN/A
GPU3\tSYS\tNV4\tSYS\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPHB\tSYS\tPHB\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks
NIC Legend:

  NIC0: mlx5_0
"""

# The hybrid cube mesh of eight V100: double links form a ring.
CUBE = """\
        GPU0    GPU1    GPU2    GPU3    GPU4    GPU5    GPU6    GPU7    CPU Affinity
GPU0     X      NV1     NV1     NV2     NV2     SYS     SYS     SYS     0-31
GPU1    NV1      X      NV2     NV1     SYS     NV2     SYS     SYS     0-31
GPU2    NV1     NV2      X      NV2     SYS     SYS     NV1     SYS     0-31
GPU3    NV2     NV1     NV2      X      SYS     SYS     SYS     NV1     0-31
GPU4    NV2     SYS     SYS     SYS      X      NV1     NV1     NV2     32-63
GPU5    SYS     NV2     SYS     SYS     NV1      X      NV2     NV1     32-63
GPU6    SYS     SYS     NV1     SYS     NV1     NV2      X      NV2     32-63
GPU7    SYS     SYS     SYS     NV1     NV2     NV1     NV2      X      32-63
"""

# PCIe only: switches pair 0-3 and 1-2, all on one socket but for 4 and 5.
SWITCHES = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5
GPU0\t X \tNODE\tNODE\tPIX\tSYS\tSYS
GPU1\tNODE\t X \tPXB\tNODE\tSYS\tSYS
GPU2\tNODE\tPXB\t X \tNODE\tSYS\tSYS
GPU3\tPIX\tNODE\tNODE\t X \tSYS\tSYS
GPU4\tSYS\tSYS\tSYS\tSYS\t X \tPHB
GPU5\tSYS\tSYS\tSYS\tSYS\tPHB\t X
"""


def test_devices_are_read_and_noise_is_not() -> None:
    gpus = parse_gpus("Warning: persistence mode is off\n" + _query("NVIDIA H200", 143771, 1, "5"))
    assert gpus == [Gpu(0, "GPU-0000", "NVIDIA H200", 143771 * 2**20, 64e9)]
    assert parse_gpus("0, GPU-1, 15360, [N/A], [N/A], Tesla T4")[0].pcie_bytes_per_s == 32e9
    assert parse_gpus("No devices were found") == []


def test_topology_is_read() -> None:
    pairs = parse_topology(PAIRS)
    assert len(pairs) == 12 and (pairs[0, 2], pairs[3, 1], pairs[0, 3]) == ("NV4", "NV4", "SYS")
    assert len(parse_topology(CUBE)) == 56
    assert parse_topology("") == {} == parse_topology("GPU0\t X \t0-31")


@pytest.mark.parametrize(
    ("text", "order"), [(PAIRS, [0, 2, 1, 3]), (CUBE, [0, 3, 2, 1, 5, 6, 7, 4]), (SWITCHES, [0, 3, 1, 2, 4, 5]), ("", [0, 1, 2])]
)
def test_neighbours_are_ordered_by_link(text: str, order: list[int]) -> None:
    assert order_by_link(sorted(order), parse_topology(text)) == order


def test_ranks_follow_the_topology() -> None:
    cluster = gpu_cluster(parse_gpus(_query("NVIDIA A100-SXM4-40GB", 40960, 4)), parse_topology(PAIRS))
    assert [cluster.device_id(rank) for rank in range(4)] == [0, 2, 1, 3]
    assert cluster.describe() == "1 × local (4 × a100-40gb)"
    assert cluster.device(0).memory_bytes == 40 * 2**30
    assert cluster.link(0, 1).kind == cluster.link(2, 3).kind == "nv4"
    assert cluster.link(0, 1).bandwidth_bytes_per_s == 100e9
    assert cluster.link(1, 2).kind == "pcie-sys" and cluster.link(1, 2).bandwidth_bytes_per_s == 16e9


def test_lanes_of_nvlink_are_as_wide_as_their_generation_is() -> None:
    """Eighteen of 25 GB/s are an H100's 450, eighteen of 50 a B200's 900."""
    rates = {name: pair_link(name, 64e9, "NV18") for name in ("h100-80gb", "b200")}
    assert {name: link and link.bandwidth_bytes_per_s for name, link in rates.items()} == {"h100-80gb": 450e9, "b200": 900e9}


def test_one_device_needs_no_topology() -> None:
    cluster = gpu_cluster(parse_gpus(_query("NVIDIA H200", 143771, 1)), {})
    assert (cluster.num_devices, cluster.device(0).name, cluster.overrides) == (1, "h200-141gb", ())


def test_unequal_cards_of_a_kind_have_what_all_of_them_have() -> None:
    """Of two cards one has less memory, and the other hangs on half as many lanes."""
    less, narrow = "0, GPU-a, 24000, 4, 16, NVIDIA GeForce RTX 3090\n", "1, GPU-b, 24576, 4, 8, NVIDIA GeForce RTX 3090\n"
    for text in (less + narrow, narrow.replace("1,", "0,", 1) + less.replace("0,", "1,", 1)):
        cluster = gpu_cluster(parse_gpus(text), {pair: "PIX" for pair in ((0, 1), (1, 0))})
        assert (cluster.num_devices, cluster.device(1).memory_bytes) == (2, 24000 * 2**20)
        assert cluster.link(0, 1).bandwidth_bytes_per_s == 16e9


def test_mixed_cards_become_a_node_each() -> None:
    big, small = "24576, 4, 16, NVIDIA GeForce RTX 3090", "15360, 3, 16, Tesla T4"
    text = f"0, GPU-a, {big}\n1, GPU-b, {small}\n2, GPU-c, {big}\n"
    matrix = "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tPHB\tNV4\nGPU1\tPHB\t X \tPHB\nGPU2\tNV4\tPHB\t X\n"
    cluster = gpu_cluster(parse_gpus(text), parse_topology(matrix))
    assert cluster.describe() == "1 × local (2 × rtx3090) + 1 × local (1 × t4)"
    assert [cluster.device_id(rank) for rank in range(3)] == [0, 2, 1]
    assert cluster.link(0, 1).bandwidth_bytes_per_s == 56.25e9
    assert cluster.link(0, 2).kind == cluster.link(1, 2).kind == "pcie-phb"
    assert cluster.link(0, 2).bandwidth_bytes_per_s == pytest.approx(0.8 * 16e9)


@pytest.mark.parametrize(
    ("name", "memory_mib", "expected"),
    [
        ("Tesla V100-SXM2-16GB", 16160, "v100-16gb"),
        ("Tesla V100-SXM2-32GB", 32510, "v100-32gb"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100-80gb"),
        ("NVIDIA A10G", 23028, "a10g"),
        ("NVIDIA A10", 23028, "a10"),
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA GeForce RTX 4090", 24564, "rtx4090"),
        ("NVIDIA TITAN Xp", 12196, "nvidia-titan-xp"),
    ],
)
def test_driver_names_find_their_device(name: str, memory_mib: int, expected: str) -> None:
    device = match_device(name, memory_mib * 2**20)
    assert (device.name, device.memory_bytes) == (expected, memory_mib * 2**20)


def test_visible_devices() -> None:
    gpus = parse_gpus(_query("Tesla T4", 15360, 4))
    assert visible_gpus(gpus, None) == gpus
    assert [gpu.index for gpu in visible_gpus(gpus, "3, 1")] == [3, 1]
    assert [gpu.index for gpu in visible_gpus(gpus, "GPU-0002,9,0")] == [2]
    assert visible_gpus(gpus, "") == visible_gpus(gpus, "-1") == []
    cluster = gpu_cluster(visible_gpus(gpus, "3,1"), {})
    assert [cluster.device_id(rank) for rank in range(2)] == [1, 0]


def test_processor() -> None:
    one, many = (cpu_cluster(cores, 8 * 2**30).device(0) for cores in (1, 16))
    assert many.fp32_flops_per_s == pytest.approx(16 * one.fp32_flops_per_s)
    assert many.memory_bandwidth_bytes_per_s == pytest.approx(16 * one.memory_bandwidth_bytes_per_s)
    assert many.memory_bytes == 8 * 2**30
    assert parse_meminfo("MemFree: 1 kB\nMemTotal:       16384 kB\n") == 16384 * 1024
    assert parse_meminfo("") is None


@pytest.mark.parametrize(
    ("limit", "expected"), [("4294967296\n", 2**32), ("max\n", 8 * 2**30), ("", 8 * 2**30), (f"{2**40}\n", 8 * 2**30)]
)
def test_a_container_has_no_more_memory_than_it_may(monkeypatch: pytest.MonkeyPatch, limit: str, expected: int) -> None:
    said = {"/proc/meminfo": f"MemTotal: {8 * 2**20} kB\n", "/sys/fs/cgroup/memory.max": limit}
    monkeypatch.setattr(local, "_text", said.__getitem__)
    monkeypatch.setattr(local, "_output", lambda *command: "")
    assert resolve_cluster("local").device(0).memory_bytes == expected


def test_local_without_nvidia_smi_is_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_output", lambda *command: "")
    cluster = resolve_cluster("local")
    assert (cluster.num_devices, cluster.device(0).name) == (1, "cpu")
    assert cluster.device(0).memory_bytes > 2**28


def test_local_with_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "_output", lambda *command: CUBE if "topo" in command else _query("Tesla V100-SXM2-16GB", 16160, 8, "3"))
    cluster = resolve_cluster("local")
    assert [cluster.device_id(rank) for rank in range(8)] == [0, 3, 2, 1, 5, 6, 7, 4]
    assert all(cluster.link(rank, rank + 1).kind == "nv2" for rank in range(7))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,4")
    assert resolve_cluster("local").num_devices == 2


def test_the_processor_has_the_cores_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of Slurm, or a container, has fewer than the machine."""
    monkeypatch.setattr(local, "_output", lambda *command: "")
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda process: {2, 3, 7})
    assert resolve_cluster("local").device(0).fp32_flops_per_s == pytest.approx(3 * 50e9)
