"""Useful tokens/s of full training steps on one GPU: our own micro-batches beside a grid of hand-made ways to train the same model.

  python benchmarks/throughput.py [--costs profile:h200-141gb] [--max-length 2048 8192] [--only packed eager …] [--trace FILE]

The model is a GPT of 24 layers, hidden 2048, vocabulary 50,304 in bf16; lengths are log-normal (median 120, σ 1.1), 64k tokens a step.
The grid is a plain torch GPT with fused AdamW: {padded by similar length, packed per sample} × micro-batches of {16k, 32k} tokens × {eager,
compiled with dynamic shapes}. Our side takes the plan `dynamic, packed` and is not tuned: it runs before and after the grid, and the slower
run counts. Each entry runs `--warm-up` steps of their own lengths, then `--steps` timed ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.models.catalog import model_from_mapping
from penstock.plans.plan import MicroBatching, Plan, Stage

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))  # for `training_jobs`

MEDIAN, SIGMA = 120, 1.1


def drawn_batches(count: int, tokens: int, longest: int) -> list[list[int]]:
    """Lengths of the samples of each step, about `tokens` together."""
    generator, batches = random.Random(0), []
    for _ in range(count):
        batch: list[int] = []
        while sum(batch) < tokens:
            batch.append(max(8, min(longest, round(math.exp(generator.gauss(math.log(MEDIAN), SIGMA))))))
        batches.append(batch)
    return batches


# The other side: a plain model ------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A pre-norm GPT layer; `bounds` None means rows of equal length."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, bounds: torch.Tensor | None, longest: int) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        if bounds is None:
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)
        else:
            from torch.nn.attention.varlen import varlen_attn

            mixed = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
        x = x + self.out(mixed.flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGpt(nn.Module):
    """What a careful user would write."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, longest: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(longest, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, bounds: torch.Tensor | None, longest: int
    ) -> torch.Tensor:
        x = self.words(ids) + self.places(positions)
        for layer in self.layers:
            x = layer(x, bounds, longest)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-1, reduction="sum")


def packed(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Samples in turn until a micro-batch is full."""
    part: list[int] = []
    for length in lengths:
        if part and sum(part) + length > tokens:
            yield part
            part = []
        part.append(length)
    yield part


def padded(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Samples of similar length together, at most `tokens` with padding."""
    part: list[int] = []
    for length in sorted(lengths):
        if part and (len(part) + 1) * length > tokens:
            yield part
            part = []
        part.append(length)
    yield part


def tensors(lengths: list[int], layout: str, vocab: int, device: torch.device) -> tuple[Any, ...]:
    """Inputs of the plain model for one micro-batch."""
    longest = max(lengths)
    if layout == "packed":
        positions = torch.cat([torch.arange(length) for length in lengths])
        ids, labels = (torch.randint(vocab, positions.shape) for _ in range(2))
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        return ids.to(device), positions.to(device), labels.to(device), bounds.to(device), longest
    width = -(-longest // 8) * 8
    positions = torch.arange(width).expand(len(lengths), width)
    real = positions < torch.tensor(lengths)[:, None]
    ids, labels = torch.randint(vocab, positions.shape), torch.randint(vocab, positions.shape).masked_fill(~real, -1)
    return ids.to(device), positions.to(device), labels.to(device), None, width


def plain_step(model: Any, optimizer: torch.optim.Optimizer, micro_batches: list[tuple[Any, ...]], tokens: int) -> None:
    for one in micro_batches:
        (model(*one) / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


# Our side ----------------------------------------------------------------------------------------------------------------------


def plan_of(sizes: dict[str, Any], cluster: str, longest: int, tokens: int) -> Plan:
    """One stage; all else is left to the planner."""
    model = model_from_mapping(sizes, "benchmark", "gpt")
    stages = (Stage(0, model.num_ops, ((0,),)),)
    return Plan(sizes, cluster, max(1, tokens // MEDIAN), stages, MicroBatching("packed", "dynamic"), seq_length=longest,
                precision=sizes["dtype"])  # fmt: skip


def our_steps(plan: Plan, batches: list[list[int]], costs_name: str, device: str) -> tuple[Any, list[Any], str]:
    """A rank, and the programs of all steps, planned at once."""
    from training_jobs import RandomSource, rank_of

    from penstock.batching.plan import SampleLengths
    from penstock.batching.planned import with_recompute_choices
    from penstock.batching.planner import costs_for, plan_batch
    from penstock.plans.references import model_of
    from penstock.programs.lower import lower
    from penstock.programs.work import work_of
    from penstock.runtime.settings import TrainingSettings
    from penstock.runtime.transport.allocator import use_expandable_segments
    from penstock.runtime.transport.world import ProcessGroups

    if device == "cuda":
        use_expandable_segments()  # as every rank of `penstock train` does
    model = model_of(plan)
    plan = with_recompute_choices(plan, model)
    costs = costs_for(plan, plan.seq_length, costs=costs_name)
    planned = [plan_batch([SampleLengths(i, length) for i, length in enumerate(batch)], costs) for batch in batches]
    programs = [lower(plan, model, work_of(one, plan), step)[0] for step, one in enumerate(planned)]
    rank = rank_of(plan, ProcessGroups(device), TrainingSettings(clip_norm=1.0), KeptSource(RandomSource(model)))
    first = planned[0].replicas[0].micro_batches
    told = ", ".join(f"{one.layout} {one.num_tokens}" + ("*" if any(one.recompute) else "") for one in first)
    return rank, programs, f"{told}; predicted {sum(one.predicted_s for one in planned) / len(planned):.3f} s a step"


class KeptSource:
    """Samples drawn once: drawing them is no part of training."""

    def __init__(self, source: Any) -> None:
        self._source, self._kept = source, {}

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Any:
        key = iteration, sample
        if key not in self._kept:
            self._kept[key] = self._source.sample(*key, length, dec_length)
        return self._kept[key]


# Timing ------------------------------------------------------------------------------------------------------------------------


def timed(step: Callable[[int], None], warm_up: int, steps: int, device: torch.device) -> float:
    """Seconds of all timed steps."""
    for number in range(warm_up):
        step(number)
    _wait(device)
    start = time.perf_counter()
    for number in range(steps):
        step(warm_up + number)
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run(given: argparse.Namespace, longest: int) -> dict[str, Any]:
    device = torch.device(given.device)
    sizes = {"family": "gpt", "layers": given.layers, "hidden": given.hidden, "heads": given.heads, "seq_length": longest,
             "vocab": given.vocab, "dtype": "bf16" if device.type == "cuda" else "fp32"}  # fmt: skip
    warm_up = given.warm_up
    batches = drawn_batches(warm_up + given.steps, given.tokens, longest)
    useful = sum(map(sum, batches[warm_up:]))
    found: dict[str, float] = {}

    def ours(name: str) -> None:
        rank, programs, told = our_steps(plan_of(sizes, given.cluster, longest, given.tokens), batches, given.costs, given.device)
        losses: list[Any] = []
        seconds = timed(lambda number: losses.append(rank.train(programs[number]).loss), warm_up, given.steps, device)
        found[name] = useful / seconds
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        print(f"{name:28} {found[name]:10.0f} useful tokens/s   {seconds / given.steps:.3f} s a step; {told}; {peak:.0f} GiB; losses "
              f"{losses[0].item():.3f} to {losses[-1].item():.3f}", flush=True)  # fmt: skip
        if given.trace:
            traced(lambda: rank.train(programs[-1]), given.trace)

    def theirs(layout: str, tokens: int, way: str) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            model = PlainGpt(given.layers, given.hidden, given.heads, given.vocab, longest).to(getattr(torch, _DTYPES[sizes["dtype"]]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
        cut = packed if layout == "packed" else padded
        steps = [[tensors(part, layout, given.vocab, device) for part in cut(batch, tokens)] for batch in batches]
        called = torch.compile(model, dynamic=True) if way == "compiled" else model
        seconds = timed(lambda n: plain_step(called, optimizer, steps[n], sum(batches[n])), warm_up, given.steps, device)
        name = f"{layout} {tokens // 1024}k {way}"
        found[name] = useful / seconds
        print(f"{name:28} {found[name]:10.0f} useful tokens/s   {seconds / given.steps:.3f} s a step", flush=True)

    def alone(entry: Callable[..., None], *args: Any) -> None:
        try:
            entry(*args)
        except torch.OutOfMemoryError:
            print(f"{args}: out of memory", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    alone(ours, "penstock, before")
    grid = itertools.product(("packed", "padded"), (2**14, 2**15), ("eager", "compiled"))
    for layout, tokens, way in grid:
        if all(word in (layout, way, f"{tokens // 1024}k") for word in given.only):
            alone(theirs, layout, tokens // given.shrink, way)
    if len(found) > 1:
        alone(ours, "penstock, after")
    return _summary(longest, found)


_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def _summary(longest: int, found: dict[str, float]) -> dict[str, Any]:
    own = min(speed for name, speed in found.items() if name.startswith("penstock"))
    others = {name: speed for name, speed in found.items() if not name.startswith("penstock")}
    line: dict[str, Any] = {"max_length": longest, "penstock": round(own)}
    for title, kept in (("best", others), ("best_eager", {name: speed for name, speed in others.items() if name.endswith("eager")})):
        if kept:
            name = max(kept, key=lambda one: kept[one])
            line |= {title: name, f"{title}_tokens_per_s": round(kept[name]), f"ratio_to_{title}": round(own / kept[name], 4)}
    return line


def traced(step: Callable[[], object], path: str) -> None:
    """Writes which kernels a step spends its time in."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    rows = sorted((event for event in profiler.key_averages() if event.self_device_time_total), key=lambda e: -e.self_device_time_total)
    with open(path, "w") as file:
        for event in rows:
            file.write(f"{event.self_device_time_total / 1e3:10.3f} ms {event.count:6d} × {event.key[:160]}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", default="profile:h200-141gb", help="what the planner plans by")
    parser.add_argument("--cluster", default="1xh200")
    parser.add_argument("--max-length", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--only", nargs="*", default=[], help="entries with all of these: packed, padded, 16k, 32k, eager, compiled")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2**16)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=50_304)
    parser.add_argument("--shrink", type=int, default=1, help="divide the grid's micro-batches, for a try without a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--trace", help="write the kernels of one of our steps to this file")
    given = parser.parse_args()
    for longest in given.max_length:
        print(f"lengths up to {longest}")
        print(json.dumps(run(given, longest)), flush=True)


if __name__ == "__main__":
    main()
