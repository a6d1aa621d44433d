"""What a function of somebody's file may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import InputError
from penstock.models.modules.cutting.origins import call_function, made_of


def test_a_module_that_reads_token_ids_may_come_alone() -> None:
    module, example, loss = call_function(lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)), "module:net.py:make")
    assert loss is None and module(*example(2, 3)).shape == (2, 3, 7)
    made = made_of(module, example)
    assert made.vocab == 7


@pytest.mark.parametrize("made", [nn.Linear(2, 2), 3, (nn.Linear(2, 2),)])
def test_anything_else_is_refused(made: Any) -> None:
    with pytest.raises(InputError, match=r"\(torch module, example inputs\) was expected.*may come alone"):
        call_function(lambda: made, "module:net.py:make")


def test_an_example_and_a_loss_are_taken_as_they_are() -> None:
    linear, example = nn.Linear(2, 2), (torch.zeros(1, 2),)
    assert call_function(lambda: (linear, example, len), "module:net.py:make") == (linear, example, len)


@pytest.mark.parametrize(("wrap", "advice"), [(torch.compile, "without torch.compile"), (nn.DataParallel, "its `.module`")])
def test_what_torch_wraps_is_asked_for_as_it_is(wrap: Any, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        made_of(wrap(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))))
