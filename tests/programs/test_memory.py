"""Programs are held against their devices' memory: to the byte where the estimate knows it, by their own order where they differ."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.clusters import DEVICES, Cluster, Link, Node, NodeRun
from penstock.costs.roofline import Roofline
from penstock.costs.sources import shipped_profiles
from penstock.errors import InfeasibleError, InputError
from penstock.models import resolve_model
from penstock.models.ops import Model
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.programs import instructions as i
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.memory import _enough, _micro_batch, memory_problems, require_memory
from penstock.programs.work import ReplicaWork
from penstock.schedules.rules import schedule_of
from penstock.timing.estimate import Estimator

CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt-350m", {"pp": 4, "global_batch": 16, "micro_batch": 1}),
    ("gpt-350m", {"pp": 4, "global_batch": 8, "micro_batch": 1, "schedule": "gpipe"}),
    ("gpt-350m", {"pp": 2, "replicas": 2, "global_batch": 16, "micro_batch": 2, "schedule": "zero-bubble", "zero": 1}),
    ("gpt-350m", {"pp": 2, "tp": 2, "global_batch": 8, "micro_batch": 2, "recompute": "full", "sequence_parallel": True}),
    ("llama-1b", {"replicas": 4, "global_batch": 16, "micro_batch": 2, "zero": 3}),
    ("t5-770m", {"dp": 4, "global_batch": 16, "micro_batch": 8, "zero": 2}),
    ("gpt-350m", {"pp": 4, "global_batch": 16, "micro_batch": 1, "gradients": "fp32"}),
    ("wide-resnet-500m", {"pp": 2, "dp": 2, "global_batch": 64, "micro_batch": 16}),
]


def cluster_of(memory_bytes: float, count: int = 4) -> Cluster:
    node = Node("test", replace(DEVICES["a100-40gb"], memory_bytes=memory_bytes), count, Link("in", 1e11, 0.0), Link("out", 1e10, 0.0))
    return Cluster("test", (NodeRun(node),))


def programs_of(plan: Plan, model: Model, schedule: str = "", count: int = 0) -> tuple[Program, ...]:
    """Of one replica, in the plan's order unless another is named."""
    count = count or plan.num_micro_batches or 0
    samples = plan.micro_batching.samples or 1
    order = schedule_of(schedule or plan.schedule, plan.num_stages, count, plan.num_chunks)
    alone = replace(plan, num_replicas=1, stages=tuple(replace(stage, devices=stage.devices[:1]) for stage in plan.stages))
    return lower(alone, model, [ReplicaWork(tuple(_micro_batch(plan, index, samples) for index in range(count)), order)])


def peaks(plan: Plan, model: Model) -> list[float]:
    return [stage.memory.total_bytes for stage in Estimator(model, cluster_of(1e15), Roofline()).estimate(plan).stages]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[f"{name} {number}" for number, (name, _) in enumerate(CASES)])
def test_the_proof_is_the_estimate_to_the_byte(name: str, sizes: dict[str, Any]) -> None:
    model, plan = resolve_model(name), uniform_plan(name, "4xa100-40gb", **sizes)
    programs, most = programs_of(plan, model), max(peaks(plan, model))
    assert memory_problems(programs, plan, model, cluster_of(most), Roofline()) == []
    [first, *_] = memory_problems(programs, plan, model, cluster_of(most * (1 - 1e-6)), Roofline())
    step = programs[[program.rank for program in programs].index(first.rank)].instructions[first.index]
    assert isinstance(step, i.Forward | i.Backward | i.BackwardInput | i.BackwardWeight | i.Step)
    assert f"({round(most):,} of" in first.text and "a100-40gb" in first.text


def test_chunks_are_never_all_full_at_once() -> None:
    model, plan = resolve_model("gpt-350m"), uniform_plan("gpt-350m", "4xa100-40gb", pp=4, chunks=2, global_batch=16, micro_batch=1,
                                                          schedule="interleaved")  # fmt: skip
    programs, most = programs_of(plan, model), max(peaks(plan, model))
    assert memory_problems(programs, plan, model, cluster_of(most), Roofline()) == []
    assert memory_problems(programs, plan, model, cluster_of(0.8 * most), Roofline())


def test_the_order_of_the_instructions_counts() -> None:
    """A plan that fits under 1F1B, whose programs run all forward passes first."""
    model, plan = resolve_model("gpt-350m"), uniform_plan("gpt-350m", "4xa100-40gb", pp=4, global_batch=16, micro_batch=1)
    cluster = cluster_of(max(peaks(plan, model)))
    assert memory_problems(programs_of(plan, model), plan, model, cluster, Roofline()) == []
    problems = memory_problems(programs_of(plan, model, "gpipe"), plan, model, cluster, Roofline())
    assert problems and all("16 micro-batches among it" in problem.text for problem in problems)


def test_what_is_recomputed_counts() -> None:
    model = resolve_model("gpt-350m")
    lean = uniform_plan("gpt-350m", "4xa100-40gb", pp=4, global_batch=16, micro_batch=1, recompute="full")
    both = replace(lean, stages=tuple(replace(stage, recompute=(*stage.recompute, ())) for stage in lean.stages))
    cluster, programs = cluster_of(max(peaks(lean, model))), programs_of(both, model)
    assert memory_problems(programs, both, model, cluster, Roofline()) == []
    kept = replace(lean, stages=tuple(replace(stage, recompute=((), *stage.recompute)) for stage in lean.stages))
    assert memory_problems(programs, kept, model, cluster, Roofline())  # the same instructions, whose pattern 0 keeps everything


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("gpipe", 1)])
def test_a_few_micro_batches_hold_as_much_as_all(schedule: str, chunks: int) -> None:
    plan = uniform_plan("gpt-350m", "4xa100-40gb", pp=4, chunks=chunks, global_batch=64, micro_batch=1, schedule=schedule)
    model, few = resolve_model("gpt-350m"), _enough(plan, 64)
    assert few == 64 if schedule == "gpipe" else few < 64
    cluster = cluster_of(1.0)  # so that each rank says what it holds
    some, all_ = (
        {problem.rank: problem.text for problem in memory_problems(programs_of(plan, model, count=n), plan, model, cluster, Roofline())}
        for n in (few, 64)
    )
    assert some == all_ and len(all_) == 4


def test_a_plan_is_refused_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = uniform_plan("gpt-350m", "4xa100-40gb", pp=2, replicas=2, global_batch=64, micro_batch=1)
    model = resolve_model("gpt-350m")
    require_memory(plan, model, cluster_of(40e9))
    with pytest.raises(InfeasibleError, match=r"the plan does not fit: rank \d, instruction \d+: a100-40gb has 2.00 GB, but would hold"):
        require_memory(plan, model, cluster_of(2e9))
    with pytest.raises(InfeasibleError):  # a profile that is not here: by formula
        require_memory(replace(plan, costs="profile:nowhere.json"), model, cluster_of(2e9))
    with pytest.raises(InfeasibleError):  # tables of another planner, which know nothing of this model: by formula
        require_memory(replace(plan, costs="aceso:tables"), model, cluster_of(2e9))
    dynamic = replace(plan, micro_batching=replace(plan.micro_batching, policy="dynamic"))
    require_memory(dynamic, model, cluster_of(2e9))  # each batch is cut so that it fits


def test_a_damaged_profile_is_no_reason_to_go_by_formula(tmp_path: Path) -> None:
    plan, model = uniform_plan("gpt-350m", "4xa100-40gb", replicas=4, global_batch=8, micro_batch=1), resolve_model("gpt-350m")
    whole = shipped_profiles()["h200-141gb"].read_bytes()
    (tmp_path / "whole.json.gz").write_bytes(whole)
    require_memory(replace(plan, costs=f"profile:{tmp_path / 'whole.json.gz'}"), model, cluster_of(40e9))  # of another device: by formula
    for name, content in (("half.json.gz", whole[: len(whole) // 2]), ("other.json", b"{}")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=name):
            require_memory(replace(plan, costs=f"profile:{tmp_path / name}"), model, cluster_of(40e9))


def test_the_rank_that_lacks_most_is_told_first() -> None:
    model, plan = resolve_model("gpt-350m"), uniform_plan("gpt-350m", "4xa100-40gb", pp=4, global_batch=16, micro_batch=1)
    held = peaks(plan, model)
    problems = memory_problems(programs_of(plan, model), plan, model, cluster_of(0.9 * min(held)), Roofline())
    assert [problem.rank for problem in problems] == sorted(range(4), key=lambda stage: -held[stage]) and len(set(held)) == 4


def test_every_replica_is_held_against_its_own_devices() -> None:
    """And those on equal ones once: the last of four is on a smaller device."""
    plan = uniform_plan("gpt-350m", "4xa100-40gb", replicas=4, global_batch=8, micro_batch=1)
    model = resolve_model("gpt-350m")
    needed = max(peaks(plan, model))
    for small_bytes in (needed, 0.9 * needed):
        nodes = [
            Node("test", replace(DEVICES["a100-40gb"], name=name, memory_bytes=most), count, Link("in", 1e11, 0.0), Link("out", 1e10, 0.0))
            for name, most, count in (("usual", needed, 3), ("small", small_bytes, 1))
        ]
        cluster = Cluster("test", tuple(map(NodeRun, nodes)))
        with nullcontext() if small_bytes == needed else pytest.raises(InfeasibleError, match=r"rank 3, instruction \d+: small has"):
            require_memory(plan, model, cluster)
