"""Where a chain of ops repeats, and sets of places to cut it at: all of them, few of them, or those near cuts that were good before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.models.ops import Model
from penstock.plans.build import BESIDE
from penstock.search.space.stage_costs import Ints

__all__ = ["Blocks", "blocks_of"]


@dataclass(frozen=True)
class Blocks:
    """Blocks of ops, those of one kind equal; a recomputed segment ends with its block."""

    start: Ints
    """[B + 1] first op of each block."""
    kind: Ints
    """[B] type of a repeated block, -1 for ops that are never recomputed."""
    first_free: NDArray[np.bool_]
    """[B] whether a block's first op may be recomputed."""

    @classmethod
    def of(cls, model: Model, first_free: Sequence[bool], smallest: int = 3) -> Blocks:
        """The blocks of a chain; `first_free` tells for each op whether it may be recomputed as the first of its block."""
        ops = model.ops
        start = [p.index for p in ops if p.index == 0 or (p.block, p.copy) != (ops[p.index - 1].block, ops[p.index - 1].copy)]
        ends = [*start[1:], len(ops)]
        types: dict[tuple[str, ...], int] = {}
        kind = []
        for a, b in zip(start, ends, strict=True):
            signature = tuple(p.op.signature for p in ops[a:b])
            # Of two ops at most one would be recomputed alone, which saves nothing.
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

    @property
    def ends(self) -> Ints:
        """The cuts of a single stage: the chain's first op and its end."""
        return self.start[[0, -1]]

    def stride(self, most: int) -> int:
        """Every how many blocks a cut may be, so that there are at most so many cuts."""
        return -(-(len(self.start) - 1) // most)

    def every(self, stride: int) -> Ints:
        """Cuts between blocks, one every so many blocks."""
        return np.append(self.start[:-1:stride], self.start[-1])

    def starts_near(self, cuts: Sequence[int], window: int) -> Ints:
        """Starts of so many blocks on both sides of each cut."""
        last = len(self.start) - 1
        at = np.searchsorted(self.start, cuts)
        near = {0, last, *(n for block in at for n in range(max(int(block) - window, 0), min(int(block) + window, last) + 1))}
        return np.asarray(self.start[sorted(near)])

    def within(self, parts: int) -> Ints:
        """Cuts between blocks, and inside each so that it falls into at most so many parts of about equally many ops."""
        sizes = np.diff(self.start)
        inside = (self.start[:-1] + part * sizes // parts for part in range(parts))
        return np.unique(np.concatenate([*inside, self.start[-1:]]))

    def twin_cuts(self, cuts: Ints) -> Ints:
        """[2, cuts - 1] for each cut an earlier one in an equal block, and how many stages from both, shortest first, have equal ops.

        Blocks of one kind that follow each other are a run; two stages in it are equal if they begin at the same op of a block and their
        cuts stay equally far apart. So only stages from the first block of a run, and those that leave it, need to be worked out.
        """
        at, run = self.of_op[cuts[:-1]], np.cumsum(np.diff(self.kind, prepend=-2) != 0)
        last = np.append(np.flatnonzero(np.diff(run)), len(run) - 1)  # of each run
        ends = self.start[last[run[at] - 1] + 1]
        steps, seen = np.diff(cuts), dict[tuple[int, int], int]()
        twins = np.zeros((2, len(steps)), np.int64)
        for cut in range(len(steps)):
            place = int(run[at[cut]]), int(self.alike[cuts[cut]])
            twins[0, cut] = seen.get(place, cut)
            seen[place] = cut
        for cut in range(len(steps) - 1, -1, -1):
            twin = twins[0, cut]
            if twin < cut and steps[cut] == steps[twin] and cuts[cut + 1] <= ends[cut]:
                goes_on = cut + 1 < len(steps) and twins[0, cut + 1] == twin + 1
                twins[1, cut] = 1 + (twins[1, cut + 1] if goes_on else 0)
        return twins

    def ops_near(self, cuts: Sequence[int], window: int = 1) -> Ints:
        """Every op of so many blocks on both sides of each cut."""
        last = len(self.start) - 1
        places = {0, int(self.start[-1])}
        for cut in cuts:
            block = int(np.searchsorted(self.start, cut))
            places.update(range(int(self.start[max(block - window, 0)]), int(self.start[min(block + window, last)]) + 1))
        return np.array(sorted(places))


def blocks_of(model: Model) -> Blocks:
    """The model's blocks; those beside the layers (embedding, head, …) are never recomputed."""
    found = Blocks.of(model, [True] * model.num_ops)
    beside = np.array([model.ops[int(start)].block in BESIDE for start in found.start[:-1]])
    kind = np.where(beside, -1, found.kind)
    used = {int(old): new for new, old in enumerate(sorted(set(kind.tolist()) - {-1}))}
    return replace(found, kind=np.array([used.get(int(old), -1) for old in kind]))
