"""FASOP's rows as plans: the way there and back, which row is taken, and what a row must agree with."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clusters import Cluster, Link, Node, NodeRun, cluster_to_dict, resolve_cluster, resolve_device
from penstock.errors import InputError
from penstock.models.catalog import resolve_model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.systems.fasop.plans import chosen_row, to_plan
from penstock.systems.fasop.rows import FasopRow, layer_starts, row_of_plan

SHORTHAND = "1xp4d.24xlarge+2xg5.24xlarge"
CLUSTER = resolve_cluster(SHORTHAND)
GPT, T5 = resolve_model("gpt-tiny"), resolve_model("t5-tiny")


def back(plan: Plan, row: FasopRow) -> Plan:
    """The plan of a row, for the model and the cluster of the plan that the row was made of."""
    model = resolve_model(str(plan.model))
    return to_plan(
        row, model, resolve_cluster(str(plan.cluster)), model_ref=plan.model, cluster_ref=plan.cluster, global_batch=plan.global_batch
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plans_become_rows_and_the_same_plans(data: st.DataObject) -> None:
    name, at_most = data.draw(st.sampled_from([("gpt-tiny", 4), ("bert-tiny", 2), ("t5-tiny", 4)]))
    model = resolve_model(name)
    pp = data.draw(st.sampled_from([size for size in (1, 2, 4) if size <= at_most]))
    tp = data.draw(st.sampled_from([1, 2, 4]))
    mbs = data.draw(st.integers(1, 3))
    replicas = 16 // (pp * tp)
    plan = uniform_plan(name, SHORTHAND, pp=pp, tp=tp, replicas=replicas, global_batch=replicas * mbs * 3, micro_batch=mbs)
    starts, decoder = layer_starts(model), [first for first in layer_starts(model) if model.ops[first].block == "bridge"]
    needed = decoder if pp > 1 else []
    free = [start for start in starts[1:] if start not in needed]
    count = pp - 1 - len(needed)
    drawn = data.draw(st.sets(st.sampled_from(free), min_size=count, max_size=count)) if count else set()
    cuts = [0, *sorted({*drawn, *needed}), model.num_ops]
    stages = tuple(replace(old, first=first, last=last) for old, (first, last) in zip(plan.stages, pairwise(cuts), strict=True))
    plan = replace(plan, stages=stages)
    row = row_of_plan(plan)
    assert sum(row.partition) == len(starts) and row.pp == pp and row.dp == replicas
    assert back(plan, row) == plan
    assert [starts[count] for count in accumulate(row.partition[:-1])] == cuts[1:-1]


def test_a_stages_own_dp_comes_back_as_replicas() -> None:
    plan = uniform_plan("gpt-tiny", SHORTHAND, pp=4, tp=2, dp=2, global_batch=32, micro_batch=4)
    found = back(plan, row_of_plan(plan))
    assert found.num_replicas == 2 and found.micro_batching.samples == 2 and row_of_plan(found) == row_of_plan(plan)


def test_layers_are_counted_as_fasop_does() -> None:
    """Its lists: 26 for BERT-Large, 50 for GPT-2 XL, and for T5, whose head goes with the last decoder layer, 50."""
    assert [len(layer_starts(resolve_model(name))) for name in ("bert-large", "gpt2-xl", "t5-770m")] == [26, 50, 50]


def test_a_row_of_fasops_own_cluster() -> None:
    """FASOP counts four GPUs on every node, whatever the instance has: a cluster file says so."""
    nodes = tuple(
        Node(name, resolve_device(device), 4, Link("inside", 200e9, 0.0), Link("between", 5e9, 0.0))
        for name, device in (("p4d.24xlarge", "a100-40gb"), ("g5.24xlarge", "a10g"))
    )
    cluster = Cluster("mixed", (NodeRun(nodes[0]), NodeRun(nodes[1], 7)))
    model = resolve_model("t5-770m")
    row = FasopRow(2, 1, 4, 8, ("p4d.24xlarge", *["g5.24xlarge"] * 7), (15, 10, 5, 4, 4, 4, 4, 4))
    plan = to_plan(row, model, cluster, model_ref="t5-770m", cluster_ref=cluster_to_dict(cluster), global_batch=128)
    assert plan.num_micro_batches == 16 and model.ops[plan.stages[2].first].block == "bridge"
    assert row_of_plan(plan) == replace(row, num_a100=1, num_a10=7)
    with pytest.raises(InputError, match=r"= 32 GPUs, 4 on each node; the cluster has 36\. Describe nodes"):
        catalogue = resolve_cluster("1xp4d.24xlarge+7xg5.24xlarge")
        to_plan(row, model, catalogue, model_ref="t5-770m", cluster_ref="1xp4d.24xlarge+7xg5.24xlarge", global_batch=128)


def test_encoder_and_decoder_in_one_stage_are_refused() -> None:
    cluster = resolve_cluster("2xa100-40gb")
    side = 1 + T5.config["layers"]
    row = FasopRow(2, 1, 1, 2, tuple(node.name for node in cluster.nodes), (side, side))
    to_plan(row, T5, cluster, model_ref="t5-tiny", cluster_ref="2xa100-40gb", global_batch=8)
    with pytest.raises(InputError, match="holds encoder and decoder"):
        wrong = replace(row, partition=(side + 1, side - 1))
        to_plan(wrong, T5, cluster, model_ref="t5-tiny", cluster_ref="2xa100-40gb", global_batch=8)


def test_a_cut_before_the_head_of_a_decoder_is_no_row() -> None:
    plan = uniform_plan("t5-tiny", "3xa100-40gb", global_batch=8, micro_batch=2)
    bridge, head = (next(place.index for place in T5.ops if place.block == name) for name in ("bridge", "head"))
    cuts = [0, bridge, head, T5.num_ops]
    stages = tuple(replace(plan.stages[0], first=a, last=b, devices=((i,),)) for i, (a, b) in enumerate(pairwise(cuts)))
    with pytest.raises(InputError, match=r"stage 2: it starts at op .*, which belongs to the layer before it there"):
        row_of_plan(replace(plan, stages=stages))


NODES = tuple(node.name for node in CLUSTER.nodes)
FAST = FasopRow(1, 1, 1, 1, NODES, (6,), time_s=1.0, is_oom=False)


def test_which_row_is_taken() -> None:
    slow, full = replace(FAST, time_s=2.0), replace(FAST, time_s=0.1, is_oom=True)
    elsewhere, untimed = replace(FAST, time_s=0.5, node_placement=NODES[::-1]), replace(FAST, time_s=None, is_oom=None)
    assert chosen_row([slow, full, FAST], CLUSTER) == (3, [])
    assert chosen_row([untimed, slow], CLUSTER) == (2, []) and chosen_row([untimed, untimed], CLUSTER) == (1, [])
    number, remarks = chosen_row([elsewhere, slow, FAST], CLUSTER)
    assert number == 3 and remarks == ["row 1 is faster, on nodes in the order 2xg5.24xlarge+1xp4d.24xlarge"]
    assert chosen_row([slow, full], CLUSTER, 2) == (2, ["FASOP marks the row as out of memory"])
    with pytest.raises(InputError, match="marks all 2 rows on these nodes as out of memory"):
        chosen_row([full, full, elsewhere], CLUSTER)
    with pytest.raises(InputError, match=r"placed on 2xg5.24xlarge\+1xp4d.24xlarge; the cluster is 1xp4d.24xlarge\+2xg5.24xlarge"):
        chosen_row([elsewhere], CLUSTER)
