"""Pieces of a row of tokens, and the tiles that attention starts longest first."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.models.modules import Sequences
from penstock.models.modules.pieces import TILE, tiled


def _packed(lengths: list[int]) -> Sequences:
    return Sequences(torch.zeros(sum(lengths), dtype=torch.int64), tuple(lengths), "packed", max(lengths), torch.arange(len(lengths)))


def test_a_padded_row_is_its_sequence_and_its_padding() -> None:
    rows = Sequences(torch.zeros(8, dtype=torch.int64), (3, 4), "padded", 4, torch.arange(2)).pieces(causal=True)
    assert rows.starts.tolist() == [0, 0, 0, 3, 4, 4, 4, 4] and rows.ends.tolist() == [3, 3, 3, 4, 8, 8, 8, 8]
    assert rows.starts.dtype == rows.query_order.dtype == torch.int32


def test_tiles_of_a_long_piece_begin_first() -> None:
    """Two tiles of samples of one token, then a sample of three tiles: its last queries see most keys, its first keys most queries."""
    pieces = _packed([1] * 2 * TILE + [3 * TILE])
    causal, both = pieces.pieces(causal=True), pieces.pieces(causal=False)
    assert causal.query_order.tolist() == [4, 3, 0, 1, 2]
    assert causal.key_order.tolist() == [2, 3, 0, 1, 4]
    assert both.query_order.tolist() == both.key_order.tolist() == [2, 3, 4, 0, 1]


@given(st.lists(st.integers(1, 150), min_size=1, max_size=6))
def test_each_token_knows_its_piece_and_tiles_are_held_against_most_tokens_first(lengths: list[int]) -> None:
    edges = np.concatenate(([0], np.cumsum(lengths)))
    found = tiled(edges)
    piece = np.repeat(np.arange(len(lengths)), lengths)
    assert (found["piece_starts"] == edges[piece]).all() and (found["piece_ends"] == edges[piece + 1]).all()
    at = np.arange(len(piece))
    together = piece[:, None] == piece[None, :]
    seen = {"causal_query_order": together & (at[None, :] <= at[:, None]), "causal_key_order": together & (at[None, :] >= at[:, None])}
    for order, matters in (seen | {"tile_order": together}).items():
        work = [int(matters[first : first + TILE].any(0).sum()) for first in range(0, len(piece), TILE)]
        assert sorted(found[order]) == list(range(len(work)))
        assert [work[tile] for tile in found[order]] == sorted(work, reverse=True)
