"""Random plans with the work of one iteration: any cuts, degrees of each stage, schedules, layouts and numbers of micro-batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from penstock.errors import InputError
from penstock.models.catalog import model_from_mapping
from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model
from penstock.plans.plan import Degrees, MicroBatching, OpRun, Plan, Stage
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork, dp_degrees
from penstock.schedules.actions import Action, Schedule
from penstock.schedules.rules import schedule_of

SIZES: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 2, "hidden": 8, "heads": 4, "seq_length": 24, "vocab": 13},
    "bert": {"layers": 2, "hidden": 8, "heads": 4, "ffn": 12, "seq_length": 24, "vocab": 13},
    "t5": {"layers": 1, "hidden": 8, "heads": 4, "head_width": 2, "ffn": 12, "seq_length": 24, "dec_length": 12, "vocab": 13},
    "resnet": {"blocks": (1, 1), "base_width": 4, "num_classes": 4, "image_size": 16},
}
"""The vocabulary is odd, so that tensor parallelism must divide it unevenly."""

SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "interleaved", "waves")


@dataclass(frozen=True)
class Case:
    """A valid plan, the work of one iteration and its programs."""

    plan: Plan
    model: Model
    work: tuple[ReplicaWork, ...]
    programs: tuple[Program, ...]


@cache
def small(family: str) -> Model:
    """A model of a few ops."""
    return model_from_mapping({"family": family, "dtype": "fp32", **SIZES[family]}, "test", family)


def random_case(seed: int, family: str = "", groups: int = 0, replicas: int = 0, most: int = 4, schedule: str = "") -> Case:
    """The case of a seed; what is given is fixed, the rest is drawn."""
    draw = random.Random(seed)
    model = small(family or draw.choice(sorted(SIZES)))
    schedule = schedule or draw.choice(SCHEDULES)
    replicas = replicas or draw.choice([1, 1, 2])
    groups = groups or draw.choice([1, 2, 2, 3, 4] if schedule in ("gpipe", "1f1b") else [2, 3])
    chunks = 2 if schedule in ("interleaved", "waves") else 1
    plan = _plan(draw, model, schedule, groups, chunks, replicas)
    identity = iter(draw.sample(range(10_000), 4 * 8 * replicas))
    work = []
    for _ in range(replicas):
        count = draw.randint(1, most)
        micro_batches = tuple(_micro_batch(draw, model, plan, index, identity) for index in range(count))
        patterns = tuple(tuple(draw.randrange(max(1, len(stage.recompute))) for stage in plan.stages) for _ in range(count))
        work.append(ReplicaWork(micro_batches, schedule_for(schedule, groups, count), patterns))
    return Case(plan, model, tuple(work), lower(plan, model, work, iteration=seed, depth=draw.choice([1, 2, 3])))


def schedule_for(name: str, groups: int, count: int) -> Schedule:
    """A schedule; `waves` has two chunks per device that run down the devices and back up, all forward passes first."""
    if name == "interleaved":
        return schedule_of(name, 2 * groups, count, 2)
    if name != "waves":
        return schedule_of(name, groups, count)
    mine = [(device, 2 * groups - 1 - device) for device in range(groups)]
    forward = [[Action(stage, 0, m) for stage in stages for m in range(count)] for stages in mine]
    backward = [[Action(stage, 1, m) for stage in reversed(stages) for m in range(count)] for stages in mine]
    return tuple(tuple(one + two) for one, two in zip(forward, backward, strict=True))


def _plan(draw: random.Random, model: Model, schedule: str, groups: int, chunks: int, replicas: int) -> Plan:
    num_stages = groups * chunks
    cuts = [0, *sorted(draw.sample(range(1, model.num_ops), num_stages - 1)), model.num_ops]
    degrees = [_degrees(draw, model, cuts, [g, num_stages - 1 - g] if schedule == "waves" else range(g, num_stages, groups))
               for g in range(groups)]  # fmt: skip
    devices, rank = [], 0
    for tp, dp in degrees:
        devices.append(tuple(tuple(range(rank + r * tp * dp, rank + (r + 1) * tp * dp)) for r in range(replicas)))
        rank += tp * dp * replicas
    stages = []
    for index in range(num_stages):
        group = index % groups if schedule != "waves" or index < groups else num_stages - 1 - index
        (tp, dp), (first, last) = degrees[group], (cuts[index], cuts[index + 1])
        runs = _runs(draw, model, first, last, tp, dp) if schedule != "waves" else ()
        recompute = ((), ((first, last),)) if schedule != "zero-bubble" and draw.random() < 0.5 else ()
        parallel = draw.random() < 0.3 and schedule != "waves"
        stages.append(Stage(first, last, devices[group], Degrees(tp, dp), runs, recompute, sequence_parallel=parallel))
    shown = "interleaved" if schedule == "waves" else schedule
    return Plan("test", "cpu", 1, tuple(stages), MicroBatching(policy="dynamic"), replicas, shown)


def _degrees(draw: random.Random, model: Model, cuts: list[int], stages: Any) -> tuple[int, int]:
    tp, dp = draw.choice([(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)])
    for stage in stages:
        for place in model.ops[cuts[stage] : cuts[stage + 1]]:
            try:
                place.op.check_tp(tp)
            except InputError:
                return 1, dp
    return tp, dp


def _runs(draw: random.Random, model: Model, first: int, last: int, tp: int, dp: int) -> tuple[OpRun, ...]:
    """Now and then the first or the last ops of a stage have its degrees the other way round."""
    if tp == dp or last - first < 2 or draw.random() < 0.7:
        return ()
    at = draw.randrange(first + 1, last)
    run = draw.choice([(first, at), (at, last)])
    try:
        for place in model.ops[run[0] : run[1]]:
            place.op.check_tp(dp)
    except InputError:
        return ()
    return (OpRun(*run, dp, tp),)


def _micro_batch(draw: random.Random, model: Model, plan: Plan, index: int, identity: Any) -> MicroBatch:
    degrees = dp_degrees(plan)
    mixed = any(stage.runs for stage in plan.stages)
    count = draw.randint(max([1, *degrees]) if mixed else 1, 4)
    samples = tuple(next(identity) for _ in range(count))
    bounds = {dp: _bounds(draw, count, dp, mixed) for dp in degrees}
    if model.family == "resnet":
        return MicroBatch(index, samples, "padded", bounds=bounds)
    lengths = tuple(draw.randint(1, 6) for _ in samples)
    dec = tuple(draw.randint(1, 4) for _ in samples) if model.family == "t5" else ()
    counted = tuple(draw.randint(1, most) for most in dec or lengths) if draw.random() < 0.5 else ()
    if model.family != "t5" and draw.random() < 0.5:
        return MicroBatch(index, samples, "packed", lengths, dec, counted=counted, bounds=bounds)
    row, dec_row = max(lengths) + draw.randint(0, 2), max(dec) + draw.randint(0, 1) if dec else 0
    return MicroBatch(index, samples, "padded", lengths, dec, row, dec_row, counted=counted, bounds=bounds)


def _bounds(draw: random.Random, count: int, dp: int, full: bool) -> tuple[int, ...]:
    if full:  # each rank has a sample
        return (0, *sorted(draw.sample(range(1, count), dp - 1)), count)
    return (0, *sorted(draw.randint(0, count) for _ in range(dp - 1)), count)
