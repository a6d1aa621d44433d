"""Plans for what is left when a node is lost that had several stages, parts of all of them, or of all replicas; by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.adapting.deaths import RunWitness
from penstock.errors import InfeasibleError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan


def plan_of(tmp_path: Path, **degrees: Any) -> Plan:
    """On two nodes of two devices."""
    (tmp_path / "two.yaml").write_text("nodes: [{device: cpu, gpus: 2, count: 2, inter: {bandwidth_gb_per_s: 1}}]\n")
    return uniform_plan("gpt-tiny", str(tmp_path / "two.yaml"), global_batch=16, micro_batch=4, layout="packed", **degrees)


@pytest.mark.parametrize(
    ("degrees", "left"),
    [
        ({"pp": 4}, [((0,),), ((1,),)]),
        ({"dp": 4, "zero": 1}, [((0, 1),)]),
        ({"tp": 2, "dp": 2}, [((0, 1),)]),
        ({"pp": 2, "replicas": 2}, [((0,), (1,))]),
        ({"pp": 2, "tp": 2, "chunks": 2, "schedule": "interleaved"}, [((0, 1),)]),
        ({"pp": 2, "dp": 2, "schedule": "zero-bubble"}, [((0, 1),)]),
    ],
)
def test_a_node_is_done_without(degrees: dict[str, Any], left: list[tuple[tuple[int, ...], ...]], tmp_path: Path) -> None:
    plan = plan_of(tmp_path, **degrees)
    found = RunWitness(tmp_path).smaller_plan(plan, [2, 3], [0, 1])
    assert [stage.devices for stage in found.stages] == left
    assert [stage.degrees.size for stage in found.stages] == [len(devices[0]) for devices in left]
    ends = [0, *(stage.last for stage in found.stages)]
    assert [stage.first for stage in found.stages] == ends[:-1] and ends[-1] == plan.stages[-1].last


def test_a_stage_goes_on_with_those_of_its_ranks_that_are_left(tmp_path: Path) -> None:
    """Each of two stages has lost one of its two ranks."""
    found = RunWitness(tmp_path).smaller_plan(plan_of(tmp_path, pp=2, dp=2, zero=1), [1, 2], [0, 3])
    assert [stage.devices for stage in found.stages] == [((0,),), ((3,),)]


def test_half_of_a_tensor_parallel_group_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleError, match="nothing is left for training without rank 2-3"):
        RunWitness(tmp_path).smaller_plan(plan_of(tmp_path, tp=4), [2, 3], [0, 1])
