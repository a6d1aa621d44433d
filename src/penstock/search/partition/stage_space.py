"""All stages a plan could have, as arrays: what the partition programme reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from penstock.costs.table import Floats
from penstock.search.space.blocks import Blocks
from penstock.search.space.levels import NO_LEVELS, Levels, levels_of, limited_levels, segment_ranges
from penstock.search.space.stage_costs import DevicePool, Ints, OptionCosts, sums_before

__all__ = [
    "BlockArrays", "Machine", "MemoryRule", "OpArrays", "Recompute", "StageChoice", "StageSpace", "StageTable", "build_space",
    "stage_widths",
]  # fmt: skip

Recompute = Literal["needed", "bounded", "never"]
"""What stage times count: the recomputation that makes a stage fit, a bound on it, or none, so that only stages that fit without remain."""
_MODES: tuple[Recompute, ...] = ("needed", "bounded", "never")


class OpArrays(NamedTuple):
    """[N] costs of the chain's ops under one option, as kernels take them; `OptionCosts` says what they are."""

    compute: Floats
    kept: Floats
    passed: Floats
    weights: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    entering: Floats


class BlockArrays(NamedTuple):
    """Where the chain repeats, as kernels take it; `Blocks` says what they are."""

    of_op: Ints
    start: Ints
    counts: Ints


class MemoryRule(NamedTuple):
    """What a device can hold, and what counts besides activations."""

    limit: float
    state: float
    """Weights, gradients and optimizer state as a multiple of the weights."""
    floor: float
    """The reserve is at least this multiple of the weights."""


class StageTable(NamedTuple):
    """The arrays of a `StageSpace` that kernels read."""

    offset: Ints
    width: Ints
    times: Floats
    enter: Floats
    leave: Floats
    hidden: Floats


@dataclass(frozen=True)
class Machine:
    """The devices of a pipeline, a pool of each kind."""

    pools: tuple[DevicePool, ...]
    state_factor: float
    """Weights, gradients and optimizer state as a multiple of the weights."""
    least_reserve: float = 1.0
    """The reserve is at least this multiple of the weights."""
    idle: bool = False
    """Whether devices may be left out."""

    @property
    def num_devices(self) -> int:
        """Devices of all pools together."""
        return sum(pool.num_devices for pool in self.pools)

    def memory(self, pool: int, spare: float = 0.0) -> MemoryRule:
        """What a device of a pool can hold, with so much left free."""
        return MemoryRule(float(self.pools[pool].memory_limit - spare), float(self.state_factor), float(self.least_reserve))


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
    hidden_fill_s: float = 0.0
    """Of its time, what zero-bubble hides in the fill and drain of the pipeline; it does not count in the sum of stages."""


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
    """[K, pairs] compute and recomputation with so many stages behind; infinite where a stage does not fit."""
    enter: Floats
    leave: Floats
    """[C, 2, cuts] messages at both ends of a stage, inside a node and across nodes."""
    hidden_fill_s: Floats
    """[C, cuts] prefix sums of what zero-bubble hides in the fill and drain of the pipeline."""
    work: Floats | None = None
    """[C, cuts] prefix sums of what no stage's time is below; None where that is not known."""

    @property
    def table(self) -> StageTable:
        """What kernels read."""
        return StageTable(self.offset, self.width, self.times, self.enter, self.leave, self.hidden_fill_s)

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
        """A space of the same cuts without messages and without what lies between the first two cuts of every stage but the first.

        A cut elsewhere, moved back to the one before it, leaves each stage with more ops than it then has here; so the programme's answer
        bounds plans with cuts anywhere from below.
        """
        width = np.concatenate([self.width[:, :1], self.width[:, 2:] + 1, np.ones_like(self.width[:, 1:][:, -1:])], axis=1)
        offset = (np.cumsum(width.ravel()) - width.ravel()).reshape(width.shape)
        times = np.zeros((self.times.shape[0], int(width.sum())))
        for c, a in np.ndindex(*width.shape):
            kept, skip = (self.offset[c, 0], 0) if a == 0 else (self.offset[c, min(a + 1, width.shape[1] - 1)], 1)
            wide = int(width[c, a]) - skip
            times[:, offset[c, a] + skip : offset[c, a] + skip + wide] = self.times[:, kept : kept + wide]
        silent = np.zeros_like(self.enter)
        return replace(self, times=times, offset=offset, width=width, enter=silent, leave=silent, work=None)


def build_space(
    costs: Sequence[OptionCosts], blocks: Blocks, machine: Machine, *, max_stages: int, longest: float = np.inf,
    count: int = 0, cuts: Ints | None = None, recompute: Recompute = "needed", levels: Sequence[Levels] | None = None,
    in_flight: int = 0, peaks: int = 0, num_devices: int = 0,
) -> StageSpace:  # fmt: skip
    """Solves recomputation and tabulates the times of all stages.

    max_stages     the most stages behind one another
    longest        stages of more compute are left out
    count          with a number of micro-batches, so are those that no plan of at most count × `longest` can have
    cuts           ops at which a stage may begin, and the end; all of them unless given
    levels         those of `levels_of`, where they are at hand
    in_flight      micro-batches that every stage holds at least; only a space without recomputation counts them right
    peaks          in how many ranges a `bounded` space divides the largest segment that is brought back at once, so that it counts (with
                   its least size in the range); it does not count if 0
    num_devices    of the whole pipeline, where all stages are of these options: starts are then left out before which there is more than
                   the other devices can do
    """
    from penstock.search.partition.partition_kernels import stage_times

    places = np.arange(len(costs[0].compute) + 1) if cuts is None else cuts
    work = sums_before([c.compute for c in costs])[:, places]
    # In the order that kernels are compiled for: picking columns leaves them the other way round.
    hidden_fill_s = np.ascontiguousarray(sums_before([c.hidden for c in costs])[:, places])
    devices = np.array([c.option.num_devices for c in costs])
    offset, width = stage_widths(np.diff(work), longest, count, np.diff(hidden_fill_s), devices, num_devices)
    times = np.full((max_stages, int(width.sum())), np.inf)
    levels = tuple(levels_of(c, blocks) if recompute != "never" else NO_LEVELS for c in costs) if levels is None else tuple(levels)
    repeats = BlockArrays(blocks.of_op, blocks.start, blocks.count)
    twins = blocks.twin_cuts(places)

    def fill(c: OptionCosts, level: Levels, mode: Recompute, spare: float, at: Ints, wide: Ints, into: Floats) -> None:
        ops = OpArrays(c.compute, c.kept, c.not_kept, c.weights, c.forward_reserve, c.backward_reserve, c.entering)
        memory = machine.memory(c.option.pool, spare)
        own = twins if all(np.array_equal(column, column[blocks.alike]) for column in ops) else np.zeros_like(twins)
        stage_times(ops, level, repeats, memory, longest, places, own, _MODES.index(mode), in_flight, at, wide, into)

    for c, level, at, wide in zip(costs, levels, offset, width, strict=True):
        if not peaks:
            fill(c, level, recompute, 0.0, at, wide, times)
            continue
        # A stage recomputes nothing, or its largest segment is in one of the ranges: it then has room for the least of that range.
        fill(c, level, "never", 0.0, at, wide, times)
        own = times[:, at[0] : at[-1] + wide[-1]]
        for least, most in segment_ranges(c, blocks, peaks):
            found = np.full(own.shape, np.inf)
            fill(c, limited_levels(c, blocks, level, most), recompute, least, at - at[0], wide, found)
            np.minimum(own, found, out=own)
    enter, leave = (np.ascontiguousarray(np.stack([getattr(c, name) for c in costs])[:, :, places]) for name in ("enter", "leave"))
    return StageSpace(tuple(costs), levels, blocks, machine, places, offset, width, times, enter, leave, hidden_fill_s, work)


def stage_widths(
    compute: Floats, longest: float, count: int = 0, hidden_fill_s: Floats | float = 0.0, devices: Ints | None = None, num_devices: int = 0
) -> tuple[Ints, Ints]:
    """`offset` and `width` of a table of all stages of at most `longest` compute [C, pieces], option by option.

    In a plan of `count` micro-batches a stage counts so often, less what is hidden of it, and every piece outside it once at least. Where
    the `num_devices` of the pipeline are known, only one stage is kept of starts with more before them than the other devices can do.
    """
    least = (compute - hidden_fill_s).min(axis=0)
    width = np.stack([_widths(own, longest) for own in compute])
    if count:
        limit = count * longest - float(least.sum())
        width = np.minimum(width, np.stack([_widths(own, limit) for own in count * compute - hidden_fill_s - least]))
    if devices is not None and num_devices and longest < np.inf:
        work = np.cumsum((devices[:, None] * compute).min(axis=0))
        before = np.concatenate([[0.0, 0.0], work[:-2]])[: len(work)]  # up to one cut earlier: `inner` moves cuts back by as much
        width = np.where(before > (1 + 1e-9) * longest * (num_devices - devices[:, None]), 1, width)
    return (np.cumsum(width.ravel()) - width.ravel()).reshape(width.shape), width


def _widths(compute: Floats, longest: float) -> Ints:
    """For each piece, how many from it on take at most `longest`; at least one."""
    before = np.concatenate([[0.0], np.cumsum(compute)])
    reach = np.searchsorted(before, before[:-1] + longest, side="right") - 1
    return np.maximum(np.minimum(reach, len(compute)) - np.arange(len(compute)), 1).astype(np.int64)
