"""Cluster files and price files: what they may say, and how wrong ones are answered."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import Link, cluster_from_dict, cluster_to_dict, resolve_cluster, with_measured_links
from penstock.clusters.cluster_file import parse_cluster
from penstock.errors import InputError

FULL = """
name: mixed
devices:
  - {name: npu, memory_gb: 64, memory_bandwidth_gb_per_s: 1600, fp32_tflops: 20, bf16_tflops: 300, intra: nvlink3}
nodes:
  - {instance: p4d.24xlarge, count: 2, price_usd_per_h: 20, memory_limit_gb: 36}
  - {name: box, device: npu, gpus: 3, inter: {bandwidth_gb_per_s: 12.5, latency_us: 20}, price_usd_per_h: 4}
  - {name: desk, device: rtx4090, gpus: 2, intra: pcie3, inter: {kind: ethernet-10g, latency_us: 99}, count: 2}
links:
  - {between: [box, desk], bandwidth_gb_per_s: 0.5, latency_us: 50}
  - {between: ["node:0-1", "node:0-1"], bandwidth_gb_per_s: 7}
  - {between: [16, "17-18"], kind: nvlink4}
"""


def _write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_with_everything(tmp_path: Path) -> None:
    cluster = resolve_cluster(_write(tmp_path, FULL))
    assert cluster.describe() == "2 × p4d.24xlarge (8 × a100-40gb) + 1 × box (3 × npu) + 2 × desk (2 × rtx4090)"
    assert (cluster.name, cluster.num_devices, cluster.price_usd_per_h) == ("mixed", 23, None)
    assert cluster.device(0).memory_bytes == 36e9
    assert cluster.device(16).peak_flops_per_s("bf16") == 300e12 and cluster.device(16).memory_bytes == 64e9
    assert cluster.link(0, 1).kind == "nvlink3"
    assert cluster.link(0, 8) == Link("custom", 7e9, 20e-6)
    assert cluster.link(16, 18).kind == "nvlink4" and cluster.link(17, 18).kind == "nvlink3"
    assert cluster.link(18, 22) == Link("custom", 0.5e9, 50e-6)
    assert cluster.link(19, 20).kind == "pcie3"
    assert cluster.link(19, 21) == Link("ethernet-10g", 1.25e9, 99e-6)
    assert cluster_from_dict(cluster_to_dict(cluster)) == cluster


def test_every_figure_of_a_device_of_ones_own_is_taken() -> None:
    rates = {"fp32": 20, "tf32": 30, "fp16": 40, "bf16": 50, "fp8": 60}
    own = {"name": "npu", "memory_gb": 64, "memory_bandwidth_gb_per_s": 1600, **{f"{dtype}_tflops": rate for dtype, rate in rates.items()}}
    device = parse_cluster({"devices": [own], "nodes": [{"device": "NPU", "gpus": 1, "memory_limit_gb": 64}]}, "file", "name").device(0)
    assert (device.memory_bytes, device.memory_bandwidth_bytes_per_s) == (64e9, 1600e9)
    assert {dtype: getattr(device, f"{dtype}_flops_per_s") / 1e12 for dtype in rates} == rates
    assert (device.intra.kind, device.inter.kind) == ("pcie4", "ethernet-100g")


def test_a_link_to_a_node_leaves_links_inside_that_node_alone() -> None:
    """Even if its other end is a rank of the node itself."""
    nodes = [{"instance": "p4d.24xlarge", "count": 2}]
    cluster = parse_cluster({"nodes": nodes, "links": [{"between": ["node:0-1", 1], "bandwidth_gb_per_s": 1}]}, "file", "name")
    assert [cluster.link(*pair).bandwidth_bytes_per_s for pair in ((0, 1), (1, 8), (9, 1), (0, 8))] == [300e9, 1e9, 1e9, 50e9]


def test_numbers_with_an_exponent_and_names_that_were_words_once(tmp_path: Path) -> None:
    text = "nodes: [{name: no, device: a100-40gb, gpus: 1, memory_limit_gb: 3e1}, {name: on, device: a100-40gb, gpus: 1}]\n"
    cluster = resolve_cluster(_write(tmp_path, text + "links: [{between: [no, on], bandwidth_gb_per_s: 1e1}]\n"))
    assert cluster.device(0).memory_bytes == 30e9 and cluster.link(0, 1).bandwidth_bytes_per_s == 10e9


def test_a_network_of_the_files_own_is_one_path_unless_it_says_more(tmp_path: Path) -> None:
    """A p4d has four rails of 12.5 GB/s, of which one device alone drives one."""
    alone = []
    for more in ("", ", inter: {bandwidth_gb_per_s: 40}", ", inter: {bandwidth_gb_per_s: 40}, rails: 2", ", rails: 8"):
        cluster = resolve_cluster(_write(tmp_path, f"nodes: [{{instance: p4d.24xlarge, count: 2{more}}}]\n"))
        alone.append(cluster.flow_bandwidth_bytes_per_s(0, 8))
    assert alone == [12.5e9, 40e9, 20e9, 6.25e9]


def test_what_is_given_for_nothing_costs_nothing(tmp_path: Path) -> None:
    """And not what the catalogue says."""
    cluster = resolve_cluster(
        _write(tmp_path, "nodes: [{instance: p4d.24xlarge, price_usd_per_h: 0}, {instance: g5.24xlarge, price_usd_per_h: 2}]\n")
    )
    assert cluster.price_usd_per_h == 2.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["None", "nodes"]),
        ("- 1", ["mapping"]),
        ("nodes: []", ["nodes", "[]"]),
        ("nodes: 7", ["nodes", "7"]),
        ("name: x", ["nodes", "required"]),
        ("nodes: [{instnce: p4d.24xlarge}]", ["nodes.0.instnce", "'instance'"]),
        ("nodez: [{instance: p4d.24xlarge}]", ["nodez", "'nodes'"]),
        ("nodes: [{instance: p4d.24xlrge}]", ["nodes.0", "instance", "'p4d.24xlrge'", "'p4d.24xlarge'"]),
        ("nodes: [{instance: t4, count: many}]", ["nodes.0.count", "'many'", "integer"]),
        ("nodes: [{instance: p4d.24xlarge, count: 0}]", ["nodes.0.count", "0", "greater than or equal to 1"]),
        ("nodes: [{instance: p4d.24xlarge, count: true}]", ["nodes.0.count", "True"]),
        ("nodes: [{instance: p4d.24xlarge, gpus: 4}]", ["nodes.0", "gpus", "4", "contradicts"]),
        ("nodes: [{device: t4}]", ["nodes.0", "gpus", "missing"]),
        ("nodes: [{gpus: 4}]", ["nodes.0", "device", "missing"]),
        ("nodes: [{device: t5, gpus: 4}]", ["nodes.0", "device", "'t5'", "'t4'"]),
        ("nodes: [{device: a100, gpus: 4}]", ["nodes.0", "device", "'a100-40gb' or 'a100-80gb'"]),
        ("nodes: [{device: t4, gpus: -1}]", ["nodes.0.gpus", "-1"]),
        ("nodes: [{device: t4, gpus: 1, intra: nvlnk3}]", ["nodes.0", "intra.kind", "'nvlnk3'", "'nvlink3'"]),
        ("nodes: [{device: t4, gpus: 1, intra: {bandwidth_gbps: 3}}]", ["nodes.0.intra.bandwidth_gbps", "'bandwidth_gb_per_s'"]),
        ("nodes: [{device: t4, gpus: 1, inter: {bandwidth_gb_per_s: -2}}]", ["nodes.0.inter.bandwidth_gb_per_s", "-2"]),
        ("nodes: [{device: t4, gpus: 1, inter: {bandwidth_gb_per_s: .inf}}]", ["nodes.0.inter.bandwidth_gb_per_s", "inf"]),
        ("nodes: [{device: t4, gpus: 1, inter: [1, 2]}]", ["nodes.0.inter", "[1, 2]"]),
        ("nodes: [{device: t4, gpus: 1, price_usd_per_h: free}]", ["nodes.0.price_usd_per_h", "'free'"]),
        ("nodes: [{device: t4, gpus: 1, memory_limit_gb: 99}]", ["nodes.0", "memory_limit_gb", "99", "16.1 GB"]),
        ("{nodes: [{device: t4, gpus: 2}], links: [{between: [0, 2], kind: pcie4}]}", ["links.0", "between", "'2'", "ranks 0 to 1"]),
        ("{nodes: [{device: t4, gpus: 2}], links: [{between: [0], kind: pcie4}]}", ["links.0.between"]),
        ("{nodes: [{device: t4, gpus: 2}], links: [{between: [0, 1.5], kind: pcie4}]}", ["links.0.between.1", "1.5"]),
        ("{nodes: [{device: t4, gpus: 2}], links: [{between: [1, bx], kind: pcie4}]}", ["links.0", "between", "'bx'", "node:0-3"]),
        ("{nodes: [{device: t4, gpus: 2}], links: [{between: [0, 1]}]}", ["links.0", "bandwidth_gb_per_s", "missing"]),
        ("{nodes: [{device: t4, gpus: 2}], devices: [{name: n}]}", ["devices.0.memory_gb", "required"]),
        ("nodes: [{instance: p4d.24xlarge", ["not valid YAML", "line 1"]),
    ],
)
def test_wrong_files_name_the_field_and_the_value(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(InputError) as error:
        resolve_cluster(path)
    assert all(part in str(error.value) for part in [path, *parts]), str(error.value)


def test_a_device_may_be_defined_once_only() -> None:
    device = {"name": "n", "memory_gb": 1, "memory_bandwidth_gb_per_s": 1, "fp32_tflops": 1}
    with pytest.raises(InputError, match=r"devices\.1.*'n' is given twice"):
        parse_cluster({"devices": [device, device], "nodes": [{"device": "n", "gpus": 1}]}, "file", "name")
    with pytest.raises(InputError, match=r"device: device 'm' is not known"):
        parse_cluster({"devices": [device], "nodes": [{"device": "m", "gpus": 1}]}, "file", "name")


def test_an_explosive_file_is_answered_shortly(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]\n" for i in range(1, 12))
    with pytest.raises(InputError) as error:
        resolve_cluster(_write(tmp_path, bomb + "nodes: *a11\n"))
    assert len(str(error.value)) < 20_000


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["t4", "p4d.24xlarge", "pcie4"])
_FIELDS = st.sampled_from(
    ["instance", "name", "device", "gpus", "intra", "inter", "count", "rails", "price_usd_per_h", "memory_limit_gb", "between", "kind"]
)
_ENTRY = st.dictionaries(_FIELDS, _SCALARS | st.lists(_SCALARS, max_size=2) | st.dictionaries(_FIELDS, _SCALARS, max_size=2), max_size=4)


@settings(deadline=None)
@given(st.fixed_dictionaries({"nodes": st.lists(_ENTRY, max_size=2)}, optional={"links": st.lists(_ENTRY, max_size=2)}))
def test_anything_else_is_a_cluster_or_an_input_error(data: object) -> None:
    try:
        cluster = parse_cluster(data, "file", "drawn")
    except InputError:
        return
    assert cluster_from_dict(cluster_to_dict(cluster)) == cluster


def test_measured_links_replace_the_catalogue() -> None:
    inside, between = Link("measured", 200e9, 3e-6), Link("measured", 11e9, 30e-6)
    cluster = with_measured_links(resolve_cluster("2xp4d.24xlarge+1xg5.24xlarge"), {"intra:a100-40gb": inside, "inter": between})
    assert cluster.link(0, 1) == inside
    assert cluster.link(0, 8) == cluster.link(0, 16) == between
    assert cluster.link(16, 17).kind == "pcie4"
    assert cluster.flow_bandwidth_bytes_per_s(0, 8, num_flows=2) == 5.5e9
    with pytest.raises(InputError, match="'intre'"):
        with_measured_links(cluster, {"intre": inside})


@pytest.mark.parametrize("between", [[3, 3], ["node:1", "node:1"], ["node:1-1", "node:1-1"]])
def test_a_link_to_itself_is_refused(between: list[object]) -> None:
    data = {"nodes": [{"device": "a100-40gb", "gpus": 4, "count": 2}], "links": [{"between": between, "bandwidth_gb_per_s": 1.0}]}
    with pytest.raises(InputError, match=r"links\.0: between: .* is given twice"):
        parse_cluster(data, "cluster file", "own")


def test_links_among_many_ranks_are_no_link_to_itself() -> None:
    data = {"nodes": [{"device": "a100-40gb", "gpus": 4, "count": 2}], "links": [{"between": ["0-3", "0-3"], "bandwidth_gb_per_s": 1.0}]}
    assert parse_cluster(data, "cluster file", "own").link(0, 3).bandwidth_bytes_per_s == 1e9


@pytest.mark.parametrize("field", ["memory_gb", "fp32_tflops", "memory_bandwidth_gb_per_s"])
def test_figures_beyond_any_device_are_refused(field: str) -> None:
    device = {"name": "own", "memory_gb": 10.0, "fp32_tflops": 10.0, "memory_bandwidth_gb_per_s": 100.0} | {field: 1e300}
    with pytest.raises(InputError, match=rf"devices\.0\.{field}: Input should be less than or equal to"):
        parse_cluster({"devices": [device], "nodes": [{"device": "own", "gpus": 1}]}, "cluster file", "own")
