"""Plans that a search over FASOP's tables found, as plans here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.plans.plan import Plan
from penstock.systems.fasop.found_plans import read_found_plan, to_plan

STAGES = [
    {"layers": 2, "tp": 1, "dp": 2, "mbs": 3, "devices": [["B", 1, 1], ["A", 0, 1]]},
    {"layers": 3, "tp": 2, "dp": 1, "mbs": 6, "devices": [["A", 0, 2]]},
    {"layers": 1, "tp": 1, "dp": 3, "mbs": 2, "devices": [["B", 2, 1], ["B", 1, 2]]},
]


def planned(folder: Path, stages: object, cluster: str = "1xp4d.24xlarge+2xg5.24xlarge", model: str = "gpt-tiny") -> Plan:
    """What a file with these stages means."""
    path = folder / "found.json"
    path.write_text(json.dumps({"setting": "mine", "mbs": 3, "stages": stages}))
    found = read_found_plan(path)
    return to_plan(found, resolve_model(model), resolve_cluster(cluster), model_ref=model, cluster_ref=cluster, global_batch=24)


def test_stages_get_the_next_gpus_of_their_nodes(tmp_path: Path) -> None:
    """Node 0 has ranks 0 to 7, node 1 ranks 8 to 11, node 2 ranks 12 to 15. Layers: embedding, four blocks of eight ops, head."""
    plan = planned(tmp_path, STAGES)
    assert [stage.devices for stage in plan.stages] == [((8, 0),), ((1, 2),), ((12, 9, 10),)]
    assert [(stage.first, stage.last) for stage in plan.stages] == [(0, 9), (9, 33), (33, 36)]
    assert [(stage.degrees.tp, stage.degrees.dp) for stage in plan.stages] == [(1, 2), (2, 1), (1, 3)]
    assert (plan.micro_batching.samples, plan.num_micro_batches, plan.num_replicas) == (6, 4, 1)


def changed(index: int, **fields: Any) -> list[dict[str, Any]]:
    """The stages with another one of a number."""
    return [stage | fields if number == index else stage for number, stage in enumerate(STAGES)]


@pytest.mark.parametrize(
    ("stages", "more", "message"),
    [
        (changed(0, mbs=2), {}, "stage 1 has micro-batches of 6 × 1 samples, stage 0 of 4"),
        (changed(1, layers=4), {}, "the plan has 7 layers, embedding and head included; model 'gpt-tiny' has 6"),
        (changed(1, tp=3), {}, "stage 1 has 2 GPUs; tp 3 × dp 1 was expected"),
        (changed(2, devices=[["B", 3, 3]]), {}, "stage 2 has GPUs of node 3; the cluster has 3 nodes, numbered from 0"),
        (changed(2, devices=[["B", 1, 3]], dp=3), {"cluster": "3xp3.8xlarge"}, "the plan has nodes of the kinds B, A; in the cluster they"),
        (changed(2, devices=[["A", 2, 3]]), {}, "node 2 of the cluster is 'g5.24xlarge', other nodes of the plan's kind A"),
        (changed(2, dp=6, mbs=1, devices=[["B", 1, 6]]), {}, "the plan has 7 GPUs of node 1; 'g5.24xlarge' has 4"),
        ([], {}, "stages"),
        (changed(0, devices=[["B", -1, 2]]), {}, "stages.0.devices"),
        (changed(0, mbs=True), {}, "stages.0.mbs"),
    ],
)
def test_what_is_no_plan_of_the_cluster_is_refused(stages: object, more: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        planned(tmp_path, stages, **more)
    assert message in str(caught.value)
