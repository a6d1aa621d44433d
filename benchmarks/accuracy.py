"""Predicted against measured: whole training steps of five models on one device, time and peak memory.

    python benchmarks/accuracy.py --measured steps.json                  measure what is missing (needs the GPU), then compare
    python benchmarks/accuracy.py --measured steps.json --profile P      compare with another profile than the shipped one, or `roofline`

The points are drawn at random and are not grid points of the profile. A run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from penstock.clusters import resolve_cluster
from penstock.costs.memory import stage_memory
from penstock.costs.profiled import Profiled
from penstock.costs.source import CostSource
from penstock.costs.sources import open_costs
from penstock.files import write_text
from penstock.models import Model, Shape, resolve_model
from penstock.timing.pass_times import OpSlice, issued_s, waiting_s

POINTS, DEVICE = 32, "h200-141gb"
RECOMPUTE = ("none", "full", "half", "mlp")
RANGES = {
    "gpt-1.3b": (3000, 40000, 2048), "llama-1b": (3000, 36000, 4096), "bert-large": (8000, 60000, 512), "t5-770m": (6000, 36000, 1024),
    "wide-resnet-500m": (6, 48, 0),
}  # fmt: skip
"""Model → smallest and largest number of tokens (images) in a step, and longest sequence."""


@dataclass(frozen=True)
class Point:
    """One training step: the sequences of its micro-batch and what is recomputed."""

    model: str
    layout: str
    recompute: str
    lengths: tuple[int, ...]
    row_length: int = 0
    dec_lengths: tuple[int, ...] = ()
    dec_row_length: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self))

    @property
    def shape(self) -> Shape:
        if not self.lengths[0]:
            return Shape.images(len(self.lengths))
        if self.layout == "packed":
            return Shape.packed(self.lengths, self.dec_lengths)
        return Shape.padded(len(self.lengths), self.row_length, self.dec_row_length)


def draw_points(name: str) -> list[Point]:
    """The same random points every time: log-uniform sizes, log-normal lengths, layouts and recomputation in turn."""
    low, high, longest = RANGES[name]
    model, source = resolve_model(name), random.Random(f"accuracy {name}")
    points: list[Point] = []
    while len(points) < POINTS:
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


def _sequences(name: str, layout: str, recompute: str, tokens: float, longest: int, decoder: bool, source: random.Random) -> Point:
    if layout == "packed":
        lengths: list[int] = []
        while sum(lengths) < tokens:
            lengths.append(max(8, min(longest, round(source.lognormvariate(4.8, 1.1)))))
        return Point(name, layout, recompute, tuple(lengths))
    row = 8 * round(source.uniform(100, longest) / 8)
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


def measure(points: list[Point], path: Path, time_budget_s: float) -> None:
    """Runs the points that `path` does not hold yet, saving each."""
    import torch

    from penstock.models.modules import Batch, build_chain, random_batch
    from penstock.runtime.optimizing.optimizer import make_adamw

    found: dict[str, dict[str, float]] = json.loads(path.read_text()) if path.exists() else {}
    deadline = time.monotonic() + time_budget_s
    device = torch.device("cuda")

    def batch_of(model: Model, point: Point) -> Batch:
        if not model.seq_length:
            count, size = len(point.lengths), model.config["image_size"]
            images = torch.randn(count, 3, size, size, device=device)
            targets = torch.randint(0, model.config["num_classes"], (count,), device=device)
            return Batch(images=images, targets=targets, weights=torch.full((count,), 1 / count, device=device))
        return random_batch(
            point.lengths, model.config["vocab"], dec_lengths=point.dec_lengths, layout=point.layout, row_length=point.row_length,
            dec_row_length=point.dec_row_length, types=model.config.get("types", 0),
            next_sentence=bool(model.config.get("next_sentence")), device=device,
        )  # fmt: skip

    for name in dict.fromkeys(p.model for p in points):
        todo = [p for p in points if p.model == name and p.key not in found]
        if not todo or time.monotonic() > deadline:
            continue
        model = resolve_model(name)
        chain = build_chain(model, device=device)
        optimizer = make_adamw(chain.parameters())
        for parameter in chain.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for point in todo:
            if time.monotonic() > deadline:
                break
            batch, flags = batch_of(model, point), recomputed(model, point.recompute)
            times = []
            for step in range(5):
                if step == 2:
                    torch.cuda.reset_peak_memory_stats()
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                chain(batch, recompute=flags)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / 1000)
            found[point.key] = {
                "time_s": statistics.median(times[2:]), "memory_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }  # fmt: skip
            print(f"{name} {point.layout} {point.recompute} {point.shape.tokens or point.shape.samples}: "
                  f"{found[point.key]['time_s'] * 1e3:.1f} ms, {found[point.key]['memory_bytes'] / 1e9:.2f} GB", flush=True)  # fmt: skip
            write_text(path, json.dumps(found))
        del chain, optimizer, batch
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def predict(points: list[Point], source: CostSource) -> list[tuple[float, float]]:
    """(time, peak memory) of each point by a profile, on its device, or by other costs on that of the shipped one."""
    device = next(iter(source.devices)) if isinstance(source, Profiled) else DEVICE
    cluster = resolve_cluster(f"1x{device}")
    predictions = []
    for point in points:
        model, flags = resolve_model(point.model), recomputed(resolve_model(point.model), point.recompute)
        table = source.table(model, [point.shape], [1], cluster)
        step = (
            source.device(device).optimizer_s(model.num_parameters, len(model.ops), model.dtype) if isinstance(source, Profiled)
            else (source.optimizer_s(model.num_parameters, device, model.dtype, num_tensors=len(model.ops)), 0.0)
        )  # fmt: skip
        # The step follows at once, so that a slow host is still behind when it begins.
        device_s, host_s = issued_s(table, OpSlice(model, 0, model.num_ops, device, recompute=flags), point.shape)
        device_s, host_s = (np.append(times_s, own_s) for times_s, own_s in zip((device_s, host_s), step or (0.0, 0.0), strict=True))
        memory = stage_memory(
            model, 0, model.num_ops, point.shape, recompute=flags, slack=0, context_bytes=0,
            **source.memory_of(device, model.dtype)._asdict(),
        )  # fmt: skip
        predictions.append((float(device_s.sum()) + waiting_s(device_s, host_s), memory.total_bytes))
    return predictions


def compare(points: list[Point], path: Path, source: CostSource) -> str:
    """The table: errors of time and of peak memory for each model, and for each layout and recomputation in it; below it, how far the ratio
    of two steps of one model is off, which is what a search depends on."""
    found = json.loads(path.read_text())
    measured = [p for p in points if p.key in found]
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point, (time_s, memory_bytes) in zip(measured, predict(measured, source), strict=True):
        truth = found[point.key]
        error = time_s / truth["time_s"] - 1, memory_bytes / truth["memory_bytes"] - 1
        for group in ("all", f"{point.layout}, {point.recompute} recomputed"):
            errors.setdefault((point.model, group), []).append(error)
    errors["all models", "all"] = [error for (_, group), values in errors.items() if group == "all" for error in values]
    lines = ["| model | points | time: mean error | worst | bias | memory: mean error | most above | most below |", "|---" * 8 + "|"]
    for (model, group), values in errors.items():
        times, memories = zip(*values, strict=True)
        name = f"**{model}**" if group == "all" else f"{model}: {group}"
        lines.append(
            f"| {name} | {len(values)} | {_mean(times):.1%} | {max(map(abs, times)):.1%} | {statistics.mean(times):+.1%} "
            f"| {_mean(memories):.2%} | {max(memories):+.2%} | {min(memories):+.2%} |"
        )
    ratios = [
        (1 + one) / (1 + other) - 1
        for (model, group), values in errors.items() if group == "all" and model != "all models"
        for (one, _), (other, _) in combinations(values, 2)
    ]  # fmt: skip
    return "\n".join([*lines, "", f"two steps of one model against each other: {_mean(ratios):.1%} off on average"])


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(map(abs, values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, required=True, help="JSON file of measured steps")
    parser.add_argument("--profile", default="profile:h200-141gb", help="costs to compare with")
    parser.add_argument("--models", default=",".join(RANGES))
    parser.add_argument("--time-budget", type=float, default=520.0, help="seconds for measuring")
    parser.add_argument("--only-measure", action="store_true")
    arguments = parser.parse_args()
    points = [point for name in arguments.models.split(",") for point in draw_points(name)]
    if _sees_gpu():
        measure(points, arguments.measured, arguments.time_budget)
    if not arguments.only_measure:
        print(compare(points, arguments.measured, open_costs(arguments.profile)))


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
