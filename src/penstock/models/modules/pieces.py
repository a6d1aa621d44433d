"""Pieces of a flat row of tokens, which attention stays inside, and the tiles that its kernels cut the row into.

They are counted on the host, and travel to the device with the micro-batch: made there, they would take two dozen kernels, each of which a
small micro-batch waits for longer than for its attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["TILE", "Pieces", "tiled"]

Integers = npt.NDArray[Any]
TILE = 64
"""Tokens of a tile: queries of the two kernels that walk over keys, keys of the one that walks over queries."""


class Pieces(NamedTuple):
    """The pieces of a row of tokens, and the order in which its tiles are started."""

    starts: torch.Tensor
    """(tokens,) int32 where the piece of each token begins."""
    ends: torch.Tensor
    """(tokens,) int32 where it ends."""
    query_order: torch.Tensor
    """(tiles,) int32, those whose queries see most keys first."""
    key_order: torch.Tensor
    """(tiles,) int32, those whose keys are seen by most queries first."""


def tiled(edges: Integers) -> dict[str, Integers]:
    """What `Pieces` of both directions are made of, by name, for pieces between `edges` (0, the end of the first, ..., all tokens)."""
    sizes, tokens = np.diff(edges), int(edges[-1])
    starts, ends = np.repeat(edges[:-1], sizes), np.repeat(edges[1:], sizes)
    first = np.arange(0, tokens, TILE)
    last = np.minimum(first + TILE, tokens) - 1
    begin, end = starts[first], ends[last]
    return {
        "piece_starts": starts.astype(np.int32), "piece_ends": ends.astype(np.int32), "causal_query_order": _most_first(last - begin),
        "causal_key_order": _most_first(end - first), "tile_order": _most_first(end - begin),
    }  # fmt: skip


def _most_first(work: Integers) -> Integers:
    """Tiles by how many tokens each is held against."""
    return np.argsort(-work, kind="stable").astype(np.int32)
