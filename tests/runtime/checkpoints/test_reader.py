"""Pieces in memory are read like a checkpoint, however they overlap."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.manifest import Box
from penstock.runtime.checkpoints.reader import PiecesInMemory

SHAPE = (4, 6)


def piece(box: Box, value: float | None = None) -> TensorPiece:
    sizes = [stop - start for start, stop in box]
    return TensorPiece("weights/op.weight", SHAPE, box, torch.zeros(sizes) if value is None else torch.full(sizes, value))


def test_where_pieces_overlap_the_first_counts() -> None:
    source = PiecesInMemory([piece(((1, 3), (0, 4)), 1.0), piece(((0, 4), (0, 6)), 2.0), piece(((1, 3), (0, 4)), 3.0)])
    wanted = piece(((0, 3), (3, 6)))
    source.load([wanted])
    assert wanted.tensor.tolist() == [[2.0, 2.0, 2.0], [1.0, 2.0, 2.0], [1.0, 2.0, 2.0]]


def test_overlap_hides_no_hole() -> None:
    """Eight values are there twice, four not at all."""
    source = PiecesInMemory([piece(((0, 4), (0, 5)), 1.0), piece(((0, 4), (3, 5)), 2.0)])
    with pytest.raises(ValueError, match=r"4 of 24 values of 'weights/op.weight' .* are in no piece"):
        source.load([piece(((0, 4), (0, 6)))])


def test_numbers_and_empty_parts() -> None:
    step = TensorPiece("step/op.weight", (), (), torch.zeros(()))
    PiecesInMemory([TensorPiece("step/op.weight", (), (), torch.tensor(7.0))]).load([step])
    assert step.tensor.item() == 7.0
    PiecesInMemory([]).load([piece(((2, 2), (0, 6)))])  # nothing is asked for
