"""Estimates of whole plans: cases computed by hand, and what must hold for any plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.kept import kept_bytes

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun, resolve_cluster
from penstock.costs.collectives import collective_s
from penstock.costs.memory import CUDA_CONTEXT_BYTES, NCCL_BYTES, activation_timeline, stage_memory
from penstock.costs.roofline import Roofline
from penstock.costs.sources import open_costs
from penstock.costs.table import CostTable
from penstock.errors import InputError
from penstock.models import Model, Shape
from penstock.models.catalog import model_from_mapping, resolve_model
from penstock.models.sequence import with_sequence_parallelism
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.plans.references import cluster_of, model_of
from penstock.plans.schema import plan_from_dict, plan_to_dict, read_plan
from penstock.search import Request
from penstock.search.uniform import plans_of_grid
from penstock.timing.estimate import Estimator, estimate
from penstock.timing.execution import execute
from penstock.timing.iteration_estimate import Estimate, with_prediction
from penstock.timing.pipeline import dp_shares, micro_batches, share_rows, share_shape
from penstock.timing.planned import planned_pipeline

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.json"))
FORWARD_S, BACKWARD_S, STEP_S, BANDWIDTH = 1.0, 2.0, 0.5, 1000.0


class Plain(Roofline):
    """Every op takes one second forward and two backward; a step takes half a second; nothing else takes time."""

    name = "plain"

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        table = super().table(model, shapes, tps, cluster)
        none = np.zeros_like(table.forward_s)
        return dataclasses.replace(
            table, forward_s=none + FORWARD_S, backward_s=none + BACKWARD_S, forward_comm_s=none, backward_comm_s=none
        )

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        return STEP_S


def gpt(**changes: Any) -> Model:
    """Two layers of eight ops, one op before and three after them; 20 in all."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 8, "vocab": 64, "dtype": "fp32", "tied": False}
    return model_from_mapping({"family": "gpt", **sizes, **changes}, "test", "tiny")


def cluster(num_devices: int = 4, num_nodes: int = 1, price: float | None = None) -> Cluster:
    """Devices whose links have no latency and move a thousand bytes per second, between nodes a tenth of that."""
    inside, outside = Link("test", BANDWIDTH, 0.0), Link("test", BANDWIDTH / 10, 0.0)
    return Cluster("test", (NodeRun(Node("test", DEVICES["a100-40gb"], num_devices, inside, outside, price), num_nodes),))


def plan_of(*stages: Stage, samples: int = 2, global_batch: int = 8, **more: Any) -> Plan:
    return Plan("gpt-tiny", "4xa100-40gb", global_batch, stages, MicroBatching("padded", "fixed", samples), **{
        "seq_length": 8, "precision": "fp32", **more})  # fmt: skip


def estimated(plan: Plan, model: Model | None = None, on: Cluster | None = None) -> Estimate:
    return estimate(plan, model or gpt(), on or cluster(), Plain())


TWO_STAGES = (Stage(0, 9, ((0,),)), Stage(9, 20, ((1,),)))
MESSAGE_S = 2 * 8 * 32 * 4 / BANDWIDTH
"""Two samples of eight tokens of 32 fp32 numbers."""


def test_two_stages_by_hand() -> None:
    found = estimated(plan_of(*TWO_STAGES))
    first, second = (stage.work.total_s for stage in found.stages)
    assert (first, second) == (pytest.approx(9 * 3 + MESSAGE_S), pytest.approx(11 * 3 + MESSAGE_S))
    assert found.stages[0].work.transfer_out_s == found.stages[1].work.transfer_in_s == pytest.approx(MESSAGE_S)
    assert found.stages[0].work.transfer_in_s == found.stages[1].work.transfer_out_s == 0
    assert found.num_micro_batches == 4 and found.bottleneck == 1
    assert found.pipeline_s == pytest.approx(4 * second + first)
    assert found.time_s == pytest.approx(found.pipeline_s + STEP_S)
    assert [stage.bubble_s for stage in found.stages] == [pytest.approx(4 * (second - first) + first), pytest.approx(first)]
    assert found.tokens_per_s == pytest.approx(64 / found.time_s) and found.samples_per_s == pytest.approx(8 / found.time_s)


class TwoSpeeds(Plain):
    """The same, but a v100-32gb takes twice as long."""

    def table(self, model: Model, shapes: Sequence[Shape], tps: Sequence[int], cluster: Cluster) -> CostTable:
        table = super().table(model, shapes, tps, cluster)
        slow = np.array([2.0 if device == "v100-32gb" else 1.0 for device in table.devices])
        return dataclasses.replace(table, forward_s=table.forward_s * slow, backward_s=table.backward_s * slow)


def two_kinds() -> Cluster:
    """Ranks 0 to 3 on one kind, 4 to 7 on another, all links alike."""
    link = Link("test", BANDWIDTH, 0.0)
    nodes = (Node(name, DEVICES[name], 4, link, link) for name in ("a100-40gb", "v100-32gb"))
    return Cluster("test", tuple(NodeRun(node, 1) for node in nodes))


def shared_out(plan: Plan, *counts: int) -> Plan:
    return dataclasses.replace(plan, micro_batching=dataclasses.replace(plan.micro_batching, per_replica=counts))


@pytest.mark.parametrize(("counts", "slowest", "time_s"), [((3, 1), 0, 180.0), ((2, 2), 1, 240.0), ((1, 3), 1, 360.0)])
def test_unequal_shares_by_hand(counts: tuple[int, int], slowest: int, time_s: float) -> None:
    """One replica on each kind: 60 and 120 seconds for a micro-batch; the slower to finish is the one told of."""
    plan = shared_out(plan_of(Stage(0, 20, ((0,), (4,))), num_replicas=2), *counts)
    found = estimate(plan, gpt(), two_kinds(), TwoSpeeds())
    assert found.pipeline_s == pytest.approx(time_s) and found.num_micro_batches == counts[slowest]
    assert found.stages[0].device == ("a100-40gb", "v100-32gb")[slowest]
    assert sum(share for _, share in found.shares()) == pytest.approx(found.time_s)
    assert found.samples_per_s == pytest.approx(8 / found.time_s)


def test_shares_change_neither_sync_nor_step() -> None:
    plan = plan_of(Stage(0, 20, ((0,), (1,))), num_replicas=2)
    equal, unequal = estimated(plan), estimated(shared_out(plan, 3, 1))
    assert unequal.pipeline_s == pytest.approx(1.5 * equal.pipeline_s)
    assert unequal.time_s - unequal.pipeline_s == pytest.approx(equal.time_s - equal.pipeline_s)
    assert estimated(shared_out(plan, 2, 2)) == equal


def test_memory_of_each_replica_counts_its_own_micro_batches() -> None:
    """Three stages; the smaller device is nearest to its limit. With one micro-batch it never holds two, with six it holds three."""
    stages = tuple(Stage(*ops, ((at,), (4 + at,))) for at, ops in enumerate([(0, 9), (9, 17), (17, 20)]))
    plan = plan_of(*stages, num_replicas=2, global_batch=14)
    six, one = (estimate(shared_out(plan, *counts), gpt(), two_kinds(), TwoSpeeds()) for counts in ((1, 6), (6, 1)))
    assert one.stages[0].limit_bytes == six.stages[0].limit_bytes == DEVICES["v100-32gb"].memory_bytes
    held = [[stage.memory.activations_bytes for stage in found.stages] for found in (one, six)]
    assert held[1] == pytest.approx([3 * held[0][0], 2 * held[0][1], held[0][2]])


def test_shares_sum_to_the_time() -> None:
    for path in EXAMPLES:
        plan = read_plan(path)
        found = estimate(plan, model_of(plan), cluster_of(plan), Roofline())
        assert sum(time_s for _, time_s in found.shares()) == pytest.approx(found.time_s)
        assert all(time_s >= -1e-9 for _, time_s in found.shares())


def test_the_optimizer_reads_the_gradients_dtype() -> None:
    plan = uniform_plan("gpt-350m", "2xa100-40gb", replicas=2, global_batch=8, micro_batch=1)
    [narrow], [wide] = (
        estimate(replace(plan, gradients=dtype), model_of(plan), cluster_of(plan), Roofline()).stages for dtype in ("bf16", "fp32")
    )
    assert wide.optimizer_s == pytest.approx(18 / 16 * narrow.optimizer_s, rel=0.01) and wide.optimizer_s > narrow.optimizer_s


def test_gradients_are_reduced_over_all_replicas_and_shares() -> None:
    model = gpt()
    found = estimated(plan_of(Stage(0, 20, ((0, 1), (2, 3)), Degrees(1, 2)), num_replicas=2), model)
    assert found.stages[0].sync_s == pytest.approx(collective_s("all_reduce", model.num_parameters * 4, cluster(), range(4)))
    assert estimated(plan_of(Stage(0, 20, ((0,),)))).stages[0].sync_s == 0


def test_a_gradient_group_shares_the_network_with_the_others() -> None:
    """Two nodes of two: with tp 2 both places reduce between the same two nodes at once."""
    on = cluster(2, num_nodes=2)
    halves = estimated(plan_of(Stage(0, 20, ((0, 1), (2, 3)), Degrees(2)), num_replicas=2), on=on)
    whole = estimated(plan_of(Stage(0, 20, ((0,), (2,))), num_replicas=2), on=on)
    assert halves.stages[0].sync_s == pytest.approx(whole.stages[0].sync_s, rel=0.05)  # half the bytes at half the pace


def test_tied_weights_are_added_up_between_their_stages() -> None:
    model = gpt(tied=True)
    stages = (Stage(0, 9, ((0,),)), Stage(9, 17, ((1,),)), Stage(17, 20, ((2,),)))
    first, middle, last = estimated(plan_of(*stages), model).stages
    assert first.sync_s == last.sync_s == pytest.approx(collective_s("all_reduce", 64 * 32 * 4, cluster(), (0, 2)))
    assert middle.sync_s == 0
    assert estimated(plan_of(Stage(0, 20, ((0,),))), model).stages[0].sync_s == 0


def test_dp_divides_the_samples_of_a_micro_batch() -> None:
    plan = plan_of(Stage(0, 20, ((0, 1),), Degrees(1, 2)))
    model, source = gpt(), Roofline(in_company=False)
    found = estimate(plan, model, cluster(), source)
    alone = estimate(plan_of(Stage(0, 20, ((0,),)), samples=1, global_batch=4), model, cluster(), source)
    assert found.stages[0].work == alone.stages[0].work and found.num_micro_batches == alone.num_micro_batches


def test_recomputation_takes_time_and_saves_memory() -> None:
    plain, again = (estimated(plan_of(Stage(0, 20, ((0,),), recompute=recompute))) for recompute in ((), (((1, 17),),)))
    # The last op of each block saves only its input: recomputation stops before it.
    assert plain.stages[0].work.recompute_s == 0 and again.stages[0].work.recompute_s == 14 * FORWARD_S
    assert again.stages[0].memory.activations_bytes < plain.stages[0].memory.activations_bytes
    assert again.mfu < plain.mfu


def test_runs_have_their_own_degrees_and_pay_for_the_change() -> None:
    model, on = gpt(), cluster()
    whole = plan_of(Stage(0, 20, ((0, 1),), Degrees(1, 2)))
    mixed = plan_of(Stage(0, 20, ((0, 1),), Degrees(1, 2), runs=(OpRun(9, 17, 2, 1),)))
    gathered_s = collective_s("all_gather", model.boundary_bytes(9).at(Shape.padded(2, 8)), on, (0, 1))
    # dp falls before op 9 (activations gathered) and rises again before op 17 (their gradients gathered).
    assert estimated(mixed).stages[0].work.tp_s - estimated(whole).stages[0].work.tp_s == pytest.approx(2 * gathered_s)
    source = Roofline()
    table = source.table(model, [Shape.padded(2, 8)], [2], on)
    run_s = float(table.forward_s[table.chain[9:17], 0, 0, 0, 0].sum())
    rest = source.table(model, [Shape.padded(1, 8)], [1], on)
    others = [*range(9), *range(17, 20)]
    rest_s = float(rest.forward_s[rest.chain[others], 0, 0, 0, 0].sum())
    assert estimate(mixed, model, on, source).stages[0].work.forward_s == pytest.approx(run_s + rest_s)


def test_another_split_sends_other_collectives() -> None:
    """Split over its columns, qkv adds up gradients in its backward pass only; over its rows it gathers forward too."""
    model, on = gpt(), cluster()
    columns, rows = (
        estimate(plan_of(Stage(0, 20, ((0, 1),), Degrees(2), runs=(OpRun(2, 3, 2, 1, algo),))), model, on, Roofline()) for algo in (0, 1)
    )
    shape, op = Shape.padded(2, 8), model.ops[2].op
    sent_s = [
        sum(collective_s(c.kind, c.size_bytes(shape), on, (0, 1)) for c in split.collectives) for split in op.splits
    ]  # fmt: skip
    assert rows.stages[0].work.tp_s - columns.stages[0].work.tp_s == pytest.approx(sent_s[1] - sent_s[0])


def test_runs_that_agree_with_their_stage_change_nothing() -> None:
    plain = plan_of(Stage(0, 20, ((0, 1),), Degrees(2)))
    same = plan_of(Stage(0, 20, ((0, 1),), Degrees(2), runs=(OpRun(3, 7, 2, 1, 0),)))
    assert estimated(plain).stages == estimated(same).stages


def test_tensor_parallel_over_a_network_is_slower_than_inside_a_node() -> None:
    on = cluster(2, num_nodes=2)
    inside, across = (
        estimate(plan_of(Stage(0, 20, (ranks,), Degrees(2))), gpt(), on, Roofline()).stages[0].work for ranks in ((0, 1), (0, 2))
    )
    assert across.tp_s == pytest.approx(10 * inside.tp_s) and across.forward_s == inside.forward_s


def test_the_slowest_replica_counts() -> None:
    mixed = resolve_cluster("1xa100-40gb+1xt4")
    plan = plan_of(Stage(0, 20, ((0,), (1,))), num_replicas=2)
    found = estimate(plan, gpt(), mixed, Roofline(in_company=False))
    slow = estimate(plan_of(Stage(0, 20, ((1,),)), global_batch=4), gpt(), mixed, Roofline(in_company=False))
    assert found.stages[0].device == "t4" and found.pipeline_s == slow.pipeline_s
    assert found.stages[0].limit_bytes == DEVICES["t4"].memory_bytes


def test_schedules_differ_as_they_should() -> None:
    def time_of(**more: Any) -> float:
        sizes = {"global_batch": 8, "micro_batch": 1, "pp": 2, **more}
        plan = uniform_plan("gpt-tiny", "2xa100-40gb", **sizes)
        return estimate(plan, model_of(plan), cluster_of(plan), Plain()).time_s

    assert time_of() == time_of(schedule="gpipe")
    assert time_of(schedule="zero-bubble") < time_of()
    # Twice the stages send twice the messages; here they take next to nothing.
    assert time_of(schedule="interleaved", chunks=2) < time_of()


def test_memory_is_that_of_the_stage() -> None:
    model = gpt()
    found = estimated(plan_of(*TWO_STAGES), model)
    shape = Shape.padded(2, 8)
    assert found.stages[0].memory == stage_memory(model, 0, 9, shape, in_flight=2, precision="fp32", device="a100-40gb")
    assert found.stages[1].memory == stage_memory(model, 9, 20, shape, in_flight=1, precision="fp32", device="a100-40gb")


def test_chunks_share_a_device() -> None:
    plan = uniform_plan("gpt-tiny", "2xa100-40gb", global_batch=8, micro_batch=1, pp=2, chunks=2, schedule="interleaved")
    found = estimate(plan, model_of(plan), cluster_of(plan), Roofline())
    assert [stage.group for stage in found.stages] == [0, 1, 0, 1]
    assert found.stages[0].memory == found.stages[2].memory
    assert found.stages[0].memory.weights_bytes > found.stages[1].memory.weights_bytes  # the embedding
    assert found.stages[0].memory.context_bytes == CUDA_CONTEXT_BYTES + NCCL_BYTES


def test_a_memory_limit_decides_what_fits() -> None:
    plan, model, on = plan_of(*TWO_STAGES), gpt(), cluster()
    needed = Estimator(model, on, Plain()).estimate(plan).peak_bytes
    assert Estimator(model, on, Plain(), needed).estimate(plan).fits
    tight = Estimator(model, on, Plain(), needed - 1).estimate(plan)
    assert not tight.fits and [stage.fits for stage in tight.stages].count(False) == 1
    assert Estimator(model, on, Plain(), math.inf).estimate(plan).stages[0].limit_bytes == DEVICES["a100-40gb"].memory_bytes


def test_money_and_mfu() -> None:
    found = estimated(plan_of(*TWO_STAGES), on=cluster(price=36.0))
    assert found.price_usd_per_h == 36 and found.price_usd == pytest.approx(found.time_s / 100)
    assert estimated(plan_of(*TWO_STAGES)).price_usd is None
    model, one = gpt(), Shape.padded(1, 8)
    flops = 3 * sum(place.op.flops.at(one) for place in model.ops)  # though fused attention computes 3.5 times its forward pass
    assert sum(place.op.backward_flops.at(one) for place in model.ops) > 2 / 3 * flops
    assert found.mfu == pytest.approx(flops * 8 / (found.time_s * 2 * DEVICES["a100-40gb"].peak_flops_per_s("fp32")))


def test_the_last_device_to_be_done_ends_the_iteration() -> None:
    """Of three stages the middle one shares no weights, and is done first."""
    stages = (Stage(0, 9, ((0,),)), Stage(9, 17, ((1,),)), Stage(17, 20, ((2,),)))
    found = estimated(plan_of(*stages), gpt(tied=True))
    ends_s = [found.pipeline_s + stage.sync_s + stage.optimizer_s for stage in found.stages]
    assert found.time_s == pytest.approx(ends_s[0]) and ends_s[0] == ends_s[2] > 1.01 * ends_s[1]
    assert dict(found.shares())["gradient sync"] == pytest.approx(found.stages[0].sync_s)


class Counted(Plain):
    """A step takes a second for each weight of a rank."""

    def optimizer_s(
        self, num_parameters: float, device: str, precision: str = "bf16", optimizer: str = "adamw", num_tensors: int = 0,
        gradients: str = "",
    ) -> float:  # fmt: skip
        return num_parameters


@pytest.mark.parametrize(("zero", "share", "level"), [(0, 1, 0), (1, 4, 1)])
def test_ranks_with_equal_weights_divide_step_and_state(zero: int, share: int, level: int) -> None:
    """Two replicas of two ranks that divide samples: four hold the same weights."""
    model = gpt()
    plan = plan_of(Stage(0, 20, ((0, 1), (2, 3)), Degrees(1, 2), zero=zero), num_replicas=2)
    [stage] = estimate(plan, model, cluster(), Counted()).stages
    assert stage.optimizer_s == pytest.approx(model.num_parameters / share) and stage.zero == level
    assert stage.memory.moments_bytes == pytest.approx(8 * model.num_parameters / share)


def test_frozen_weights_have_neither_gradients_nor_steps() -> None:
    """Both layers are frozen, what is before and behind them is not."""
    model = gpt()
    runs = [
        (replace(block, ops=tuple(replace(op, trainable=copies == 1) for op in block.ops)) if copies > 1 else block, copies)
        for block, copies in model.runs
    ]
    frozen, trained = replace(model, runs=tuple(runs)), [*range(1), *range(17, 20)]
    count = sum(frozen.ops[at].op.parameters.at(Shape(1)) for at in trained)
    assert 0 < count < model.num_parameters
    [stage] = estimate(plan_of(Stage(0, 20, ((0,), (1,))), num_replicas=2), frozen, cluster(), Counted()).stages
    assert stage.optimizer_s == pytest.approx(count)
    assert stage.sync_s == pytest.approx(collective_s("all_reduce", 4 * count, cluster(), (0, 1)))
    with_weights = sum(bool(frozen.ops[at].op.parameters.at(Shape(1))) for at in trained)
    assert stage.work.weight_s == pytest.approx(with_weights * BACKWARD_S / 2)


def test_what_divides_nothing_is_not_told_as_divided() -> None:
    halves = Stage(0, 20, ((0, 1),), Degrees(1, 2), zero=1, sequence_parallel=True)
    alone = replace(halves, devices=((0,),), degrees=Degrees())
    mixed = replace(halves, degrees=Degrees(2), runs=(OpRun(9, 17, 1, 2),))
    told = [estimated(plan_of(stage)).stages[0] for stage in (halves, alone, mixed, replace(halves, runs=(OpRun(9, 17, 2, 1),)))]
    assert [(one.zero, one.sequence_parallel) for one in told] == [(1, False), (0, False), (1, True), (1, True)]


def test_a_stage_on_two_kinds_is_as_fast_as_the_slower() -> None:
    """Also where its ops have degrees of their own."""
    for runs in ((), (OpRun(9, 17, 2, 2),)):
        plan = plan_of(Stage(0, 20, ((0, 1, 4, 5),), Degrees(1, 4), runs=runs), samples=4)
        [stage] = estimate(plan, gpt(), two_kinds(), TwoSpeeds()).stages
        assert (stage.work.forward_s, stage.device) == (pytest.approx(2 * 20 * FORWARD_S), "v100-32gb")


def test_a_rank_that_gets_more_samples_decides() -> None:
    """Rank 1 takes three times as long and gets one row of four; its costs are those of its kind, so that rank 0 with three is later."""
    model, source = gpt(), Roofline(in_company=False)
    plan = plan_of(Stage(0, 20, ((0, 1),), Degrees(1, 2)), samples=4)
    slow = replace(plan, micro_batching=replace(plan.micro_batching, slower=((1, (3.0, 3.0, 3.0)),)))
    alone = estimate(plan_of(Stage(0, 20, ((0,),)), samples=3, global_batch=3), model, cluster(), source)
    assert estimate(slow, model, cluster(), source).stages[0].work == alone.stages[0].work


def test_of_two_replicas_on_one_kind_the_busier_decides_memory() -> None:
    stages = tuple(Stage(*ops, ((at,), (3 + at,))) for at, ops in enumerate([(0, 9), (9, 17), (17, 20)]))
    plan = plan_of(*stages, num_replicas=2, global_batch=14)
    held = [[stage.memory.activations_bytes for stage in estimated(shared_out(plan, *counts), on=cluster(6)).stages]
            for counts in ((6, 1), (1, 6))]  # fmt: skip
    one = [stage.memory.activations_bytes for stage in estimated(plan_of(*(replace(s, devices=s.devices[:1]) for s in stages),
                                                                         global_batch=2)).stages]  # fmt: skip
    assert held[0] == held[1] == pytest.approx([3 * one[0], 2 * one[1], one[2]])


def test_the_stage_that_others_wait_for_is_the_longest_of_its_group() -> None:
    """Group 0 has stages of 3 and 9 ops, group 1 of 3 and 5."""
    cuts = [(0, 3), (3, 6), (6, 15), (15, 20)]
    plan = plan_of(*(Stage(*ops, ((at % 2,),)) for at, ops in enumerate(cuts)), schedule="interleaved")
    assert estimated(plan).bottleneck == 2


def test_stages_that_update_by_themselves_step_and_keep_weights_for_every_micro_batch() -> None:
    model, shape = gpt(), Shape.padded(2, 8)
    plan = plan_of(*TWO_STAGES, schedule="pipedream")
    found = estimated(plan, model)
    assert [stage.work.backward_s for stage in found.stages] == [9 * BACKWARD_S + STEP_S, 11 * BACKWARD_S + STEP_S]
    assert [stage.optimizer_s for stage in found.stages] == [0.0, 0.0]
    for stage, (first, last), held in zip(found.stages, ((0, 9), (9, 20)), (2, 1), strict=True):
        assert stage.memory == stage_memory(model, first, last, shape, in_flight=held, versions=held, precision="fp32", device="a100-40gb")
    device = DEVICES["a100-40gb"]
    for schedule, held in (("pipedream", 2), ("1f1b", 1)):
        asked = Estimator(model, cluster(), Plain()).states(replace(plan, schedule=schedule), [0], 2, 4, device)
        assert asked == stage_memory(model, 0, 9, shape, in_flight=held, versions=held, precision="fp32", device="a100-40gb")


def test_what_a_window_hides_is_no_arithmetic_that_the_model_needs() -> None:
    """Of the triangle of pairs, 8 · 8 / 2, a window of four leaves out 4 · 4 / 2."""
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "seq_length": 8, "vocab": 64, "dtype": "fp32"}
    whole, narrow = (model_from_mapping({"family": "llama", **sizes, "window": window}, "test", "tiny") for window in (0, 4))
    plan = plan_of(Stage(0, whole.num_ops, ((0,),)))
    needed = [estimated(plan, model).mfu * estimated(plan, model).time_s for model in (whole, narrow)]
    attention = sum(place.op.needed_flops.at(Shape.padded(1, 8)) for place in whole.ops if place.op.kind == "attention")
    at_peak_s = attention * 8 / DEVICES["a100-40gb"].peak_flops_per_s("fp32")
    assert needed[0] - needed[1] == pytest.approx(at_peak_s / 4)


def test_messages_that_the_clock_hides_take_nothing_of_an_iteration() -> None:
    """What is neither pass nor message is bubble, and never less than nothing."""
    found = estimated(plan_of(*TWO_STAGES))
    own = dict(found.shares())
    passes_s = sum(own[name] for name in ("forward", "backward", "recomputation", "tp collectives", "waiting for the host"))
    idle_s = found.pipeline_s - passes_s
    for left in (0.9, 0.5, 0.1, 0.0):
        hidden_s = (1 - left) * idle_s
        shares = dict(found.with_times(found.time_s - hidden_s, found.pipeline_s - hidden_s).shares())
        assert min(shares.values()) >= -1e-12 and shares["transfers"] == pytest.approx(min(own["transfers"], left * idle_s), abs=1e-12)
        assert sum(shares.values()) == pytest.approx(found.time_s - hidden_s)


def test_what_takes_longer_is_dearer_and_does_less_a_second() -> None:
    found = estimated(plan_of(*TWO_STAGES), on=cluster(price=36.0))
    slower = found.with_times(2 * found.time_s, found.pipeline_s + found.time_s)
    assert found.price_usd and found.tokens_per_s and slower.price_usd == pytest.approx(2 * found.price_usd)
    for rate in ("samples_per_s", "tokens_per_s", "mfu"):
        assert getattr(slower, rate) == pytest.approx(getattr(found, rate) / 2)
    for before, after in zip(found.stages, slower.stages, strict=True):
        assert after.bubble_s == pytest.approx(before.bubble_s + found.time_s)


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (MicroBatching("padded", "fixed", 2), (2, 4)),
        (MicroBatching("packed", "dynamic", max_tokens=30), (3, 3)),
        (MicroBatching("packed", "dynamic", samples=2, max_tokens=30), (2, 4)),
        (MicroBatching("packed", "dynamic", max_tokens=3), (1, 8)),
        (MicroBatching("packed", "dynamic", max_tokens=10_000), (8, 1)),
        (MicroBatching("packed", "dynamic"), (1, 8)),
    ],
)
def test_micro_batches(batching: MicroBatching, expected: tuple[int, int]) -> None:
    plan = dataclasses.replace(plan_of(*TWO_STAGES), micro_batching=batching)
    assert micro_batches(plan) == (expected[0], (expected[1],))
    assert estimated(plan).num_micro_batches == expected[1]


def test_tokens_of_both_sides_share_a_micro_batch() -> None:
    both = uniform_plan("t5-small", "1xa100-40gb", global_batch=8, micro_batch=1, seq_length=20)
    plan = dataclasses.replace(both, dec_length=10, micro_batching=MicroBatching("padded", "dynamic", max_tokens=60))
    assert micro_batches(plan) == (2, (4,))


def test_tokens_of_both_sides_are_trained_on() -> None:
    both = uniform_plan("t5-tiny", "1xa100-40gb", global_batch=8, micro_batch=2)
    found = Estimator(resolve_model("t5-tiny"), resolve_cluster("1xa100-40gb"), Roofline()).estimate(both)
    assert both.dec_length and found.tokens_per_s == pytest.approx(8 * (both.seq_length + both.dec_length) / found.time_s)


def test_slow_ranks_get_smaller_parts() -> None:
    """Of two replicas on ranks 0, 1 and 2, 3 the second has a slow rank; alone, the plan divides samples over dp 2."""
    slower = MicroBatching("packed", "dynamic", 1, slower=((3, (2.0, 2.0, 2.0)),))
    replicas, divided = (
        dataclasses.replace(uniform_plan("gpt-tiny", "4xcpu", global_batch=12, micro_batch=6, pp=2, **choice), micro_batching=slower)
        for choice in ({"replicas": 2}, {"dp": 2})
    )
    assert micro_batches(replicas) == (1, (8, 4))
    assert dp_shares(divided, 0, 2) == (1.0, 0.5) and share_rows(divided, 6, 0, 2) == (4, 2)
    assert share_shape(divided, 6, 2) == Shape.packed([128] * 4)  # the larger part, which memory has to hold


@pytest.mark.parametrize(("factor", "counts"), [(1.0, (2, 2)), (2.0, (1, 3)), (9.0, (1, 3))])
def test_a_replica_with_a_slow_rank_runs_fewer_micro_batches(factor: float, counts: tuple[int, int]) -> None:
    """Four of one sample: one at half the pace and three at the whole take three, two and two would take four."""
    batching = MicroBatching("padded", "dynamic", 1, slower=((0, (factor,) * 3),))
    plan = replace(plan_of(Stage(0, 20, ((0,), (1,))), global_batch=4, num_replicas=2), micro_batching=batching)
    assert micro_batches(plan) == (1, counts)


def test_a_group_of_ranks_is_as_slow_as_its_slowest_and_none_is_without_work() -> None:
    """Ranks 0 and 1 divide ops, as do 2 and 3; rank 0 takes ten times as long."""
    batching = MicroBatching("padded", "fixed", 2, slower=((0, (10.0, 10.0, 10.0)),))
    plan = replace(plan_of(Stage(0, 20, ((0, 1, 2, 3),), Degrees(2, 2))), micro_batching=batching)
    assert dp_shares(plan, 0, 2) == pytest.approx((0.1, 1.0))
    assert share_rows(plan, 2, 0, 2) == (1, 2)  # none of two rows: one is counted still


def test_messages_take_turns_on_a_link() -> None:
    """They take 20 seconds over this network, a forward pass nine."""
    on = cluster(1, num_nodes=2)
    pipeline = planned_pipeline(plan_of(*TWO_STAGES), gpt(), on, Plain())
    found = execute(pipeline.schedule, pipeline.workload)
    assert 10 * MESSAGE_S > 9 * FORWARD_S and found.transfer_end_s[0, 0, 0] == pytest.approx(9 * FORWARD_S + 10 * MESSAGE_S)
    assert (found.transfer_start_s[0, 0, 1:] >= found.transfer_end_s[0, 0, :-1]).all()


def test_a_workload_has_what_each_part_of_a_stage_sends_and_holds() -> None:
    """One row on each of two ranks up to op 8, which both divide: gradients of two rows come back to each."""
    model, on = gpt(), cluster()
    plan = plan_of(Stage(0, 9, ((1, 2),), Degrees(1, 2), (OpRun(8, 9, 2, 1),)), Stage(9, 20, ((0,),)))
    work = planned_pipeline(plan, model, on, Plain()).workload
    assert work.transfers_s[:, 0, 0] == pytest.approx([MESSAGE_S, 2 * MESSAGE_S])
    parts = [activation_timeline(model, *ops, Shape.padded(rows, 8), tp).held_bytes for ops, rows, tp in (((0, 8), 1, 1), ((8, 9), 2, 2))]
    assert work.stored_bytes[0] == pytest.approx([sum(parts)] * 4) and min(parts) > 0


def test_a_sample_more_than_replicas_can_share_is_somebodys() -> None:
    batching = MicroBatching("padded", "dynamic", max_tokens=800)
    plan = replace(plan_of(Stage(0, 20, ((0,), (1,))), global_batch=5, num_replicas=2), micro_batching=batching)
    assert micro_batches(plan) == (3, (1, 1))


def test_shapes() -> None:
    plan = plan_of(*TWO_STAGES, dec_length=4)
    assert share_shape(plan, 4, 2) == Shape.padded(2, 8, 4) and share_shape(plan, 3, 2) == Shape.padded(2, 8, 4)
    packed = dataclasses.replace(plan, micro_batching=MicroBatching("packed", "fixed", 2))
    assert share_shape(packed, 2) == Shape.packed([8, 8], [4, 4])
    assert share_shape(dataclasses.replace(plan, seq_length=0), 3) == Shape.images(3)


def test_prediction_is_written_with_the_plan() -> None:
    plan = read_plan(next(path for path in EXAMPLES if "pp4" in path.name))
    found = estimate(plan, model_of(plan), cluster_of(plan), open_costs())
    done = with_prediction(plan, found)
    assert done.predicted is not None and done.predicted.time_s == found.time_s and done.costs == "roofline"
    assert [memory.total_bytes for memory in done.predicted.memory] == [pytest.approx(s.memory.total_bytes, abs=9) for s in found.stages]
    assert plan_from_dict(plan_to_dict(done), "test") == done
    assert with_prediction(plan, replace(found, source="measured")).costs == "measured"


def test_a_profile_is_used_and_what_it_lacks_is_said() -> None:
    plan = uniform_plan("gpt-1.3b", "4xh200-141gb", global_batch=16, micro_batch=2, pp=2, tp=2)
    model, on, source = model_of(plan), cluster_of(plan), open_costs("profile:h200-141gb")
    found = estimate(plan, model, on, source)
    assert found.source == "profile:h200-141gb" and found.notes == ()
    assert found.time_s != estimate(plan, model, on, Roofline()).time_s
    other = uniform_plan("gpt-6.7b", "8xh200-141gb", global_batch=16, micro_batch=1, pp=8)
    assert "modelled by the roofline" in estimate(other, model_of(other), cluster_of(other), source).notes[0]


def test_an_invalid_plan_is_refused() -> None:
    with pytest.raises(InputError, match="9:10 are placed nowhere"):
        estimated(plan_of(TWO_STAGES[0], Stage(10, 20, ((1,),))))


def test_no_estimate_is_below_the_compute_of_its_slowest_stage() -> None:
    """Of every plan of a grid: neither the slowest stage nor all devices together can be faster than their compute."""
    model, on = resolve_model("gpt-tiny"), resolve_cluster("8xa100-40gb")
    estimator = Estimator(model, on, Roofline())
    plans = list(plans_of_grid(Request.of("gpt-tiny", "8xa100-40gb", 32, "roofline", None, (1, 4), math.inf)))
    assert len(plans) > 20
    for plan in plans:
        found = estimator.estimate(plan)
        compute = [stage.work.forward_s + stage.work.backward_s for stage in found.stages]
        assert found.time_s >= found.num_micro_batches * max(compute)
        assert found.pipeline_s >= found.num_micro_batches * max(compute) + sum(compute) - max(compute)
        assert all(stage.bubble_s >= -1e-12 for stage in found.stages) and 0 < found.mfu < 1


def test_sequence_parallelism_divides_what_lies_between_products() -> None:
    model, on, source = resolve_model("gpt-1.3b"), resolve_cluster("4xa100-40gb"), Roofline(in_company=False)
    stage = Stage(0, model.num_ops, ((0, 1, 2, 3),), Degrees(4))
    base = uniform_plan("gpt-1.3b", "4xa100-40gb", tp=4, global_batch=8, micro_batch=4)
    plain, rows = (
        estimate(replace(base, stages=(replace(stage, sequence_parallel=wanted),)), model, on, source) for wanted in (False, True)
    )
    told, shape = with_sequence_parallelism(model), Shape.padded(4, 2048)
    saved = kept_bytes(model, 0, model.num_ops, shape, 4) - kept_bytes(told, 0, model.num_ops, shape, 4)
    held = plain.stages[0].memory.activations_bytes - rows.stages[0].memory.activations_bytes
    assert held == saved > 0.2 * plain.stages[0].memory.activations_bytes
    assert rows.stages[0].work.forward_s < plain.stages[0].work.forward_s and rows.time_s < plain.time_s
    # The same bytes, and two small sums for each norm, one for each bias that is not divided, and the rows of embedding and head.
    sums_s = sum(collective_s(c.kind, c.size_bytes(shape), on, range(4)) for place in told.ops for c in place.op.splits[0].collectives)
    assert rows.stages[0].work.tp_s == pytest.approx(sums_s)
    assert rows.stages[0].sequence_parallel and not plain.stages[0].sequence_parallel and not rows.notes


def test_a_cut_sends_rows_to_ranks_that_want_rows() -> None:
    model = resolve_model("gpt-1.3b")
    base = uniform_plan("gpt-1.3b", "4xa100-40gb", pp=2, tp=2, global_batch=8, micro_batch=2)
    times = {}
    for wanted in product((False, True), repeat=2):
        stages = tuple(replace(stage, sequence_parallel=rows) for stage, rows in zip(base.stages, wanted, strict=True))
        found = estimate(replace(base, stages=stages), model, resolve_cluster("4xa100-40gb"), Roofline(in_company=False))
        times[wanted] = found.stages[1].work.transfer_in_s, found.stages[0].work.transfer_out_s
    link = resolve_cluster("4xa100-40gb").link(1, 2)
    size = model.boundary_bytes(base.stages[1].first).at(Shape.padded(2, 2048))
    whole_s, half_s = (link.latency_s + part / link.bandwidth_bytes_per_s for part in (size, size / 2))
    assert times[False, False] == pytest.approx((whole_s, whole_s)) and times[True, True] == pytest.approx((half_s, half_s))
    assert times[False, True] == pytest.approx((half_s, whole_s)) and times[True, False] == pytest.approx((whole_s, half_s))


def test_sequence_parallelism_means_nothing_for_images() -> None:
    plan = uniform_plan("resnet-tiny", "2xa100-40gb", tp=2, global_batch=8, micro_batch=4)
    rows = replace(plan, stages=tuple(replace(stage, sequence_parallel=True) for stage in plan.stages))
    model, on = resolve_model("resnet-tiny"), resolve_cluster("2xa100-40gb")
    plain, told = (estimate(p, model, on, Roofline()) for p in (plan, rows))
    assert told.time_s == plain.time_s and told.peak_bytes == plain.peak_bytes
    assert "without effect" in told.notes[0] and not told.stages[0].sequence_parallel


def test_bf16_where_it_is_emulated_is_as_slow_as_fp32_and_said() -> None:
    plans = {name: uniform_plan("gpt-350m", "2xt4", pp=2, global_batch=4, micro_batch=1, precision=name) for name in ("bf16", "fp16")}
    found = {name: estimate(plan, model_of(plan), cluster_of(plan), Roofline()) for name, plan in plans.items()}
    assert found["bf16"].time_s > 2 * found["fp16"].time_s and not found["fp16"].notes
    assert "bf16 is emulated at the rate of fp32 on t4" in found["bf16"].notes[0]


@pytest.mark.parametrize("name", ["2xh100", "1xh100+1xt4"])
def test_devices_that_idle_slow_nobody_down(name: str) -> None:
    plan, own = plan_of(Stage(0, 20, ((0,),))), Roofline()
    times = [estimate(plan, gpt(), resolve_cluster(on), own).time_s for on in ("1xh100", name)]
    assert times[0] == times[1]
