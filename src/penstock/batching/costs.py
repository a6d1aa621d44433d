"""What a planner of batches has to know of a pipeline: costs of micro-batches on grids, memory, transfers, in arrays.

Any source of costs is brought into this form once (`dynapipe`, `planned`); the planner then looks up millions of micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import InputError
from penstock.models.shapes import Layout
from penstock.timing.recorded import FewShapes

if TYPE_CHECKING:
    from penstock.batching.kernels import Tables

__all__ = ["QUANTITIES", "ChunkCosts", "Floats", "LayoutCosts", "PipelineCosts"]

Floats = NDArray[np.float64]

QUANTITIES = ("forward_s", "backward_s", "stored_bytes", "peak_bytes", "other_peak_bytes", "backward_peak_bytes")
"""Of one micro-batch on one rank of a stage: times, what it holds between its passes, and the highest points of the passes above the
level without it. The forward peak is the larger of two, which a stage reaches at different ops."""


@dataclass(frozen=True)
class LayoutCosts:
    """Costs of all micro-batches of one layout, by multilinear interpolation."""

    axes: tuple[Floats, Floats, Floats]
    """Padded: rows, row length, decoder row length. Packed: tokens, mean of the length that a token attends to (sum of squared
    lengths / tokens), 0. An axis of one knot is constant."""
    values: Floats
    """[axis 1, axis 2, axis 0, C, M, quantities]; infinite where a micro-batch is infeasible or not known."""

    def at(self, x: ArrayLike, y: ArrayLike, z: ArrayLike) -> Floats:
        """[…, C, M, quantities] at points of one shape: multilinear, infinite next to an infinite knot, extended below the first."""
        points = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in (x, y, z)))
        cells = [_cells(axis, point) for axis, point in zip(self.axes, points, strict=True)]
        total = np.zeros((*points[0].shape, *self.values.shape[3:]))
        for corner in product(*((0, 1) if len(axis) > 1 else (0,) for axis in self.axes)):
            weight = np.ones(points[0].shape)
            for up, (_, upper) in zip(corner, cells, strict=True):
                weight = weight * (upper if up else 1.0 - upper)
            i, j, k = (np.minimum(low + up, len(axis) - 1) for up, (low, _), axis in zip(corner, cells, self.axes, strict=True))
            used = (weight != 0).reshape(*weight.shape, 1, 1, 1)
            with np.errstate(invalid="ignore"):
                total = np.where(used, total + weight.reshape(used.shape) * self.values[j, k, i], total)
        return np.where(np.isfinite(total), total, np.inf)


def _cells(axis: Floats, point: Floats) -> tuple[NDArray[np.int64], Floats]:
    """(lower knot, weight of the upper one) of each point."""
    if len(axis) == 1:
        return np.zeros(point.shape, dtype=np.int64), np.zeros(point.shape)
    low = np.clip(np.searchsorted(axis, point, side="right") - 1, 0, len(axis) - 2)
    return low, (point - axis[low]) / (axis[low + 1] - axis[low])


@dataclass(frozen=True)
class ChunkCosts:
    """What each chunk of an interleaved pipeline costs by itself; stage s is on device group s % groups."""

    layouts: dict[Layout, LayoutCosts]
    stage_class: NDArray[np.int64]
    """[R, chunks of all groups]"""
    hops: Floats
    """[R, 2, chunks of all groups - 1, 3]"""


@dataclass(frozen=True)
class PipelineCosts:
    """R replicas of S stages; stages with equal costs form one of C classes; each can run a micro-batch in M modes.

    Of an interleaved pipeline the stages are its device groups, each with all its chunks.
    """

    name: str
    layouts: dict[Layout, LayoutCosts]
    stage_class: NDArray[np.int64]
    """[R, S]"""
    state_bytes: Floats
    """[R, S] weights, optimizer state and all that does not depend on the micro-batches."""
    limit_bytes: Floats
    """[R, S]"""
    hops: Floats
    """[R, 2, S - 1, 3] transfer between neighbours, forward and backward: latency, seconds per token, per decoder token."""
    modes: tuple[str, ...]
    """Names of the recomputation modes; mode m is pattern m of every stage."""
    round_to: int = 1
    """Rows are padded to a multiple of this."""
    length_offset: int = 0
    """Token positions of a sample less its length: -1 where the last token is a label only."""
    dec_offset: int = 0
    """The same for the decoder's side, where it has any tokens: 2 for begin and end marks."""
    has_decoder: bool = False
    fixed_s: float = 0.0
    """Once per iteration after the pipeline: gradient sync, optimizer step."""
    max_samples: int = 2**31
    """Most samples of a micro-batch."""
    max_tokens: int = 2**40
    """Most token positions of a micro-batch, padding included."""
    max_length: int = 2**31
    """Most token positions of a sample that the model takes."""
    few_shapes: FewShapes | None = None
    """What micro-batches are brought to where their passes are played from recordings."""
    chunks: ChunkCosts | None = None
    """What the chunks of the groups cost one by one, where there are several on each."""

    @property
    def num_replicas(self) -> int:
        """R"""
        return int(self.stage_class.shape[0])

    @property
    def num_stages(self) -> int:
        """S"""
        return int(self.stage_class.shape[1])

    @property
    def num_chunks(self) -> int:
        """Chunks of the model on each device group."""
        return 1 if self.chunks is None else int(self.chunks.stage_class.shape[1]) // self.num_stages

    @property
    def parts(self) -> PipelineCosts | ChunkCosts:
        """What runs passes of its own: stages, or chunks where groups have several."""
        return self.chunks or self

    def of_layout(self, layout: Layout) -> LayoutCosts:
        """What micro-batches of a layout cost on each part, or a clear word that it is not known."""
        if layout not in self.layouts:
            held = " and ".join(self.layouts)
            raise InputError(f"a {layout} micro-batch has no price: costs '{self.name}' are of {held} ones. Use one of those.")
        return self.parts.layouts[layout]

    @cached_property
    def tables(self) -> Tables:
        """The costs as arrays, as the kernels take them."""
        from penstock.batching.kernels import Tables

        some = next(iter(self.layouts.values()))
        classes, modes = some.values.shape[3:5]
        nothing = LayoutCosts((np.zeros(1),) * 3, np.full((1, 1, 1, *some.values.shape[3:]), np.inf))
        grids = [self.layouts.get(layout, nothing) for layout in ("padded", "packed")]
        values = [np.ascontiguousarray(grid.values).reshape(*grid.values.shape[:3], -1) for grid in grids]
        allowed = [int(layout in self.layouts) for layout in ("padded", "packed")]
        sizes = np.array([classes, modes, self.round_to, *allowed, self.max_samples, self.max_tokens], dtype=np.int64)
        room = self.limit_bytes - self.state_bytes
        facts = np.concatenate([self.stage_class, room, self.hops.reshape(self.num_replicas, -1)], axis=1)
        kinds = np.sort(np.unique(facts, axis=0, return_index=True)[1])
        filler = np.array((0.0,) * 4 if self.few_shapes is None else self.few_shapes.packed)
        return Tables(values[0], *grids[0].axes, values[1], *grids[1].axes, self.stage_class, room, self.hops, sizes, kinds, filler)
