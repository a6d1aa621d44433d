"""Predicted against measured on one device: training steps of five models, time and peak memory, and whole `penstock train` runs.

    python benchmarks/accuracy.py --out OUT                    measure what OUT does not hold yet (needs the GPU), then compare
    python benchmarks/accuracy.py --out OUT --costs COSTS      compare with other costs than the shipped profile, such as `roofline`
    python benchmarks/accuracy.py --out OUT --parts steps      only one of `steps` and `runs`

The points are drawn at random and are not grid points of the profile; those below 2,000 tokens are steps of four micro-batches, as
small ones come. A rank of the runtime runs them under a plan of fixed micro-batches, so that small passes are played from recordings.
Each result is a line in OUT/steps.jsonl or OUT/runs.jsonl: what was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import torch
from accuracy_runs import measure_runs, run_errors
from lines import Lines

from penstock.clusters import resolve_cluster
from penstock.costs.memory import stage_memory
from penstock.costs.profiled import Profiled
from penstock.costs.source import CostSource
from penstock.costs.sources import open_costs
from penstock.data.samples import Sample
from penstock.models import Model, Shape, resolve_model
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Layout
from penstock.plans.plan import MicroBatching, Plan, Stage
from penstock.plans.references import model_of
from penstock.programs.lower import lower
from penstock.programs.work import ReplicaWork
from penstock.runtime.source import Source
from penstock.schedules.actions import BACKWARD, FORWARD, Action
from penstock.timing.pass_times import OpSlice, stage_passes
from penstock.timing.recorded import FewShapes, is_recorded

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for `training_jobs`

POINTS, SMALL_POINTS, DEVICE = 32, 11, "h200-141gb"
SMALL, MICRO_BATCHES = (80, 1950, 256), 4
"""Smallest and largest number of tokens and longest sequence of small points, and how many micro-batches their steps have."""
WARM_UP_S, STEPS = 0.3, 3
"""How long steps of a point run before some are timed, after those of other points."""
LARGE = 12_000
"""Tokens of a step from which on a GPU does not wait for its host."""
SMALL_NAME, LARGE_NAME = "below 2,000 tokens", "12,000 tokens and more"
RECOMPUTE = ("none", "full", "half", "mlp")
RANGES = {
    "gpt-1.3b": (3000, 40000, 2048), "llama-1b": (3000, 36000, 4096), "bert-large": (8000, 60000, 512), "t5-770m": (6000, 36000, 1024),
    "wide-resnet-500m": (6, 48, 0),
}  # fmt: skip
"""Model → smallest and largest number of tokens (images) in a step, and longest sequence."""


@dataclass(frozen=True)
class Point:
    """One training step: the sequences of its micro-batch, what is recomputed, and how often it runs before the update."""

    model: str
    layout: Layout
    recompute: str
    lengths: tuple[int, ...]
    row_length: int = 0
    dec_lengths: tuple[int, ...] = ()
    dec_row_length: int = 0
    micro_batches: int = 1

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))

    def micro_batch(self, index: int = 0) -> MicroBatch:
        """One of its micro-batches; all have samples of the same lengths."""
        ids = tuple(range(index * len(self.lengths), (index + 1) * len(self.lengths)))
        if not self.lengths[0]:
            return MicroBatch(index, ids, "padded")
        rows = (self.row_length, self.dec_row_length) if self.layout == "padded" else (0, 0)
        return MicroBatch(index, ids, self.layout, self.lengths, self.dec_lengths, *rows)

    @property
    def shape(self) -> Shape:
        return self.micro_batch().shape()


def draw_points(name: str) -> list[Point]:
    """The same random points every time: log-uniform sizes, log-normal lengths, layouts and recomputation in turn."""
    small = _drawn(name, SMALL, SMALL_POINTS, f"small {name}") if RANGES[name][2] else []
    return _drawn(name, RANGES[name], POINTS, f"accuracy {name}") + [replace(point, micro_batches=MICRO_BATCHES) for point in small]


def _drawn(name: str, limits: tuple[int, int, int], count: int, seed: str) -> list[Point]:
    low, high, longest = limits
    model, source = resolve_model(name), random.Random(seed)
    points: list[Point] = []
    while len(points) < count:
        index, size = len(points), low * (high / low) ** source.random()
        layout = model.layouts[index % len(model.layouts)]
        recompute = RECOMPUTE[index // len(model.layouts) % (len(RECOMPUTE) if longest else 3)]
        if longest:
            point = _sequences(name, layout, recompute, size, longest, bool(model.dec_length), source)
        else:
            point = Point(name, layout, recompute, (0,) * round(size))
        if point not in points and not _is_power_of_two(len(point.lengths) if not longest else point.shape.tokens):
            points.append(point)
    return points


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0


def _sequences(name: str, layout: Layout, recompute: str, tokens: float, longest: int, decoder: bool, source: random.Random) -> Point:
    if layout == "packed":
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(max(8, min(longest, round(source.lognormvariate(4.8, 1.1)))))
        return Point(name, layout, recompute, tuple(lengths))
    row = 8 * round(source.uniform(min(100, tokens), min(longest, 1.9 * tokens)) / 8)
    rows = max(1, round(tokens / row))
    lengths = [max(8, row - round(source.random() * row * 0.1)) for _ in range(rows)]
    if not decoder:
        return Point(name, layout, recompute, (row, *lengths[1:]), row)
    dec = 8 * round(source.uniform(32, 256) / 8)
    dec_lengths = [max(8, dec - round(source.random() * dec * 0.1)) for _ in range(rows)]
    return Point(name, layout, recompute, (row, *lengths[1:]), row, (dec, *dec_lengths[1:]), dec)


def recomputed(model: Model, pattern: str) -> frozenset[int]:
    """Positions that a pattern recomputes: all ops of every (second) layer, or the second half of each layer."""
    repeated = {block.name for block, copies in model.runs if copies > 1} or {block.name for block, _ in model.runs[1:-1]}
    chosen = [p for p in model.ops if p.block in repeated]
    if pattern == "none":
        return frozenset()
    if pattern == "half":
        chosen = [p for p in chosen if p.copy % 2 == 0]
    elif pattern == "mlp":
        chosen = [p for p in chosen if p.op.name in ("norm2", "norm3", "up", "act", "down")]
    return frozenset(p.index for p in chosen)


def plan_of(model: str, layout: Layout) -> Plan:
    """One stage on one device, with all patterns of recomputation; micro-batches are those of the points."""
    longest = RANGES[model][2]
    plan = Plan(
        model, f"1x{DEVICE}", 1, (), MicroBatching(layout, "fixed", 1), seq_length=longest,
        dec_length=256 if resolve_model(model).dec_length else 0, precision=resolve_model(model).dtype, gradients="fp32",
    )  # fmt: skip
    ops = model_of(plan)
    patterns = tuple(tuple((at, at + 1) for at in sorted(recomputed(ops, pattern))) for pattern in RECOMPUTE)
    return replace(plan, stages=(Stage(0, ops.num_ops, ((0,),), recompute=patterns),))


def measure(points: list[Point], found: Lines, deadline: float, device_kind: str = "cuda") -> None:
    """Runs the points that are not there yet, model by model."""
    for name in dict.fromkeys(point.model for point in points):
        todo = [point for point in points if point.model == name and point.key not in found]
        if todo and time.monotonic() < deadline:
            trained = Trained(name, device_kind)
            for point in todo:
                if time.monotonic() > deadline:
                    break
                time_s, memory_bytes = trained.measure(point)
                found.add(point.key, time_s=time_s, memory_bytes=memory_bytes)
                print(f"{name} {point.layout} {point.recompute} {point.shape.tokens or point.shape.samples}: {time_s * 1e3:.1f} ms, "
                      f"{memory_bytes / 1e9:.2f} GB", flush=True)  # fmt: skip
            del trained


class SameSamples:
    """Samples drawn once, the same in every step: drawing them is no part of training."""

    def __init__(self, source: Source) -> None:
        self._source, self._kept = source, dict[tuple[int, int, int], Sample]()

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        key = sample, length, dec_length
        if key not in self._kept:
            self._kept[key] = self._source.sample(0, *key)
        return self._kept[key]


class Trained:
    """A rank with a whole model, whose steps are measured."""

    def __init__(self, name: str, device_kind: str) -> None:
        from training_jobs import RandomSource, rank_of

        from penstock.runtime.settings import TrainingSettings
        from penstock.runtime.transport.allocator import use_expandable_segments
        from penstock.runtime.transport.world import ProcessGroups

        self.on_gpu = device_kind == "cuda"
        gc.collect()  # a rank and its stages know each other
        if self.on_gpu:
            use_expandable_segments()  # as every rank of `penstock train` does
            torch.cuda.empty_cache()
        plan = plan_of(name, "padded")
        self.model, self.number = model_of(plan), 0
        self.source = SameSamples(RandomSource(self.model))
        self.rank = rank_of(plan, ProcessGroups(device_kind), TrainingSettings(clip_norm=1.0), self.source)
        longest = 8 if self.model.seq_length else 0
        self._steps_s(Point(name, "padded", "none", (longest,), longest, (8,) if self.model.dec_length else (), 8), 1)
        self.state_bytes = torch.cuda.memory_allocated() if self.on_gpu else 0

    def measure(self, point: Point) -> tuple[float, int]:
        """Seconds of a step, the mean of some after others that find kernels, record passes and bring clocks to those of lasting load, and
        the peak of memory in the first one, which records nothing."""
        plan = plan_of(point.model, point.layout)
        self.rank.share_out(plan)
        others_bytes = torch.cuda.memory_allocated() - self.state_bytes if self.on_gpu else 0
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        one_s = self._steps_s(point, 1)
        peak_bytes = torch.cuda.max_memory_allocated() - others_bytes if self.on_gpu else 0
        passes = 1 if FewShapes.of(self.model.ops, plan, plan.stages[0]).keeps_busy(point.shape) else 6
        self._steps_s(point, max(-(-passes // point.micro_batches), round(WARM_UP_S / one_s) if self.on_gpu else 0))
        return self._steps_s(point, STEPS), peak_bytes

    def _steps_s(self, point: Point, count: int) -> float:
        """Mean time of some steps one after the other, as a run takes them: the host brings samples of the next one before it waits."""
        micros = tuple(point.micro_batch(at) for at in range(point.micro_batches))
        schedule = (tuple(Action(0, kind, micro.index) for micro in micros for kind in (FORWARD, BACKWARD)),)
        work = ReplicaWork(micros, schedule, ((RECOMPUTE.index(point.recompute),),) * len(micros))
        programs = [lower(self.rank.plan, self.model, (work,), self.number + number)[0] for number in range(count)]
        self.number += count
        wait = torch.cuda.synchronize if self.on_gpu else lambda: None
        self.rank.prepare(programs[0], self.source)
        wait()
        start = time.perf_counter()
        for number, program in enumerate(programs):
            self.rank.train(program)
            if number + 1 < count:
                self.rank.prepare(programs[number + 1], self.source)
            wait()
        return (time.perf_counter() - start) / count


def predict(points: list[Point], source: CostSource) -> list[tuple[float, float]]:
    """(time, peak memory) of each point by a profile, on its device, or by other costs on that of the shipped one."""
    device = next(iter(source.devices)) if isinstance(source, Profiled) else DEVICE
    cluster = resolve_cluster(f"1x{device}")
    predictions = []
    for point in points:
        plan = plan_of(point.model, point.layout)
        model, flags = model_of(plan), recomputed(model_of(plan), point.recompute)
        shape, recorded = point.shape, is_recorded(plan, plan.stages[0], model, ragged=bool(model.seq_length))
        few = FewShapes.of(model.ops, plan, plan.stages[0])
        recorded = recorded and not few.keeps_busy(shape)
        if recorded:
            shape = replace(shape, tokens=few.num_tokens(shape)) if point.layout == "packed" else few.brought(point.micro_batch()).shape()
        table = source.table(model, [shape], [1], cluster)
        passes = stage_passes(table, OpSlice(model, 0, model.num_ops, device, recompute=flags, recorded=recorded), shape)
        step_s = source.optimizer_s(model.num_parameters, device, model.dtype, num_tensors=len(model.ops), gradients="fp32")
        memory = stage_memory(
            model, 0, model.num_ops, shape, recompute=flags, slack=0, context_bytes=0, gradients="fp32",
            **source.memory_of(device, model.dtype)._asdict(),
        )  # fmt: skip
        predictions.append((point.micro_batches * passes.total_s + step_s, memory.total_bytes))
    return predictions


def compare(points: list[Point], found: Lines, source: CostSource) -> str:
    """The table: errors of time and of peak memory for each model, and for each layout and recomputation in it; below it, how far the ratio
    of two steps of one model is off, which is what a search depends on."""
    measured = [p for p in points if p.key in found]
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point, (time_s, memory_bytes) in zip(measured, predict(measured, source), strict=True):
        truth = found[point.key]
        error = time_s / truth["time_s"] - 1, memory_bytes / truth["memory_bytes"] - 1
        groups = (SMALL_NAME,) if point.micro_batches > 1 else ("all", f"{point.layout}, {point.recompute} recomputed")
        for group in (*groups, LARGE_NAME) if point.shape.tokens >= LARGE else groups:
            errors.setdefault((point.model, group), []).append(error)
    for wanted in ("all", SMALL_NAME, LARGE_NAME):
        joint = [error for (_, group), values in errors.items() if group == wanted for error in values]
        if joint:
            errors["all models", wanted] = joint
    lines = ["| model | points | time: mean error | worst | bias | memory: mean error | most above | most below |", "|---" * 8 + "|"]
    for (model, group), values in errors.items():
        times, memories = zip(*values, strict=True)
        name = f"**{model}**" if group == "all" else f"{model}: {group}"
        lines.append(
            f"| {name} | {len(values)} | {_mean(times):.1%} | {max(map(abs, times)):.1%} | {statistics.mean(times):+.1%} "
            f"| {_mean(memories):.2%} | {max(memories):+.2%} | {min(memories):+.2%} |"
        )
    told = [f"{_mean(ratios):.1%} off on average ({group})" for group in ("all", LARGE_NAME) if (ratios := _ratio_errors(errors, group))]
    return "\n".join([*lines, "", f"two steps of one model against each other: {', '.join(told)}"])


def _ratio_errors(errors: Mapping[tuple[str, str], Sequence[tuple[float, float]]], wanted: str) -> list[float]:
    """How far the ratio of two steps' times is off, for all pairs of one model."""
    found = [values for (model, group), values in errors.items() if group == wanted and model != "all models"]
    return [(1 + one) / (1 + other) - 1 for values in found for (one, _), (other, _) in combinations(values, 2)]


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(map(abs, values))


def compare_runs(out: Path, costs: str) -> str:
    """The table of whole runs."""
    found = run_errors(out, costs)
    if not found:
        return "no whole runs were measured"
    errors = [predicted_s / time_s - 1 for predicted_s, time_s in found.values()]
    lines = ["| run | predicted | measured | error |", "|---" * 4 + "|"]
    lines += [
        f"| {key} | {predicted_s * 1e3:.0f} ms | {time_s * 1e3:.0f} ms | {error:+.1%} |"
        for (key, (predicted_s, time_s)), error in zip(found.items(), errors, strict=True)
    ]
    return "\n".join([*lines, f"| **{len(errors)} runs** | | | mean {_mean(errors):.1%}, worst {max(map(abs, errors)):.1%} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of measured steps and runs")
    parser.add_argument("--costs", default="profile:h200-141gb", help="costs to compare with")
    parser.add_argument("--cluster", default="1xh200", help="that runs are planned for")
    parser.add_argument("--models", default=",".join(RANGES))
    parser.add_argument("--parts", default="steps,runs")
    parser.add_argument("--time-budget", type=float, default=460.0, help="seconds for measuring")
    parser.add_argument("--only-compare", action="store_true")
    given = parser.parse_args()
    deadline = time.monotonic() + (given.time_budget if _sees_gpu() and not given.only_compare else 0.0)
    if "steps" in given.parts:
        points, found = [point for name in given.models.split(",") for point in draw_points(name)], Lines(given.out / "steps.jsonl")
        measure(points, found, deadline)
        print(compare(points, found, open_costs(given.costs)))
    if "runs" in given.parts:
        measure_runs(given.out, given.costs, given.cluster, deadline)
        print(compare_runs(given.out, given.costs))


def _sees_gpu() -> bool:
    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
