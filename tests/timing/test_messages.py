"""What a message gets of its node's network while others cross it too: every time written down by hand.

A device's link moves 1000 bytes a second inside a node; a node's network moves 100, which all that cross it at once share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun
from penstock.costs.collectives import group_of
from penstock.models import Model, TensorSpec
from penstock.models.catalog import model_from_mapping
from penstock.plans.degrees import DegreeRun
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.timing.messages import cut_times_s, gradient_sharing, reshard_s, sync_s, tied_s, tp_group_of

INSIDE, NETWORK = 1000.0, 100.0
CARRY_BYTES = 2 * 8 * 32 * 4
"""Two samples of eight tokens of 32 fp32 numbers; the gradient that comes back is as large."""
TIED_BYTES = 64 * 32 * 4
"""The embedding of 64 words, which the first and the last op share."""


def gpt(tied: bool = False) -> Model:
    """Two layers of eight ops, one op before and three after them; 20 in all."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 8, "vocab": 64, "dtype": "fp32", "tied": tied}
    return model_from_mapping({"family": "gpt", **sizes}, "test", "tiny")


def nodes(count: int, per_node: int = 2) -> Cluster:
    node = Node("test", DEVICES["a100-40gb"], per_node, Link("in", INSIDE, 0.0), Link("out", NETWORK, 0.0))
    return Cluster("test", (NodeRun(node, count),))


def plan_of(*stages: Stage, **more: Any) -> Plan:
    batching = MicroBatching("padded", "fixed", 2)
    return Plan("tiny", "test", 8, stages, batching, len(stages[0].devices), seq_length=8, precision="fp32", **more)


def two_stages(first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...]) -> Plan:
    return plan_of(Stage(0, 9, first), Stage(9, 20, second))


def cut_s(plan: Plan, cluster: Cluster) -> list[tuple[float, float]]:
    return cut_times_s(lambda stage, op: gpt(), cluster, plan, 2, 0)


def both(bandwidth: float) -> Any:
    """Activations there and gradients back at this pace."""
    return pytest.approx((CARRY_BYTES / bandwidth, CARRY_BYTES / bandwidth))


def test_a_tied_sum_takes_as_long_as_in_the_replica_where_it_takes_longest() -> None:
    """One replica inside a node, the other across: whichever is named first, both wait for the network."""
    inside, across = ((0,), (1,)), ((2,), (4,))
    for one, other in ((inside, across), (across, inside)):
        plan = two_stages((one[0], other[0]), (one[1], other[1]))
        assert tied_s(gpt(tied=True), nodes(3), plan) == pytest.approx([TIED_BYTES / NETWORK] * 2)


def test_a_cut_alone_has_the_whole_network() -> None:
    assert cut_s(two_stages(((0,),), ((2,),)), nodes(2)) == [both(NETWORK)]
    assert cut_s(two_stages(((0,),), ((1,),)), nodes(2)) == [both(INSIDE)]


def test_replicas_over_one_network_share_it_both_ways() -> None:
    """Two replicas, the first stages on one node and the second on the other: each message gets half, also the gradient back."""
    assert cut_s(two_stages(((0,), (1,)), ((2,), (3,))), nodes(2)) == [both(NETWORK / 2)] * 2


def test_the_busier_of_two_nodes_counts() -> None:
    """The first stages have a node each, the second ones share one: that one's network is what both messages wait for."""
    assert cut_s(two_stages(((0,), (2,)), ((4,), (5,))), nodes(3)) == [both(NETWORK / 2)] * 2
    assert cut_s(two_stages(((4,), (5,)), ((0,), (2,))), nodes(3)) == [both(NETWORK / 2)] * 2


def test_who_stays_inside_a_node_takes_nothing_of_its_network() -> None:
    assert cut_s(two_stages(((0,), (1,)), ((2,), (4,))), nodes(2, 3)) == [both(INSIDE), both(NETWORK)]


@pytest.mark.parametrize(
    ("stages", "sharing"),
    [
        ([Stage(0, 9, ((0,), (2,))), Stage(9, 20, ((1,), (3,)))], [2, 2]),  # each stage has a rank on both nodes
        ([Stage(0, 9, ((0,), (1,))), Stage(9, 20, ((2,), (3,)))], [1, 1]),  # none crosses
        ([Stage(0, 20, ((0, 1), (2, 3)), Degrees(2, 1))], [2]),  # tp 2: two groups, one for each half of the weights
        ([Stage(0, 20, ((0, 1, 2, 3),), Degrees(2, 2))], [2]),  # the same by dp
        ([Stage(0, 20, ((0, 1, 2, 3),), Degrees(1, 4))], [1]),  # one group of all
        ([Stage(0, 5, ((0,), (2,))), Stage(5, 9, ((1,), (3,))), Stage(9, 14, ((0,), (2,))), Stage(14, 20, ((1,), (3,)))], [2, 2, 2, 2]),
    ],
    ids=["two stages", "inside", "tp", "tp and dp", "dp", "chunks count once"],
)
def test_groups_that_reduce_over_one_network(stages: list[Stage], sharing: list[int]) -> None:
    assert gradient_sharing(nodes(2), plan_of(*stages)) == sharing


def test_a_group_inside_a_node_leaves_its_network_to_the_others() -> None:
    assert gradient_sharing(nodes(2, 4), two_stages(((0,), (4,)), ((1,), (2,)))) == [1, 1]


def test_gradients_are_summed_at_their_share_of_the_network() -> None:
    """An all-reduce of two ranks moves as much as the gradients have; two groups on a network of 100 have 50 each."""
    plan = two_stages(((0,), (2,)), ((1,), (3,)))
    found = [sync_s(nodes(2), plan, stage, DegreeRun(stage.first, stage.last, 1, 1), 1000, 2) for stage in plan.stages]
    assert found == [pytest.approx(1000 * 4 / (NETWORK / 2))] * 2


@pytest.mark.parametrize(
    ("first", "second", "bandwidth"),
    [
        (((0,),), ((2,),), NETWORK),
        (((0,),), ((1,),), INSIDE),
        (((0,), (1,)), ((2,), (3,)), NETWORK / 2),
        (((0,), (2,)), ((1,), (3,)), INSIDE),
    ],
    ids=["alone", "inside a node", "two replicas over one network", "two replicas, each inside its node"],
)
def test_a_tied_weight_is_summed_at_its_share_of_the_network(
    first: tuple[tuple[int, ...], ...], second: tuple[tuple[int, ...], ...], bandwidth: float
) -> None:
    """One all-reduce between each pair of ends, while the other replicas' pairs do the same."""
    found = tied_s(gpt(tied=True), nodes(2), two_stages(first, second))
    assert found == [pytest.approx(TIED_BYTES / bandwidth)] * 2


def test_the_larger_part_of_a_tied_weight_is_summed_in_the_dtype_of_gradients() -> None:
    """One end holds halves of the table, the other all of it; weights in bf16 have gradients in fp32."""
    plan = plan_of(Stage(0, 9, ((0, 1),), Degrees(2, 1)), Stage(9, 20, ((2,),)))
    mixed = replace(plan, precision="bf16", gradients="fp32")
    assert [tied_s(gpt(tied=True), nodes(2), one) for one in (plan, mixed)] == [[pytest.approx(TIED_BYTES / (NETWORK / 2))] * 2] * 2


def test_a_rank_serves_those_of_a_wider_stage_one_after_the_other() -> None:
    """One rank sends half of the samples to each of two, and gets the gradients of both: the whole carry at its own link's pace."""
    wider = plan_of(Stage(0, 9, ((0,),)), Stage(9, 20, ((1, 2),), Degrees(1, 2)))
    assert cut_s(wider, nodes(1, 4)) == [both(INSIDE)]
    narrower = plan_of(Stage(0, 9, ((1, 2),), Degrees(1, 2)), Stage(9, 20, ((0,),)))
    assert cut_s(narrower, nodes(1, 4)) == [both(INSIDE)]


def test_gradients_come_back_as_the_last_ops_of_the_stage_are_divided() -> None:
    """Those are not divided by samples any more: each of the two ranks gets all of them."""
    stages = Stage(0, 9, ((1, 2),), Degrees(1, 2), (OpRun(8, 9, 2, 1),)), Stage(9, 20, ((0,),))
    ((there_s, back_s),) = cut_s(plan_of(*stages), nodes(1, 4))
    assert (there_s, back_s) == pytest.approx((CARRY_BYTES / INSIDE, 2 * CARRY_BYTES / INSIDE))


def test_nothing_comes_back_for_what_has_no_gradient() -> None:
    """Beside the carry travel numbers of tokens, eight bytes each."""
    plain = gpt()
    ids = TensorSpec("ids", ("tokens",), dtype="int64", differentiable=False)
    blocks = [replace(block, ops=tuple(replace(op, carry=(*op.carry, ids)) for op in block.ops)) for block, _ in plain.runs]
    marked = replace(plain, runs=tuple((block, copies) for block, (_, copies) in zip(blocks, plain.runs, strict=True)))
    (found,) = cut_times_s(lambda stage, op: marked, nodes(2), two_stages(((0,),), ((2,),)), 2, 0)
    assert found == pytest.approx(((CARRY_BYTES + 2 * 8 * 8) / NETWORK, CARRY_BYTES / NETWORK))


def test_samples_are_gathered_where_dp_falls_and_their_gradients_where_it_rises() -> None:
    """Half of the carry goes to the other rank of two, at the pace inside a node."""
    plan = plan_of(Stage(0, 20, ((0, 1),), Degrees(2, 1)))
    wide, narrow = DegreeRun(0, 9, 1, 2), DegreeRun(9, 20, 2, 1)
    time_s = pytest.approx(CARRY_BYTES / 2 / INSIDE)
    assert reshard_s(gpt(), nodes(1), plan, 2, (0, 1), wide, narrow) == (time_s, 0.0)
    assert reshard_s(gpt(), nodes(1), plan, 2, (0, 1), DegreeRun(0, 9, 2, 1), DegreeRun(9, 20, 1, 2)) == (0.0, time_s)
    assert reshard_s(gpt(), nodes(1), plan, 2, (0, 1), wide, DegreeRun(9, 20, 1, 2)) == (0.0, 0.0)


def test_the_same_place_of_each_narrower_group_gathers() -> None:
    """Two pairs that divided samples become four that divide ops: the first ranks of the pairs, one on each node, exchange halves."""
    plan = plan_of(Stage(0, 20, ((0, 1, 2, 3),), Degrees(4, 1)))
    found = reshard_s(gpt(), nodes(2), plan, 2, (0, 1, 2, 3), DegreeRun(0, 9, 2, 2), DegreeRun(9, 20, 4, 1))
    assert found == (pytest.approx(CARRY_BYTES / 2 / NETWORK), 0.0)


def test_all_wait_for_the_pair_over_the_network() -> None:
    """Of two pairs that each carry half of the samples, one crosses nodes."""
    plan = plan_of(Stage(0, 9, ((0, 1),), Degrees(1, 2)), Stage(9, 20, ((2, 3),), Degrees(1, 2)))
    assert cut_s(plan, nodes(2, 3)) == [pytest.approx((CARRY_BYTES / 2 / NETWORK,) * 2)]


def test_the_tensor_parallel_group_over_the_network_is_the_slowest() -> None:
    for ranks in ((0, 1, 2, 4), (2, 4, 0, 1)):
        assert tp_group_of(nodes(3), ranks, 2) == group_of(nodes(3), (2, 4))


def test_what_an_op_does_not_share_is_not_summed_with_it() -> None:
    """BERT's head has the embedding's table and a bias of its own."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 64, "seq_length": 8, "vocab": 64, "dtype": "fp32"}
    model = model_from_mapping({"family": "bert", **sizes}, "test", "tiny")
    plan = plan_of(Stage(0, 9, ((0,),)), Stage(9, model.num_ops, ((2,),)))
    assert tied_s(model, nodes(2), plan) == [pytest.approx(TIED_BYTES / NETWORK)] * 2


def test_new_weights_are_gathered_in_their_own_dtype() -> None:
    """ZeRO-1 of two ranks, gradients in fp32 and weights in bf16: half of four bytes is summed, half of two gathered."""
    stage = Stage(0, 20, ((0,), (2,)), zero=1)
    plan = replace(plan_of(stage), precision="bf16", gradients="fp32")
    found = sync_s(nodes(2), plan, stage, DegreeRun(0, 20, 1, 1), 1000, 1)
    assert found == pytest.approx((1000 * 4 / 2 + 1000 * 2 / 2) / NETWORK)


def test_zero_2_sums_after_every_micro_batch() -> None:
    """Two of two samples on each of two replicas: gradients go twice, the new weights once; ZeRO-3 gathers weights twice for each too."""
    for zero, halves in ((2, 2 + 1), (3, 2 * 3)):
        stage = Stage(0, 20, ((0,), (2,)), zero=zero)
        found = sync_s(nodes(2), plan_of(stage), stage, DegreeRun(0, 20, 1, 1), 1000, 1)
        assert found == pytest.approx(halves * 1000 * 4 / 2 / NETWORK)


def test_a_table_that_a_stage_uses_twice_is_summed_once() -> None:
    """T5's decoder and its head have the encoder's embedding."""
    sizes = {"layers": 1, "hidden": 32, "heads": 4, "head_width": 8, "ffn": 64, "seq_length": 8, "dec_length": 8, "vocab": 64}
    model = model_from_mapping({"family": "t5", "dtype": "fp32", **sizes}, "test", "tiny")
    tied = [place.index for place in model.ops if place.op.tied_to]
    assert len(tied) == 2
    plan = plan_of(Stage(0, tied[0], ((0,),)), Stage(tied[0], model.num_ops, ((2,),)))
    assert tied_s(model, nodes(2), plan) == [pytest.approx(TIED_BYTES / NETWORK)] * 2
