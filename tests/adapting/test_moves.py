"""Moves between plans: applied to arrays laid out by one plan they give the other's layout, to the element and with nothing to spare."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from runtime_cases import MODELS, covering_choices, make_case

from penstock.adapting.holdings import MASTER, STATE, Holdings, Layouts, Sizes, holdings
from penstock.adapting.moves import MAX_MOVE_BYTES, Move, Moves, moves
from penstock.adapting.split_moves import SplitMoves, split_moves
from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.models.modules.parallel import TensorParallel
from penstock.models.ops import Model
from penstock.plans.plan import Degrees, MicroBatching, Plan, Stage
from penstock.plans.ranks import seats_of
from penstock.plans.references import model_of
from penstock.runtime.checkpoints.layout import BUFFERS, WEIGHTS, parameter_layout
from penstock.runtime.checkpoints.manifest import Box, volume
from penstock.runtime.parallel.gradients import gradients_of
from penstock.runtime.parallel.stage import StageModule

CLUSTER = resolve_cluster("4xcpu+4xcpu+4xcpu")
NUM_RANKS = 12
GPT = {"family": "gpt", "layers": 2, "hidden": 32, "heads": 4, "seq_length": 24, "vocab": 61}


@cache
def layouts_of(family: str) -> Layouts:
    plan = next(plan for plan in plans_of(family))
    return Layouts(model_of(plan))


@cache
def plans_of(family: str) -> tuple[Plan, ...]:
    """Plans of every kind for one model, on some of twelve ranks in any order."""
    generator = random.Random(7)
    found = []
    for number, choice in enumerate(covering_choices(120)):
        if choice["family"] == family:
            plan = replace(make_case(choice, number, iterations=0).plan, precision=generator.choice(["fp32", "bf16"]))
            places = generator.sample(range(NUM_RANKS), len(plan.ranks))
            stages = tuple(replace(stage, devices=tuple(tuple(places[rank] for rank in ranks) for ranks in stage.devices))
                           for stage in plan.stages)  # fmt: skip
            found.append(replace(plan, stages=stages))
    return tuple(found)


FAMILIES = sorted(MODELS)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def values(name: str, kind: str, shape: tuple[int, ...]) -> Any:
    """What a tensor holds: numbers that tell element, tensor and kind apart; a weight is its master rounded."""
    kind = MASTER if kind == WEIGHTS else kind
    return np.arange(1, int(np.prod(shape)) + 1).reshape(shape) + 10_000_000 * (zlib.crc32(f"{kind}/{name}".encode()) % 9000)


World = dict[tuple[int, str, str], Any]
"""(rank, kind, name) → the global tensor as far as the rank has it; 0 is nothing."""


def world_of(held: Holdings, sizes: Sizes) -> World:
    world: World = {}
    for tensor in held.values():
        for kind in sizes.kinds[tensor.group]:
            truth = values(tensor.name, kind, tensor.shape)
            for rank, region in tensor.regions.items():
                own = world[rank, kind, tensor.name] = np.zeros(tensor.shape, dtype=np.int64)
                for box in region:
                    assert not own[slices(box)].any()  # boxes of a region do not overlap
                    own[slices(box)] = truth[slices(box)]
    return world


def apply(world: World, made: Moves) -> None:
    for move in made.boxes:
        source = world[move.source, move.kind, move.name][slices(move.box)]
        own = world.setdefault((move.target, move.kind, move.name), np.zeros(move.shape, dtype=np.int64))
        assert source.all() and not own[slices(move.box)].any() and move.source != move.target and move.num_bytes <= MAX_MOVE_BYTES
        own[slices(move.box)] = source
    for (rank, kind, name), master in list(world.items()):
        if kind == MASTER:
            own = world.setdefault((rank, WEIGHTS, name), np.zeros(master.shape, dtype=np.int64))
            own[master != 0] = master[master != 0]


def needed_bytes(had: World, wanted: World, sizes: Sizes) -> int:
    """Elements that ranks need and lack, weights excepted where the rank has their masters afterwards."""
    element_bytes = {kind: size for kinds in sizes.kinds.values() for kind, size in kinds.items()}
    total = 0
    for (rank, kind, name), own in wanted.items():
        lacking = (own != 0) & (had.get((rank, kind, name), np.zeros_like(own)) == 0)
        if kind == WEIGHTS and (rank, MASTER, name) in wanted:
            lacking &= wanted[rank, MASTER, name] == 0
        total += int(lacking.sum()) * element_bytes[kind]
    return total


@pytest.mark.parametrize("family", FAMILIES)
def test_moves_turn_one_layout_into_the_other_and_carry_nothing_else(family: str) -> None:
    generator = random.Random(family)
    plans, layouts = plans_of(family), layouts_of(family)
    for _ in range(12):
        old, new = generator.sample(plans, 2)
        new = replace(new, precision=old.precision)
        sizes = Sizes.of(old)
        had, wanted = holdings(old, layouts), holdings(new, layouts)
        made = moves(old, new, layouts=layouts, cluster=CLUSTER)
        before, after, world = world_of(had, sizes), world_of(wanted, sizes), world_of(had, sizes)
        apply(world, made)
        for key, own in after.items():
            assert (world[key][own != 0] == own[own != 0]).all(), key
        assert made.num_bytes == sum(move.num_bytes for move in made.boxes) == needed_bytes(before, after, sizes)
        for rank, peak in made.peak_bytes.items():  # a rank holds both plans' parts
            assert made.before_bytes.get(rank, 0) + made.after_bytes.get(rank, 0) <= peak


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_of_every_tensor_is_held(family: str) -> None:
    for plan in plans_of(family):
        held, sizes = holdings(plan, layouts_of(family)), Sizes.of(plan)
        found: dict[tuple[str, str], Any] = {}
        for (_, kind, name), own in world_of(held, sizes).items():
            found[kind, name] = np.maximum(found.get((kind, name), 0), own)
        assert all(own.all() for own in found.values())
        assert {name for kind, name in found if kind == WEIGHTS} >= {name for kind, name in found if kind == "exp_avg"}


class OneRank:
    """The world of one rank of a plan, without processes."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank, self.device, self.staged = plan, rank, "cpu", False

    def tensor_parallel(self, ranks: tuple[int, ...]) -> TensorParallel:
        return TensorParallel(ranks.index(self.rank), len(ranks))


def held_by_runtime(plan: Plan, model: Model) -> dict[tuple[str, str, int], set[Box]]:
    """(group, name, rank) → boxes, as stages and gradients of the runtime hold them."""
    found: dict[tuple[str, str, int], set[Box]] = {}
    for rank, seats in seats_of(plan).items():
        for seat in seats:
            world: Any = OneRank(plan, rank)
            stage = StageModule(model, plan.stages[seat.stage], seat.stage, seat.replica, world, None)  # type: ignore[arg-type]
            own = gradients_of(stage, world)
            whole = stage.weights is None or not stage.weights.divides
            updated = {id(held.parameter) for held in own.updated_here()}
            for held in own.kept():
                layout = parameter_layout(held.module, held.name)
                start = held.start
                part = layout.boxes() if start is None else layout.boxes(start, start + held.parameter.numel())
                found.setdefault((WEIGHTS, layout.name, rank), set()).update(layout.boxes() if whole else part)
                if id(held.parameter) in updated:
                    found.setdefault((STATE, layout.name, rank), set()).update(part)
            for module in stage.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    found[BUFFERS, f"{module.name}.{name}", rank] = {tuple((0, size) for size in buffer.shape)}
    return {key: boxes for key, boxes in found.items() if boxes}


@pytest.mark.parametrize("family", FAMILIES)
def test_holdings_are_what_the_runtime_holds(family: str) -> None:
    for plan in plans_of(family)[:8]:
        model = model_of(plan)
        held = holdings(plan, layouts_of(family))
        found = {(group, name, rank): set(region) for (group, name), tensor in held.items() if group != "steps"
                 for rank, region in tensor.regions.items() if region}  # fmt: skip
        assert found == held_by_runtime(plan, model)


def plan_of(devices: list[list[tuple[int, ...]]], **more: Any) -> Plan:
    """A pipeline of equal stages on the given ranks."""
    plan = Plan(GPT, "4xcpu+4xcpu", 8, (), MicroBatching(samples=1), len(devices[0]), precision="bf16")
    ops = model_of(plan).num_ops
    cuts = [ops * at // len(devices) for at in range(len(devices) + 1)]
    stages = [Stage(cuts[at], cuts[at + 1], tuple(own), Degrees(len(own[0])), **more) for at, own in enumerate(devices)]
    return replace(plan, stages=tuple(stages))


def test_the_same_plan_moves_nothing() -> None:
    plan = plan_of([[(0,), (1,)], [(2,), (3,)]], zero=1)
    made = moves(plan, plan)
    assert made.boxes == () and made.num_bytes == 0 and made.time_s(CLUSTER) == 0.0
    assert made.before_bytes == made.after_bytes and not made.arriving_bytes


def test_a_rank_on_the_same_node_sends() -> None:
    """Ranks 0 and 4 hold the same: ranks 1 and 2 get all from their own node, rank 5 from its."""
    made = moves(plan_of([[(0,), (4,)]]), plan_of([[(1,), (2,), (5,)]]))
    assert set(made.link_bytes) == {(0, 1), (0, 2), (4, 5)}
    assert len(set(made.link_bytes.values())) == 1


def test_ranks_that_hold_the_same_share_the_sending() -> None:
    """Three ranks of one node hold all, one joins: none sends more than a third and the largest box."""
    made = moves(plan_of([[(0,), (1,), (2,)]]), plan_of([[(0,), (1,), (3,)]]))
    largest = max(sum(move.num_bytes for move in made.boxes if (move.name, move.box) == (one.name, one.box)) for one in made.boxes)
    assert set(made.link_bytes) == {(0, 3), (1, 3), (2, 3)}
    assert max(made.link_bytes.values()) - min(made.link_bytes.values()) <= largest


def test_masters_bring_their_weights_along() -> None:
    made = moves(plan_of([[(0,)]]), plan_of([[(1,)]]))
    assert {move.kind for move in made.boxes} == {"master", "exp_avg", "exp_avg_sq", "step"}
    assert made.arriving_bytes[1] == made.after_bytes[1] > made.num_bytes  # the rounded weights are held, but did not travel
    assert made.peak_bytes == {0: made.before_bytes[0], 1: 2 * made.after_bytes[1]}  # as they came, and where they go


def test_a_new_replica_that_owns_no_state_gets_weights_alone() -> None:
    zero1 = moves(plan_of([[(0,), (1,)]], zero=1), plan_of([[(0,), (1,), (2,)]], zero=1))
    assert "weights" in {move.kind for move in zero1.boxes if move.target == 2}


def test_time_is_that_of_the_busiest_link_and_slow_links_count() -> None:
    made = moves(plan_of([[(0,)]]), plan_of([[(4,)]]))
    link = CLUSTER.link(0, 4)
    alone_s = made.num_bytes / CLUSTER.flow_bandwidth_bytes_per_s(0, 4) + link.latency_s
    assert made.time_s(CLUSTER) == pytest.approx(alone_s)
    assert made.time_s(CLUSTER, lambda _a, _b: 4.0) == pytest.approx(4 * (alone_s - link.latency_s) + link.latency_s)
    inside, link = by_hand((0, 1, 10**9)), CLUSTER.link(0, 1)
    slow_s = inside.time_s(CLUSTER, lambda a, b: 4.0 if (a, b) == (0, 1) else 1.0)
    assert slow_s == pytest.approx(4 * 10**9 / link.bandwidth_bytes_per_s + link.latency_s)


@pytest.mark.parametrize(("word", "value"), [("precision", "fp32"), ("optimizer", "sgd"), ("model", "gpt-1.3b")])
def test_plans_of_other_training_are_refused(word: str, value: str) -> None:
    old = plan_of([[(0,)]])
    with pytest.raises(InputError, match=f"{word} is '{value}' in the new plan, but .* in the old one"):
        moves(old, replace(old, **{word: value}))


def by_hand(*sent: tuple[int, int, int], **held: int) -> Moves:
    """Messages by (source, target, bytes), and what rank 0 holds."""
    boxes = tuple(Move(WEIGHTS, f"w{number}", (1,), ((0, 1),), *one) for number, one in enumerate(sent))
    return Moves(boxes, {0: held.get("before", 0)}, {0: held.get("arriving", 0)}, {0: held.get("after", 0)})


def test_a_node_that_receives_from_two_others_waits_for_both() -> None:
    """Ranks 0 and 4, on two nodes, send to two ranks of a third: each has its own network to itself, and they share the third's."""
    link, size = CLUSTER.link(0, 8), 10**9
    alone_s = size / link.bandwidth_bytes_per_s
    assert by_hand((0, 8, size)).time_s(CLUSTER) == pytest.approx(alone_s + link.latency_s)
    assert by_hand((0, 8, size), (4, 9, size)).time_s(CLUSTER) == pytest.approx(2 * alone_s + link.latency_s)
    assert by_hand((8, 0, size), (9, 4, size)).time_s(CLUSTER) == pytest.approx(2 * alone_s + link.latency_s)


def test_each_message_of_a_rank_has_its_latency() -> None:
    link = CLUSTER.link(0, 1)
    made = by_hand((0, 1, 100), (0, 2, 100), (0, 3, 100))
    assert made.time_s(CLUSTER) == pytest.approx(300 / link.bandwidth_bytes_per_s + 3 * link.latency_s)


def test_room_is_needed_for_what_an_allocator_loses_too() -> None:
    cluster = resolve_cluster("1xa100-40gb")
    room = cluster.device(0).memory_bytes - 2**29  # CUDA's own
    assert by_hand(before=int(0.5 * room / 1.02), arriving=int(0.3 * room / 1.02), after=int(0.19 * room / 1.02)).unfit(cluster) == ""
    assert "rank 0 would hold" in by_hand(before=int(room / 1.01)).unfit(cluster)


def test_no_move_carries_more_than_its_share() -> None:
    """Of a table of 64 million values, in bf16 with fp32 masters and moments."""
    plan = Plan({**GPT, "hidden": 1024, "vocab": 65536}, "2xcpu", 1, (Stage(0, 22, ((0,),)),), MicroBatching(samples=1), precision="bf16")
    plan = replace(plan, stages=(replace(plan.stages[0], last=model_of(plan).num_ops),))
    made = moves(plan, replace(plan, stages=(replace(plan.stages[0], devices=((1,),)),)))
    assert max(one.num_bytes for one in made.boxes) <= MAX_MOVE_BYTES and made.num_bytes > 20 * MAX_MOVE_BYTES
    steps = sum(one.num_bytes for one in made.boxes if one.kind == "step")
    assert made.num_bytes == 12 * model_of(plan).num_parameters + steps


def test_gradients_travel_in_the_dtype_that_they_are_summed_in() -> None:
    """Where an update is made again: four bytes of each weight if plans sum in fp32, two of bf16's own."""
    for gradients, size in (("fp32", 4), ("", 2)):
        old, new = (replace(plan_of([[(rank,)]]), precision="bf16", gradients=gradients) for rank in (0, 1))
        found = split_moves(old, new, moves(old, new), Layouts(model_of(old)))
        assert found.gradients and all(one.num_bytes == size * volume(one.box) for one in found.gradients)


def test_copies_before_a_step_are_made_by_all_ranks_at_once() -> None:
    """10 GB/s each: the one that sends most is waited for, and then what is left to travel."""
    cluster, late = resolve_cluster("4xa100-40gb"), Move(WEIGHTS, "late", (1,), ((0, 1),), 0, 3, 10**6)
    sizes = 5 * 10**9, 10**10, 10**9
    early = tuple(Move(WEIGHTS, f"{source}", (1,), ((0, 1),), source, 3, size) for source, size in enumerate(sizes))
    split = SplitMoves(frozenset(), early, (late,), ())
    assert split.pause_s(by_hand((0, 3, 1)), cluster) == pytest.approx(1.0 + by_hand((0, 3, 10**6)).time_s(cluster))


def test_gradients_of_what_travelled_beside_a_step_are_waited_for() -> None:
    gradient = Move("gradient", "w", (1,), ((0, 1),), 0, 3, 10**9)
    cluster = resolve_cluster("4xa100-40gb")
    pause_s = SplitMoves(frozenset(), (), (), (gradient,)).pause_s(by_hand((0, 3, 1)), cluster)
    assert pause_s == pytest.approx(by_hand((0, 3, 10**9)).time_s(cluster))


def test_nothing_travels_beside_a_step_where_a_processor_has_no_room_for_copies() -> None:
    room = (cluster := resolve_cluster("4xcpu")).device(0).memory_bytes
    for size, fits in ((room // 4, True), (room // 2, False)):
        early = (Move(WEIGHTS, "w", (1,), ((0, 1),), 0, 3, size),)
        pause_s = SplitMoves(frozenset(), early, (), ()).pause_s(by_hand((0, 3, 1), before=room - room // 3), cluster)
        assert (pause_s < 1e9) == fits


def test_ops_whose_update_others_make_or_share_do_not_travel_beside_it() -> None:
    """The owner of an op's state under ZeRO is another rank, and a shared weight learns from several ops."""
    for zero in (0, 1, 2):
        old, new = (replace(plan_of([[(rank, rank + 1)]], zero=zero), precision="bf16") for rank in (0, 4))
        old, new = (replace(one, stages=(replace(one.stages[0], degrees=Degrees(1, 2)),)) for one in (old, new))
        layouts = Layouts(model_of(old))
        assert layouts.shared
        found = split_moves(old, new, moves(old, new), layouts)
        expected = set() if zero else {*range(layouts.model.num_ops)} - layouts.shared
        assert {op for op, _ in found.ops} == expected and bool(found.early) == (not zero)
