"""What plans are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.plans.build import uniform_plan
from penstock.plans.telling import model_title

PLAN = uniform_plan("gpt-tiny", "1xcpu", global_batch=4, micro_batch=1)


@pytest.mark.parametrize(
    ("model", "title"),
    [
        ("gpt-tiny", "gpt-tiny"), ({"base": "gpt-tiny", "name": "mine", "layers": 2}, "mine"), ({"base": "gpt-tiny"}, "gpt-tiny"),
        ({"family": "gpt"}, "gpt"), ({}, "a model"),
    ],
)  # fmt: skip
def test_a_model_is_called_by_its_name_or_what_it_is_a_variant_of(model: str | dict[str, Any], title: str) -> None:
    assert model_title(replace(PLAN, model=model)) == title
