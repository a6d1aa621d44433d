"""What plans are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.plans.build import uniform_plan
from penstock.plans.telling import model_title, short_name

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


def test_a_plan_is_called_by_how_it_divides_the_work() -> None:
    """Data parallelism is that of replicas and of samples of a micro-batch together; levels and recomputation are those of any stage."""
    sizes = {"global_batch": 64, "micro_batch": 2}
    wide = uniform_plan("gpt-tiny", "16xa100-40gb", pp=2, tp=2, dp=2, replicas=2, zero=1, **sizes)
    chunked = uniform_plan("gpt-tiny", "2xa100-40gb", pp=2, chunks=2, schedule="interleaved", **sizes)
    assert [short_name(plan) for plan in (PLAN, wide, chunked)] == ["one device", "PP 2 × TP 2 × DP 4 + ZeRO-1", "PP 2, interleaved"]
    halves = replace(wide, stages=(replace(wide.stages[0], zero=0), replace(wide.stages[1], recompute=(((17, 25),),))))
    assert short_name(halves) == "PP 2 × TP 2 × DP 4 + ZeRO-1, recomputing"
