"""Each rule of a valid plan, by an example that breaks it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.clusters import resolve_cluster
from penstock.errors import InputError
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Predicted, Stage, StageMemory
from penstock.plans.remarks import remarks
from penstock.plans.validity import check_plan, require_valid

# gpt-tiny has 4 layers: ops 0 (embedding), 1:33 (layers of 8), 33:36 (head); heads 4, so tp 1, 2 or 4.
GOOD = uniform_plan("gpt-tiny", "4xa100-40gb", pp=2, replicas=2, global_batch=16, micro_batch=2)
WIDE = uniform_plan("gpt-tiny", "4xa100-40gb", pp=2, tp=2, global_batch=16, micro_batch=2)
CHUNKS = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, schedule="interleaved", global_batch=16, micro_batch=2)
BERT = uniform_plan("bert-tiny", "1xa100-40gb", global_batch=16, micro_batch=2)
T5 = uniform_plan("t5-tiny", "1xa100-40gb", global_batch=16, micro_batch=2)
RESNET = uniform_plan("resnet-tiny", "1xa100-40gb", global_batch=16, micro_batch=2)


def stage(plan: Plan, index: int, **changes: Any) -> Plan:
    """The plan with fields of one stage changed."""
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


def shared(plan: Plan, *counts: int) -> Plan:
    """The plan with these numbers of micro-batches."""
    return replace(plan, micro_batching=replace(plan.micro_batching, per_replica=counts))


BROKEN: dict[str, tuple[Plan, list[str]]] = {
    "gap": (stage(GOOD, 1, first=20), ["stages.1.ops is 20:36", "17:20 are placed nowhere"]),
    "late start": (stage(GOOD, 0, first=1), ["stages.0.ops", "0:1 are placed nowhere"]),
    "overlap": (stage(GOOD, 1, first=10), ["stages.1.ops is 10:36", "10:17 are placed twice"]),
    "one op twice": (stage(GOOD, 1, first=16), ["stages.1.ops is 16:36", "16:17 are placed twice"]),
    "same ops twice": (replace(GOOD, stages=(GOOD.stages[0], replace(GOOD.stages[1], first=0, last=17))), ["0:17 are placed twice"]),
    "out of order": (replace(GOOD, stages=GOOD.stages[::-1]), ["stages.0.ops is 17:36", "placed nowhere"]),
    "empty stage": (stage(GOOD, 1, first=36), ["stages.1.ops is 36:36", "no op"]),
    "too short": (stage(GOOD, 1, last=30), ["end at op 30", "36 ops", "30:36 are placed nowhere"]),
    "too long": (stage(GOOD, 1, last=40), ["end at op 40", "36:40 do not exist"]),
    "recompute outside": (stage(GOOD, 0, recompute=((), ((9, 20),))), ["stages.0.recompute.1", "9:20", "0:17"]),
    "recompute twice": (stage(GOOD, 0, recompute=(((1, 9), (8, 12)),)), ["stages.0.recompute.0", "8:12", "reach 9"]),
    "recompute nothing": (stage(GOOD, 0, recompute=(((9, 9),),)), ["stages.0.recompute.0", "9:9"]),
    "run outside": (stage(GOOD, 0, runs=(OpRun(16, 18, 1, 1),)), ["stages.0.runs", "16:18"]),
    "runs overlap": (stage(GOOD, 0, runs=(OpRun(1, 9, 1, 1), OpRun(8, 9, 1, 1))), ["stages.0.runs", "8:9"]),
    "run product": (stage(GOOD, 0, runs=(OpRun(1, 9, 2, 1),)), ["stages.0.runs.0", "tp 2 × dp 1 = 2", "1 device"]),
    "run of fewer": (stage(WIDE, 0, runs=(OpRun(1, 9, 1, 1),)), ["stages.0.runs.0", "tp 1 × dp 1 = 1", "2 devices"]),
    "run of no whole sample": (
        stage(replace(WIDE, micro_batching=replace(WIDE.micro_batching, samples=1)), 0, runs=(OpRun(1, 9, 1, 2),)),
        ["stages.0 splits a micro-batch over dp 2", "samples 1"],
    ),
    "five patterns": (stage(GOOD, 0, recompute=((),) * 5), ["stages.0.recompute", "at most 4"]),
    "replicas": (replace(GOOD, num_replicas=4), ["stages.0.devices has 2 entries", "num_replicas is 4"]),
    "too few ranks": (stage(WIDE, 0, devices=((0,),)), ["stages.0.devices.0 has 1 rank (0)", "tp 2 × dp 1 needs 2"]),
    "too many ranks": (stage(GOOD, 0, devices=((0, 3), (1,))), ["stages.0.devices.0 has 2 ranks", "needs 1"]),
    "rank in two stages": (stage(GOOD, 1, devices=((2,), (1,))), ["stages.1.devices.1 and stages.0.devices.1 both have rank 1"]),
    "rank in two replicas": (stage(GOOD, 1, devices=((2,), (2,))), ["stages.1.devices.1 and stages.1.devices.0 both have rank 2"]),
    "rank twice": (stage(WIDE, 0, devices=((1, 1),)), ["stages.0.devices.0 names rank 1 twice"]),
    "no such rank": (stage(GOOD, 1, devices=((2,), (4,))), ["stages.1.devices has rank 4", "ranks 0-3"]),
    "cp": (stage(GOOD, 0, degrees=Degrees(cp=2)), ["stages.0.degrees.cp is 2", "Set it to 1"]),
    "ep": (stage(GOOD, 0, degrees=Degrees(ep=2)), ["stages.0.degrees.ep is 2"]),
    "tp of an op": (
        replace(stage(WIDE, 0, devices=((0, 1, 4),), degrees=Degrees(3)), cluster="8xa100-40gb"),
        ["stages.0, op 2 'layers.0.qkv'", "tp=3", "more ops", "allow tp 1."],
    ),
    "no such split": (stage(WIDE, 0, runs=(OpRun(2, 3, 2, 1, algo=7),)), ["op 2 'layers.0.qkv'", "algo=7"]),
    "mixed kinds": (
        replace(stage(WIDE, 0, devices=((0, 4),)), cluster="4xa100-40gb+4xa10g"),
        ["stages.0", "ranks 0,4 (tp 2)", "a100-40gb and a10g"],
    ),
    "mixed kinds in a run": (
        replace(stage(WIDE, 0, devices=((0, 4),), degrees=Degrees(1, 2), runs=(OpRun(2, 5, 2, 1),)), cluster="4xa100-40gb+4xa10g"),
        ["stages.0", "(tp 2)", "a100-40gb and a10g"],
    ),
    "batch does not divide": (
        replace(GOOD, global_batch=18, micro_batching=MicroBatching("padded", "fixed", 4)),
        ["global_batch is 18", "2 replicas × 4 samples = 8", "global_batch 16 or 24", "micro_batching.samples 3 or 9"],
    ),
    "batch below replicas": (replace(GOOD, global_batch=1), ["global_batch is 1", "2 replicas", "global_batch 4."]),
    "samples over dp": (stage(WIDE, 0, degrees=Degrees(1, 2), runs=(OpRun(0, 1, 1, 2),)), []),
    "odd samples over dp": (
        replace(stage(WIDE, 0, degrees=Degrees(1, 2)), global_batch=15, micro_batching=MicroBatching("padded", "fixed", 3)),
        ["stages.0", "dp 2", "micro_batching.samples 3", "samples 2 or 4"],
    ),
    "fixed without samples": (replace(GOOD, micro_batching=MicroBatching("padded", "fixed")), ["micro_batching.samples is missing"]),
    "fixed with tokens": (
        replace(GOOD, micro_batching=MicroBatching("padded", "fixed", 2, 4096)),
        ["micro_batching.max_tokens is 4096", "'fixed'"],
    ),
    "unequal shares": (shared(GOOD, 5, 3), []),
    "equal shares": (shared(GOOD, 4, 4), []),
    "shares of too few replicas": (shared(GOOD, 8), ["micro_batching.per_replica has 1 entry", "num_replicas is 2"]),
    "shares of too many replicas": (shared(GOOD, 4, 3, 1), ["micro_batching.per_replica has 3 entries", "num_replicas is 2"]),
    "shares that are no batch": (
        shared(GOOD, 5, 4),
        ["micro_batching.per_replica is [5, 4]: 9 micro-batches of 2 samples make 18", "global_batch is 16", "sum is 8", "global_batch 18"],
    ),
    "shares of a batch that does not divide": (
        replace(shared(GOOD, 5, 3), global_batch=17),
        ["global_batch is 17", "Use another micro_batching.samples, or global_batch 16"],
    ),
    "share of nothing": (shared(GOOD, 8, 0), ["micro_batching.per_replica.1", "1"]),
    "shares of a dynamic batch": (
        replace(GOOD, micro_batching=MicroBatching("padded", "dynamic", 2, per_replica=(5, 3))),
        ["micro_batching.per_replica is given", "'dynamic'"],
    ),
    "slower than what": (replace(GOOD, micro_batching=MicroBatching(samples=2, slower=((99, (2.0,) * 3),))), ["slower names rank 99"]),
    "slower by nothing": (replace(GOOD, micro_batching=MicroBatching(samples=2, slower=((0, (0.0, 1.0, 1.0)),))), ["slower.0", "0"]),
    "a link of one rank": (replace(GOOD, micro_batching=MicroBatching(samples=2, slower_links=((0, 0, 2.0),))), ["slower_links names 0-0"]),
    "a link to nobody": (replace(GOOD, micro_batching=MicroBatching(samples=2, slower_links=((0, 99, 2.0),))), ["slower_links names 0-99"]),
    "shares instead of division": (
        replace(GOOD, global_batch=14),
        ["global_batch is 14", "unequal numbers of micro-batches (micro_batching.per_replica, 7 in all)"],
    ),
    "dynamic needs neither": (replace(GOOD, global_batch=17, micro_batching=MicroBatching("packed", "dynamic")), []),
    "layout": (replace(T5, micro_batching=MicroBatching("packed", "fixed", 2)), ["micro_batching.layout is 'packed'", "'padded'"]),
    "no length": (replace(GOOD, seq_length=0), ["seq_length is 0", "128"]),
    "too long for the positions": (replace(BERT, seq_length=4096), ["seq_length is 4096", "128 positions"]),
    "no decoder length": (replace(T5, dec_length=0), ["dec_length is 0", "32"]),
    "decoder length without decoder": (replace(GOOD, dec_length=5), ["dec_length is 5"]),
    "one too long for the positions": (replace(BERT, seq_length=129), ["seq_length is 129", "128 positions"]),
    "length of images": (replace(RESNET, seq_length=224), ["seq_length is 224", "no such input"]),
    "schedule": (replace(GOOD, schedule="dapple"), ["schedule", "'dapple'", "'1f1b'"]),
    "interleaved without chunks": (replace(GOOD, schedule="interleaved"), ["2 stages on 2 groups", "4 stages"]),
    "interleaved on one group": (stage(replace(CHUNKS, stages=(CHUNKS.stages[0],)), 0, last=36), ["1 stage on 1 group"]),
    "interleaved in another order": (
        stage(stage(CHUNKS, 2, devices=((1,),)), 3, devices=((0,),)),
        ["stages.2.devices differ from those of stages.0"],
    ),
    "chunks under 1f1b": (replace(CHUNKS, schedule="1f1b"), ["stages.2.devices.0 and stages.0.devices.0", "'interleaved'"]),
    "zero-bubble alone": (replace(BERT, schedule="zero-bubble"), ["zero-bubble", "2 or more stages"]),
    "zero-bubble recomputes": (replace(stage(GOOD, 1, recompute=(((17, 25),),)), schedule="zero-bubble"), ["stages.1.recompute", "1f1b"]),
    "ZeRO-2 in a pipeline": (stage(GOOD, 0, zero=2), ["stages.0.zero is 2", "ZeRO-2/3 only without a pipeline"]),
    "ZeRO-3 alone": (stage(BERT, 0, zero=3), []),
    "memory of too few stages": (replace(GOOD, predicted=Predicted(1.0, "x", memory=(StageMemory(),))), ["predicted.memory has 1 entry"]),
    "no such model": (replace(GOOD, model="gpt-tiy"), ["unknown model 'gpt-tiy'", "'gpt-tiny'"]),
    "no such field of a model": (replace(GOOD, model={"base": "gpt-tiny", "layer": 4}), ["field 'model'", "'layers'"]),
    "no such cluster": (replace(GOOD, cluster="4xa100-40g"), ["a100-40gb"]),
    "no such cluster inline": (replace(GOOD, cluster={"nodes": 3}), ["field 'cluster'"]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_rule(name: str) -> None:
    plan, parts = BROKEN[name]
    problems = check_plan(plan)
    if not parts:
        assert problems == []
        return
    assert all(any(part in problem for problem in problems) for part in parts), problems
    with pytest.raises(InputError, match="problem"):
        require_valid(plan)


def test_one_mistake_gives_one_problem() -> None:
    single = (
        "gap",
        "overlap",
        "recompute outside",
        "run product",
        "no such rank",
        "tp of an op",
        "layout",
        "ZeRO-2 in a pipeline",
        "no length",
    )
    for name in single:
        assert len(check_plan(BROKEN[name][0])) == 1, (name, check_plan(BROKEN[name][0]))


@pytest.mark.parametrize("plan", [GOOD, WIDE, CHUNKS, BERT, T5, RESNET])
def test_good_plans(plan: Plan) -> None:
    assert check_plan(plan) == []
    require_valid(plan)


def test_huge_degrees_are_answered_at_once() -> None:
    huge = stage(GOOD, 0, degrees=Degrees(9_999_999, 9_999_999), runs=(OpRun(0, 17, 9_999_998, 9_999_997),))
    assert any("needs 99999980000001" in problem for problem in check_plan(huge))


def test_an_inline_model_is_enough() -> None:
    assert check_plan(replace(GOOD, model={"base": "gpt-tiny", "hidden": 128})) == []


def test_what_a_stage_says_of_its_ops() -> None:
    own = Stage(17, 21, ((0, 1),), Degrees(1, 2), runs=(OpRun(18, 19, 2, 1, algo=1),), recompute=((), ((17, 18), (20, 21))))
    assert own.algos() == [0, 1, 0, 0]
    assert (own.run_of(18).tp, own.run_of(19).tp, own.run_of(19).dp) == (2, 1, 2)
    assert (own.recomputed(), own.recomputed(1)) == (frozenset(), frozenset({0, 3}))
    assert list(own.tp_groups()) == [(0,), (1,)] and list(own.tp_groups(2)) == [(0, 1)]


def test_remarks() -> None:
    cluster = resolve_cluster("16xa100-40gb")
    across = Stage(0, 36, ((7, 8),), Degrees(2), zero=1)
    memory = Predicted(1.0, "roofline", memory=(StageMemory(weights_bytes=10**12),))
    plan = replace(BERT, model="gpt-tiny", cluster="16xa100-40gb", stages=(across,), predicted=memory)
    said = remarks(plan, cluster)
    for part in ("14 of 16 devices are idle: ranks 0-6,9-15", "zero is 1 without effect", "ranks 7-8 of different nodes", "1000.0 GB"):
        assert any(part in remark for remark in said), said
    lonely = replace(stage(GOOD, 0, sequence_parallel=True), global_batch=4)
    said = remarks(lonely, resolve_cluster("4xa100-40gb"))
    assert said[0] == "stages.0.sequence_parallel is without effect: tp is 1."
    assert said[1] == "1 micro-batch per replica cannot fill a pipeline of 2 device groups."
    assert "not a multiple of 2" in remarks(replace(CHUNKS, global_batch=6), resolve_cluster("2xa100-40gb"))[0]
    mixed = Stage(0, 36, ((0, 1),), Degrees(1, 2), (OpRun(3, 9, 2, 1),), zero=1, sequence_parallel=True)
    turned = replace(mixed, degrees=Degrees(2), runs=(OpRun(3, 9, 1, 2),))
    for own in (mixed, turned):  # ops with degrees of their own feel both settings
        assert remarks(replace(plan, stages=(own,), predicted=None), resolve_cluster("2xa100-40gb")) == []
    assert remarks(GOOD, resolve_cluster("4xa100-40gb")) == []
    assert remarks(shared(GOOD, 7, 1), resolve_cluster("4xa100-40gb")) == [said[1]]


def test_what_is_usual_is_not_remarked_on() -> None:
    """Two ranks that divide samples share state; tensor-parallel pairs inside nodes are no slower for the other pair; micro-batches that
    just fill a pipeline do."""
    pairs = Stage(0, 36, ((7, 6, 8, 9),), Degrees(2, 2), zero=1)
    plan = replace(BERT, model="gpt-tiny", cluster="16xa100-40gb", stages=(pairs,))
    (idle,) = remarks(plan, resolve_cluster("16xa100-40gb"))
    assert idle.startswith("12 of 16 devices are idle")
    assert remarks(replace(GOOD, global_batch=8), resolve_cluster("4xa100-40gb")) == []


def test_the_smallest_device_of_a_stage_is_what_its_memory_has_to_fit() -> None:
    cluster = resolve_cluster("1xa100-40gb+1xt4")
    memory = Predicted(1.0, "roofline", memory=(StageMemory(weights_bytes=20 * 10**9),))
    plan = replace(BERT, cluster="1xa100-40gb+1xt4", stages=(replace(BERT.stages[0], devices=((0,), (1,))),), num_replicas=2)
    assert remarks(plan, cluster) == []
    (told,) = remarks(replace(plan, predicted=memory), cluster)
    assert "20.0 GB on devices of 16.1 GB" in told


def test_no_replica_is_without_a_sample() -> None:
    """Where batches are cut one by one, nothing else says so."""
    dynamic = replace(GOOD, micro_batching=MicroBatching("padded", "dynamic"))
    assert check_plan(replace(dynamic, global_batch=2)) == []
    (problem,) = check_plan(replace(dynamic, global_batch=1))
    assert "there are 2 replicas. Give each at least one sample" in problem


def test_micro_batches_of_each_replica() -> None:
    assert (GOOD.num_micro_batches, GOOD.micro_batches_per_replica) == (4, (4, 4))
    assert (shared(GOOD, 3, 5).num_micro_batches, shared(GOOD, 3, 5).micro_batches_per_replica) == (5, (3, 5))
    dynamic = replace(GOOD, micro_batching=MicroBatching("padded", "dynamic"))
    assert dynamic.num_micro_batches is None and dynamic.micro_batches_per_replica is None
