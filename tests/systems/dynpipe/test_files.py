"""DynPipe's topology and partition files: round trips, the published shapes, wrong fields by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.systems.dynpipe.files import (
    DynPipePartition,
    Topology,
    read_files,
    read_partition,
    read_topology,
    require_match,
    write_files,
    write_partition,
    write_topology,
)

TOPOLOGY = {"module_to_stage_map": [0, 1, 2, 2], "stage_to_rank_map": {"0": [0, 1, 2, 3, 4, 5], "1": [6], "2": [7]}}
PARTITION = {"partition": [15, 5, 18], "recompute_ratio": [0, 0.5, 0], "batch_size_all": [72], "batch_size": [12, 72, 72]}


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "file.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_the_published_plan_of_vgg16_on_eight_gpus(tmp_path: Path) -> None:
    topology, partition = read_topology(written(tmp_path, TOPOLOGY)), read_partition(written(tmp_path, PARTITION))
    assert topology == Topology((0, 1, 2, 2), ((0, 1, 2, 3, 4, 5), (6,), (7,))) and topology.num_stages == 3
    assert partition == DynPipePartition((15, 5, 18), (0, 0.5, 0), (72,), (12, 72, 72))
    require_match(topology, partition)
    write_topology(tmp_path / "t.json", topology)
    write_partition(tmp_path / "p.json", partition)
    assert json.loads((tmp_path / "t.json").read_text()) == TOPOLOGY and json.loads((tmp_path / "p.json").read_text()) == PARTITION


STAGE = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 90), st.floats(0, 1))


@given(st.lists(STAGE, min_size=1, max_size=12), st.booleans())
def test_round_trips(tmp_path_factory: pytest.TempPathFactory, stages: list[tuple[int, int, int, float]], depths: bool) -> None:
    folder = tmp_path_factory.mktemp("dynpipe")
    modules = [stage for stage, (_, copies, _, _) in enumerate(stages) for _ in range(copies)]
    ranks, start = [], 0
    for width, *_ in stages:
        ranks.append(tuple(range(start, start + width)))
        start += width
    depth = tuple(range(len(stages), 0, -1)) if depths else None
    topology = Topology((*modules, len(stages) - 1), tuple(ranks), depth)
    partition = DynPipePartition(tuple(s[2] for s in stages), tuple(s[3] for s in stages), (12,), tuple(12 // s[0] for s in stages))
    write_topology(folder / "t.json", topology)
    write_partition(folder / "p.json", partition)
    assert read_topology(folder / "t.json") == topology and read_partition(folder / "p.json") == partition
    require_match(topology, partition)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"module_to_stage_map": [0, 2, 1, 1]}, "module_to_stage_map is [0, 2, 1, 1]"),
        ({"module_to_stage_map": [0, 1, 2]}, "the criterion shares"),
        ({"module_to_stage_map": [0]}, "has 1 entry"),
        ({"module_to_stage_map": [0, 1, 2, "2"]}, "module_to_stage_map.3"),
        ({"module_to_stage_map": [0, 1, 2, -2]}, "module_to_stage_map.3"),
        ({"module_to_stage_map": [0] * 99}, "[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, …]"),
        ({"stage_to_rank_map": [[0]]}, "stage_to_rank_map must be an object"),
        ({"stage_to_rank_map": {"0": [0], "2": [1]}}, "stage_to_rank_map must be an object"),
        ({"stage_to_rank_map": {"0": [0], "1": [], "2": [1]}}, "every stage needs a rank"),
        ({"stage_to_rank_map": {"0": [0], "1": [0], "2": [1]}}, "every rank belongs to one stage"),
        ({"stage_to_rank_map": {"0": [True], "1": [0], "2": [1]}}, "stage_to_rank_map.0.0"),
        ({"stage_to_depth_map": {"0": 1}}, "stage_to_depth_map has 1 entry for 3 stages"),
        ({"stages": 3}, "stages"),
    ],
)
def test_wrong_topologies(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_topology(written(tmp_path, {**TOPOLOGY, **change}))
    assert named in str(refused.value) and "file.json" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"partition": []}, "partition is empty"),
        ({"partition": [0, 5, 18]}, "partition.0"),
        ({"partition": [38]}, "batch_size has 3 entries, partition has 1"),
        ({"recompute_ratio": [0, 1.5, 0]}, "recompute_ratio.1"),
        ({"recompute_ratio": [0, 0]}, "recompute_ratio has 2 entries"),
        ({"batch_size_all": [72, 72]}, "batch_size_all"),
        ({"batch_size_all": 72}, "batch_size_all"),
        ({"batch_size": [13, 72, 72]}, "batch_size.0 is 13, which does not divide batch_size_all 72"),
        ({"extra": 1}, "extra"),
    ],
)
def test_wrong_partitions(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        read_partition(written(tmp_path, {**PARTITION, **change}))
    assert named in str(refused.value)


@pytest.mark.parametrize("data", [[], 3, None, "x", {}])
def test_other_values(data: object, tmp_path: Path) -> None:
    for read in (read_topology, read_partition):
        with pytest.raises(InputError):
            read(written(tmp_path, data))


def test_files_of_different_plans() -> None:
    partition = DynPipePartition((15, 23), (0, 0), (72,), (24, 72))
    with pytest.raises(InputError, match="the DynPipe topology has 1 stage, the partition 2"):
        require_match(Topology((0, 0), ((0,),)), partition)
    with pytest.raises(InputError, match="stage 0: batch_size 24 × 2 ranks is 48, but batch_size_all is 72"):
        require_match(Topology((0, 1, 1), ((0, 1), (2,))), partition)


def test_nothing_wrong_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the criterion shares"):
        write_topology(tmp_path / "t.json", Topology((0, 1), ((0,), (1,))))
    with pytest.raises(InputError, match="recompute_ratio has 0 entries"):
        write_partition(tmp_path / "p.json", DynPipePartition((3,), (), (8,), (8,)))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_both_files(tmp_path: Path) -> None:
    topology, partition = read_topology(written(tmp_path, TOPOLOGY)), read_partition(written(tmp_path, PARTITION))
    write_files(tmp_path / "new", topology, partition)
    folder, other = tmp_path / "new", replace(partition, recompute_ratio=(0, 0, 0))
    write_partition(tmp_path / "other.json", other)
    assert read_files(folder) == read_files(folder / "topology.json", folder / "partition.json") == (topology, partition)
    assert read_files(folder / "topology.json") == (topology, None)
    assert read_files(folder, tmp_path / "other.json") == (topology, other)
    (folder / "partition.json").unlink()
    assert read_files(folder) == (topology, None)
    (folder / "topology.json").unlink()
    with pytest.raises(InputError, match=r"topology.json' does not exist"):
        read_files(folder)


def test_files_that_do_not_belong_together_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 1 stage, the partition 2"):
        write_files(tmp_path / "new", Topology((0, 0), ((0,),)), DynPipePartition((15, 23), (0, 0), (72,), (72, 72)))
    with pytest.raises(InputError, match="the criterion shares"):
        write_files(tmp_path / "new", Topology((0, 1), ((0,), (1,))), DynPipePartition((15, 23), (0, 0), (72,), (72, 72)))
    assert list(tmp_path.iterdir()) == []
