"""Measuring ops in context: a short chain runs forward and backward as in training, with marks between its ops.

In context caches are as cold, launches as far ahead and allocations as they are in a real step, so that the parts add up
to the whole. A backward mark is set by a hook on the tensor an op produced: it runs just before that op's backward pass. Marks and hooks
take the host time too, the same for every op: a pass without them says how much, and the ops' host times are what is left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from penstock.models.modules import TORCH_DTYPES, Batch, Carry, OpModule, random_batch, run_backward
from penstock.models.ops import Model, PlacedOp, TensorSpec
from penstock.models.shapes import Shape
from penstock.profiling.grid import Lengths
from penstock.profiling.marks import CpuTimes, CudaBytes, Marks, times_for

__all__ = ["OpMeasure", "Passed", "Run", "hold_gradients", "measure_ops", "random_carry", "random_model_batch"]


OpTimes = tuple[float, float, float, float]
"""Forward, backward, host forward, host backward of one op in one pass."""


@dataclass(frozen=True)
class OpMeasure:
    """Medians of one op at one shape; bytes are zero on a CPU."""

    signature: str
    forward_s: float
    backward_s: float
    spread: float
    """Half the distance between the quartiles, over the median, of forward and backward together."""
    forward_host_s: float = 0.0
    """Time the host takes to issue the op, whatever its size."""
    backward_host_s: float = 0.0
    growth_bytes: float = 0.0
    forward_peak_bytes: float = 0.0
    backward_peak_bytes: float = 0.0


def hold_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Gives weights the gradients that passes add to: in fp32, as plans sum them unless they say otherwise."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad_dtype = None  # as in a rank
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)


def random_carry(specs: Sequence[TensorSpec], shape: Shape, tp: int, device: torch.device, dtype: torch.dtype) -> Carry:
    """A carry of random values, as an op in the middle of a chain would receive it."""
    carry = {}
    for spec in specs:
        if spec.dtype == "int64":
            carry[spec.name] = torch.zeros(spec.shape(shape, tp), device=device, dtype=torch.int64)
            continue
        tensor = torch.randn(spec.shape(shape, tp), device=device, dtype=dtype)
        carry[spec.name] = tensor.requires_grad_(spec.differentiable)
    return carry


def random_model_batch(model: Model, lengths: Lengths, device: torch.device) -> Batch:
    """A random micro-batch that `model` can train on."""
    if not model.seq_length:
        size, classes = model.config["image_size"], model.config["num_classes"]
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(lengths.rows, 3, size, size, device=device, dtype=TORCH_DTYPES[model.dtype])
        targets = torch.randint(0, classes, (lengths.rows,), generator=generator).to(device)
        return Batch(images=images, targets=targets, weights=torch.full((lengths.rows,), 1 / lengths.rows, device=device))
    own, decoder = ([length] * lengths.rows if length else [] for length in (lengths.length, lengths.dec_length))
    own = list(lengths.mixed) or own
    if lengths.layout == "padded" and lengths.rows > 1:
        # Real batches have padding, and masks cost time: the last rows are a little shorter.
        own[-1], decoder[-1:] = own[-1] - 1, [length - 1 for length in decoder[-1:]]
    return random_batch(
        own, model.config["vocab"], dec_lengths=decoder, layout=lengths.layout,
        types=model.config.get("types", 0), next_sentence=bool(model.config.get("next_sentence")), device=device,
    )  # fmt: skip


@dataclass
class Passed:
    """The marks of one forward and backward pass over some ops."""

    forward: list[Any]
    backward: dict[int, Any]
    end: Any

    def intervals(self) -> list[tuple[Any, Any, Any, Any]]:
        """For each op its (forward start, forward end, backward start, backward end)."""
        order = sorted(self.backward, reverse=True)
        ends = {index: self.backward[after] for index, after in pairwise(order)}
        ends[order[-1]] = self.end
        count = len(self.forward) - 1
        return [(self.forward[i], self.forward[i + 1], self.backward.get(i), ends.get(i)) for i in range(count)]


Run = Callable[[Carry, Batch, Marks, bool], Passed]
"""One forward and backward pass with marks between its ops; the last argument: with those at its ends and between the two passes alone."""


def _run(ops: Sequence[OpModule], carry: Carry, batch: Batch, marks: Marks, whole: bool = False) -> Passed:
    """Runs a forward and a backward pass with marks between ops; with `whole` only at both ends and between the two passes."""
    forward, backward = [marks.mark()], {}

    def note(index: int, grad: torch.Tensor) -> None:
        backward[index] = marks.mark()

    for index, op in enumerate(ops):
        carry = op.forward(carry, batch)  # as chains do
        if whole:
            continue
        forward.append(marks.mark())
        produced = carry[op.config.get("output", op.op.carry[0].name)]
        if produced.requires_grad:
            produced.register_hook(partial(note, index))
        del produced
    if whole:
        forward.append(marks.mark())
    outputs = [tensor for tensor in carry.values() if tensor.requires_grad]
    carry.clear()
    del carry
    grads = [torch.ones_like(tensor) for tensor in outputs]
    if whole:
        backward[0] = marks.mark()
    run_backward(outputs, grads)
    del outputs, grads
    return Passed(forward, backward, marks.mark())


def measure_ops(
    ops: Sequence[OpModule],
    places: Sequence[PlacedOp],
    batch: Batch,
    inputs: Sequence[TensorSpec],
    *,
    tp: int = 1,
    warmups: int,
    warmup_s: float = 0.0,
    repeats: int,
    run: Run | None = None,
    at_once: bool = False,
) -> list[OpMeasure]:
    """Runs the ops a few times and returns the medians of each distinct op over its copies and the repeats; `run` runs them, where they
    have no passes of their own.

    Work that keeps the device busy is first run for `warmup_s`, however short one pass of it is: clocks under lasting load are lower than
    in a burst, and sizes that are measured at other clocks than their neighbours look better than they are. `at_once`: training plays such
    passes from recordings; the device's times are those of the kernels that it then runs, the host's those of issuing them one by one.
    """
    device = next((p.device for op in ops for p in op.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for op in ops for p in op.parameters()), torch.float32)
    hold_gradients(parameter for op in ops for parameter in op.parameters())
    recorded = replace(batch, at_once=True) if at_once else batch

    def once(marks: Marks, whole: bool = False, batch: Batch = batch) -> Passed:
        return (run or partial(_run, ops))(random_carry(inputs, batch.shape, tp, device, dtype), batch, marks, whole)

    clock = times_for(device)
    took_s, issued_s = _warm_up(partial(once, clock, batch=recorded), clock, warmups, warmup_s)
    count = repeats if took_s > 0.02 else 3 * repeats
    # Where the device is done as soon as the host has issued its work, it is kept busy first: what lies between two marks is then the
    # device's own time, and not how long it waited for the host.
    ahead_s = 0.0 if _device_decides(took_s, issued_s) else 1.5 * issued_s
    times = _timed(partial(once, batch=recorded), clock, count, ahead_s)
    if isinstance(clock, CpuTimes):
        return _medians(places, times, [(0.0, 0.0, 0.0)] * len(ops))
    if at_once:
        once(clock)  # finds its kernels
        issued = _timed(once, clock, count, ahead_s)
        times = [[(*played[:2], *other[2:]) for played, other in zip(*both, strict=True)] for both in zip(times, issued, strict=True)]
    host_s = _host_of_whole(partial(once, whole=True), clock, repeats)
    return _medians(places, [_without_marks(one, host_s) for one in times], _books(once))


def _timed(once: Callable[[Marks], Passed], clock: Marks, count: int, ahead_s: float) -> list[list[OpTimes]]:
    """The times of all ops in some passes, before each of which the device is kept busy for `ahead_s`."""
    passes = []
    for _ in range(count):
        if ahead_s:
            clock.get_ahead(ahead_s)
        passes.append(once(clock))
        if ahead_s:
            clock.finish()
    clock.finish()
    return [[_op_times(clock, *marks) for marks in one.intervals()] for one in passes]


def _host_of_whole(once: Callable[[Marks], Passed], clock: Marks, repeats: int) -> tuple[float, float]:
    """(forward, backward) time that issuing the whole chain takes the host, with nothing set between its ops."""
    marks = []
    for _ in range(repeats):
        clock.finish()
        marks.append(once(clock).intervals()[0])
    clock.finish()
    forward, backward = zip(*(_op_times(clock, *one)[2:] for one in marks), strict=True)
    return statistics.median(forward), statistics.median(backward)


def _without_marks(times: Sequence[OpTimes], whole_s: tuple[float, float]) -> list[OpTimes]:
    """The times of a pass with host times that add up to those of the whole: each less what marks took, an equal share of the excess."""
    columns = [list(column) for column in zip(*times, strict=True)]
    for at, target_s in zip((2, 3), whole_s, strict=True):
        column = columns[at]
        num = sum(value > 0 for value in column)
        excess_s = max(sum(column) - target_s, 0.0) / max(num, 1)
        # Setting a mark takes about as long behind every op; no op is left with less than a fifth of what was seen of it.
        less = [max(value - excess_s, 0.2 * value) for value in column]
        columns[at] = [value * target_s / max(sum(less), 1e-12) for value in less]
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


def _op_times(clock: Marks, a: Any, b: Any, c: Any, d: Any) -> OpTimes:
    """(forward, backward, host forward, host backward) of one op in one pass; ops without a gradient have no backward marks."""
    if c is None:
        return clock.between(a, b), 0.0, clock.host_between(a, b), 0.0
    return clock.between(a, b), clock.between(c, d), clock.host_between(a, b), clock.host_between(c, d)


def _warm_up(once: Callable[[], object], clock: Marks, warmups: int, warmup_s: float) -> tuple[float, float]:
    """Runs at least `warmups` times, and work that keeps the device busy for at least `warmup_s`; the time of one run and of issuing it."""
    for _ in range(warmups):
        start = time.perf_counter()
        once()
        issued_s = time.perf_counter() - start
        clock.finish()
        took_s = time.perf_counter() - start
    if _device_decides(took_s, issued_s):
        for _ in range(int(warmup_s / took_s)):
            once()
    return took_s, issued_s


def _device_decides(took_s: float, issued_s: float) -> bool:
    """Whether a run takes as long as its device does, and not as long as its host issues it."""
    return took_s > 1.3 * issued_s


def _books(once: Any) -> list[tuple[float, float, float]]:
    """(growth, forward peak, backward peak) of each op in bytes, from one pass over the allocator's books."""
    marks = CudaBytes()
    marks.mark()
    result = []
    for first, second, third, fourth in once(marks).intervals():
        backward = marks.peak(third, fourth) if third is not None else 0.0
        result.append((marks.between(first, second), marks.peak(first, second), backward))
    return result


def _medians(
    places: Sequence[PlacedOp], times: list[list[OpTimes]], books: list[tuple[float, float, float]]
) -> list[OpMeasure]:
    found: dict[str, list[int]] = {}
    for index, place in enumerate(places):
        found.setdefault(place.op.signature, []).append(index)
    measures = []
    for signature, indices in found.items():
        # The first copy of a repeated block also pays for what the micro-batch makes once and shares.
        inner = indices[1:] if len(indices) > 2 else indices
        columns = list(zip(*(run[i] for run in times for i in inner), strict=True))
        forward, backward, host_forward, host_backward = (statistics.median(column) for column in columns)
        both = [f + b for f, b in zip(columns[0], columns[1], strict=True)]
        quartiles = statistics.quantiles(both, n=4) if len(both) > 1 else [both[0]] * 3
        spread = (quartiles[2] - quartiles[0]) / 2 / max(forward + backward, 1e-12)
        sizes = (statistics.median(books[i][column] for i in inner) for column in range(3))
        measures.append(OpMeasure(signature, forward, backward, spread, host_forward, host_backward, *sizes))
    return measures
