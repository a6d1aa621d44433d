"""What is learnt of the shapes that a unit returns."""

from __future__ import annotations

import torch
from torch import nn

from penstock.models.modules.cutting.shapes import UnitShapes


def test_a_size_that_stays_the_same_is_no_constant() -> None:
    """As a decoder's length beside sources of many."""
    unit, cpu = nn.Linear(4, 4), torch.device("cpu")
    unit.forward = lambda x, source: x * source.mean()  # type: ignore[method-assign]
    shapes = UnitShapes()
    for length, source in ((5, 2), (5, 3), (5, 4), (6, 2), (7, 9)):
        assert shapes.outputs(unit, unit.forward, (torch.ones(length), torch.ones(source)), {}, cpu).shape == (length,)
