"""All stages a plan could have, as arrays: what the partition programme reads.

Costs come from an oracle (tables of another planner, a profile, the roofline) as one `OptionCosts` for each way to run a stage; the
programme knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats
from penstock.models.ops import Model

__all__ = [
    "Blocks", "Levels", "Machine", "OptionCosts", "Pool", "StageChoice", "StageOption", "StageSpace", "build_space",
    "levels_of", "stage_widths", "sums_before",
]  # fmt: skip

PRICES = 60
"""Prices of memory at which recomputation is solved; those that change nothing are dropped."""
UNITS = 4096
"""Steps of memory in which one block's recomputation is solved exactly."""

Ints = NDArray[np.int64]
Recompute = Literal["needed", "bounded", "never"]
_MODES: tuple[Recompute, ...] = ("needed", "bounded", "never")


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage: its devices and how they divide the work."""

    num_devices: int
    tp: int
    dp: int
    pool: int = 0
    """Which of the machine's pools the devices are of."""
    sequence: bool = False
    """Whether the tokens are divided between products, with tp above 1."""
    zero: int = 1
    """What ranks that hold the same weights divide, where there are several; above 1 it is the only stage."""


@dataclass(frozen=True)
class OptionCosts:
    """Costs of every op of the chain under one option, per micro-batch of the stage; memory in one unit throughout."""

    option: StageOption
    forward: Floats
    compute: Floats
    """Forward and backward."""
    kept: Floats
    """Held until the backward pass, unless recomputed."""
    weights: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    entering: Floats
    """Memory of a stage's input if it starts at the op."""
    enter: Floats
    """[2, N + 1] time of the message before op i, inside a node and across nodes."""
    leave: Floats
    """[2, N + 1] time of the message after op j - 1."""
    algos: tuple[int, ...] = ()
    """The split of each op, where it is not 0 for all."""
    relief: Floats | None = None
    """What of each op's time does not count in the sum of stages, as under zero-bubble schedules."""
    passed: Floats | None = None
    """What of `kept` the next stage keeps instead, if the op is the last of its stage."""
    light: NDArray[np.bool_] | None = None
    """Ops that need not run again where they end a recomputed run, since they keep no more than their input; none unless told."""

    @property
    def not_kept(self) -> Floats:
        """`passed`, or nothing."""
        return np.zeros_like(self.kept) if self.passed is None else self.passed

    @cached_property
    def ending(self) -> Floats:
        """Forward time of each op as the last one of a recomputed run."""
        return self.forward if self.light is None else np.where(self.light, 0.0, self.forward)


@dataclass(frozen=True, slots=True)
class Pool:
    """Equal devices in equal nodes, with what each can hold."""

    num_devices: int
    per_node: int
    memory_limit: float


@dataclass(frozen=True)
class Machine:
    """The devices of a pipeline, a pool of each kind."""

    pools: tuple[Pool, ...]
    state_factor: float
    """Weights, gradients and optimizer state as a multiple of the weights."""
    least_reserve: float = 1.0
    """The reserve is at least this multiple of the weights."""
    idle: bool = False
    """Whether devices may be left out."""

    @property
    def num_devices(self) -> int:
        """Of all pools."""
        return sum(pool.num_devices for pool in self.pools)


@dataclass(frozen=True)
class Blocks:
    """Where the chain repeats: blocks of ops, those of one kind equal; recomputed segments end with their block."""

    start: Ints
    """[B + 1] first op of each block."""
    kind: Ints
    """[B] type of a repeated block, -1 for ops that are never recomputed."""
    first_free: NDArray[np.bool_]
    """[B] whether a block's first op may be recomputed."""

    @classmethod
    def of(cls, model: Model, first_free: Sequence[bool], smallest: int = 3) -> Blocks:
        """The blocks of a chain; `first_free` tells it for each op."""
        ops = model.ops
        start = [p.index for p in ops if p.index == 0 or (p.block, p.copy) != (ops[p.index - 1].block, ops[p.index - 1].copy)]
        ends = [*start[1:], len(ops)]
        types: dict[tuple[str, ...], int] = {}
        kind = []
        for a, b in zip(start, ends, strict=True):
            signature = tuple(p.op.signature for p in ops[a:b])
            kind.append(types.setdefault(signature, len(types)) if b - a >= smallest else -1)
        return cls(np.array([*start, len(ops)]), np.array(kind), np.array([first_free[a] for a in start]))

    @property
    def num_types(self) -> int:
        """Number of distinct repeated blocks."""
        return int(self.kind.max(initial=-1)) + 1

    @cached_property
    def of_op(self) -> Ints:
        """[N] the block of each op."""
        return np.repeat(np.arange(len(self.kind)), np.diff(self.start))

    @cached_property
    def count(self) -> Ints:
        """[T, B + 1] blocks of each type before a block."""
        ones = np.stack([self.kind == kind for kind in range(max(self.num_types, 1))]).astype(np.int64)
        return np.concatenate([np.zeros((len(ones), 1), np.int64), np.cumsum(ones, axis=1)], axis=1)

    @cached_property
    def alike(self) -> Ints:
        """[N] for each op the same op of the first block of its type; itself where its block does not repeat."""
        first = np.arange(len(self.kind))
        for kind in range(self.num_types):
            first[self.kind == kind] = np.argmax(self.kind == kind)
        return np.asarray(np.arange(self.start[-1]) - (self.start[:-1] - self.start[first])[self.of_op])

    def example(self, kind: int) -> tuple[int, int]:
        """First and last + 1 op of a block of this type."""
        block = int(np.argmax(self.kind == kind))
        return int(self.start[block]), int(self.start[block + 1])


@dataclass(frozen=True)
class Levels:
    """Recomputation of one option at a few prices of memory: [L, …, 3] are saved memory, time and peak."""

    prices: Floats
    head: Floats
    tail: Floats
    full: Floats
    """[L, T, 3] of whole blocks."""
    least: Floats
    """[T, UNITS] least time to save a number of units in one block."""
    unit: Floats
    """[T] memory of one unit."""


_NO_LEVELS = Levels(np.zeros(1), np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.zeros((1, 1)), np.ones(1))
"""Where nothing is recomputed."""


@dataclass(frozen=True, slots=True)
class StageChoice:
    """A stage that the programme chose: ops first..last under an option, with a number of stages behind it."""

    option: int
    first: int
    last: int
    behind: int
    time: float
    start: int = 0
    """Its first device, as a position in the pool."""
    relief: float = 0.0
    """What of its time does not count in the sum of stages."""


@dataclass(frozen=True)
class StageSpace:
    """Times of all stages for one micro-batch size; those longer than any good plan's are left out."""

    costs: tuple[OptionCosts, ...]
    levels: tuple[Levels, ...]
    blocks: Blocks | None
    """None where recomputation is not solved block by block."""
    machine: Machine
    cuts: Ints
    """Ops at which a stage may begin, and the end; the tables below count cuts."""
    offset: Ints
    """[C, cuts - 1] where the stages that start at a cut begin in `times`."""
    width: Ints
    """[C, cuts - 1] how many of them there are: they end one cut on, two cuts on, …"""
    times: Floats
    """[K, pairs]"""
    enter: Floats
    leave: Floats
    relief: Floats
    """[C, cuts] prefix sums."""
    work: Floats | None = None
    """[C, cuts] prefix sums of what no stage's time is below; None where that is not known."""

    @property
    def repeats(self) -> Blocks:
        """The blocks, for callers that need them."""
        if self.blocks is None:
            raise ValueError("this space has no blocks: its recomputation was solved op by op")
        return self.blocks

    def pair(self, option: int, first: int, last: int) -> int:
        """Where the time of ops first..last under an option is in `times`."""
        a, b = np.searchsorted(self.cuts, (first, last))
        return int(self.offset[option, a] + b - a - 1)

    def inner(self) -> StageSpace:
        """A space of cuts between blocks without messages and without the first block of every stage but the first.

        A cut inside a block, moved to the block's start, leaves each stage with more ops than it then has here; so the programme's answer
        bounds plans with cuts anywhere from below.
        """
        times = np.zeros_like(self.times)
        for c in range(len(self.costs)):
            starts = np.repeat(np.arange(self.width.shape[1]), self.width[c])
            ends = starts + 1 + np.arange(len(starts)) - (self.offset[c] - self.offset[c, 0])[starts]
            begins = np.where(starts > 0, starts + 1, 0)
            full = ends > begins
            kept = self.offset[c, begins[full]] + ends[full] - begins[full] - 1
            times[:, self.offset[c, 0] + np.flatnonzero(full)] = self.times[:, kept]
        return replace(self, times=times, enter=np.zeros_like(self.enter), leave=np.zeros_like(self.leave), work=None)


def build_space(
    costs: Sequence[OptionCosts], blocks: Blocks, machine: Machine, *, max_stages: int, longest: float = np.inf,
    count: int = 0, cuts: Ints | None = None, recompute: Recompute = "needed", levels: Sequence[Levels] | None = None,
    in_flight: int = 0, peaks: int = 0,
) -> StageSpace:  # fmt: skip
    """Solves recomputation and tabulates the stages of at most `longest` compute; `cuts` are the ops where one may begin, and the end.

    With a `count` of micro-batches, stages that no plan of at most count × `longest` can have are left out as well.
    A space with recomputation `bounded` holds times that no stage can be below; with `never`, only stages that fit without.
    `levels` are those of `levels_of`, where they are at hand; `in_flight` are the micro-batches that every stage holds at least, which only
    a space without recomputation counts right; `peaks` in how many ranges a `bounded` space divides the largest segment that is brought
    back at once, so that it counts (with its least size in the range); none if it does not.
    """
    from penstock.search.partition.kernels import stage_times

    places = np.arange(len(costs[0].compute) + 1) if cuts is None else cuts
    work = sums_before([c.compute for c in costs])[:, places]
    relief = sums_before([np.zeros_like(c.compute) if c.relief is None else c.relief for c in costs])[:, places]
    offset, width = stage_widths(np.diff(work), longest, count, np.diff(relief))
    times = np.full((max_stages, int(width.sum())), np.inf)
    levels = tuple(levels_of(c, blocks) if recompute != "never" else _NO_LEVELS for c in costs) if levels is None else tuple(levels)

    def fill(c: OptionCosts, level: Levels, mode: Recompute, spare: float, at: Ints, wide: Ints, into: Floats) -> None:
        stage_times(
            c.compute, c.kept, c.not_kept, c.weights, c.forward_reserve, c.backward_reserve, c.entering, level.head, level.tail, level.full,
            level.least, level.unit, level.prices, blocks.of_op, blocks.start, blocks.count, machine.state_factor, machine.least_reserve,
            machine.pools[c.option.pool].memory_limit - spare, longest, places, _MODES.index(mode), in_flight, at, wide, into,
        )  # fmt: skip

    for c, level, at, wide in zip(costs, levels, offset, width, strict=True):
        if not peaks:
            fill(c, level, recompute, 0.0, at, wide, times)
            continue
        fill(c, level, "never", 0.0, at, wide, times)
        own = times[:, at[0] : at[-1] + wide[-1]]
        for least, most in _ranges(c, blocks, peaks):
            found = np.full(own.shape, np.inf)
            fill(c, _limited(c, blocks, level, most), recompute, least, at - at[0], wide, found)
            np.minimum(own, found, out=own)
    enter, leave = (np.ascontiguousarray(np.stack([getattr(c, name) for c in costs])[:, :, places]) for name in ("enter", "leave"))
    return StageSpace(tuple(costs), levels, blocks, machine, places, offset, width, times, enter, leave, relief, work)


def _ranges(costs: OptionCosts, blocks: Blocks, number: int) -> list[tuple[float, float]]:
    """Ranges of what the largest recomputed segment holds, up to all of the largest block."""
    whole = max((float(costs.kept[slice(*blocks.example(kind))].sum()) for kind in range(blocks.num_types)), default=0.0)
    edges = [0.0, *(whole * 0.75 ** np.arange(number - 1, 0, -1)), np.inf]
    return list(pairwise(edges))


def _limited(costs: OptionCosts, blocks: Blocks, levels: Levels, most: float) -> Levels:
    """The levels if no segment may hold more than `most`; only what a bound asks for."""
    from penstock.search.partition.kernels import limited_levels

    head, tail, full = (np.zeros_like(x) for x in (levels.head, levels.tail, levels.full))
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        free = bool(blocks.first_free[blocks.of_op[start]])
        limited_levels(costs.forward, costs.ending, costs.kept, start, stop, free, most, levels.prices, head, tail)
        full[:, kind] = head[:, start]
    alike = blocks.alike
    return replace(levels, head=np.take(head, alike, axis=1), tail=np.take(tail, np.append(alike, len(alike)), axis=1), full=full)


def sums_before(amounts: Sequence[Floats]) -> Floats:
    """[C, N + 1] the sum of all ops before an op, option by option."""
    return np.concatenate([np.zeros((len(amounts), 1)), np.cumsum(np.stack(amounts), axis=1)], axis=1)


def stage_widths(compute: Floats, longest: float, count: int = 0, relief: Floats | float = 0.0) -> tuple[Ints, Ints]:
    """`offset` and `width` of a table of all stages of at most `longest` compute [C, pieces], option by option.

    In a plan of `count` micro-batches a stage counts so often, less its relief, and every piece outside it once at least.
    """
    least = (compute - relief).min(axis=0)
    width = np.stack([_widths(own, longest) for own in compute])
    if count:
        limit = count * longest - float(least.sum())
        width = np.minimum(width, np.stack([_widths(own, limit) for own in count * compute - relief - least]))
    return (np.cumsum(width.ravel()) - width.ravel()).reshape(width.shape), width


def _widths(compute: Floats, longest: float) -> Ints:
    """For each piece, how many from it on take at most `longest`; at least one."""
    before = np.concatenate([[0.0], np.cumsum(compute)])
    reach = np.searchsorted(before, before[:-1] + longest, side="right") - 1
    return np.maximum(np.minimum(reach, len(compute)) - np.arange(len(compute)), 1).astype(np.int64)


def levels_of(costs: OptionCosts, blocks: Blocks) -> Levels:
    """Solves recomputation of every piece of a block at a few prices."""
    from penstock.search.partition.kernels import least_times, piece_levels

    num_ops, num_types = len(costs.compute), max(blocks.num_types, 1)
    counted = (costs.kept > 1e-3 * costs.kept.max()) & (costs.forward > 0)
    ratios = costs.forward[counted] / costs.kept[counted]
    prices = np.concatenate([[0.0], np.geomspace(0.3 * ratios.min(), 4 * ratios.max(), PRICES), [1e6 * ratios.max()]])
    head, tail = np.zeros((len(prices), num_ops, 3)), np.zeros((len(prices), num_ops + 1, 3))
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        edges, free = np.array([start, stop]), np.array([blocks.first_free[blocks.of_op[start]]])
        piece_levels(costs.forward, costs.ending, costs.kept, edges, free, prices, head, tail)
    changed = [(head[level] != head[level - 1]).any() or (tail[level] != tail[level - 1]).any() for level in range(1, len(prices))]
    new = np.flatnonzero([True, *changed])
    prices, head, tail = prices[new], np.take(head[new], blocks.alike, axis=1), np.take(tail[new], np.append(blocks.alike, num_ops), axis=1)
    full = np.zeros((len(prices), num_types, 3))
    least, unit = np.full((num_types, UNITS), np.inf), np.ones(num_types)
    for kind in range(blocks.num_types):
        start, stop = blocks.example(kind)
        full[:, kind] = head[:, start]
        unit[kind] = max(float(costs.kept[start:stop].sum()), 1e-9) / (UNITS - 1)
        parents = np.zeros((stop - start, 2, UNITS), np.int8)
        least_times(
            costs.forward, costs.ending, costs.kept, start, stop, bool(blocks.first_free[blocks.of_op[start]]), unit[kind], least[kind],
            parents,
        )  # fmt: skip
    return Levels(prices, head, tail, full, least, unit)
