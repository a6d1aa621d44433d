"""Plans that a system can express: the fastest that is not refused, from those found or from the grid, each once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from penstock.errors import InfeasibleError
from penstock.plans.plan import Plan
from penstock.search import Outcome, Request, search
from penstock.search.expressible import expressible


@pytest.fixture(scope="module")
def asked() -> tuple[Request, Outcome]:
    request = Request.of("gpt-small", "2xt4", 8, "roofline", 128, (1, 2), math.inf)
    return request, search(request, top=3)


def without_zero(plan: Plan) -> Plan:
    return replace(plan, stages=tuple(replace(stage, zero=0) for stage in plan.stages))


def test_what_is_taken_stays_as_it_was_found(asked: tuple[Request, Outcome]) -> None:
    request, outcome = asked
    kept = expressible(request, outcome.choices, lambda plan: "", 2)
    assert not kept.reason and kept.choices[0].plan == outcome.choices[0].plan
    assert len({(choice.plan.stages, choice.plan.micro_batching) for choice in kept.choices}) == 2


def test_what_is_refused_is_replaced_from_the_grid(asked: tuple[Request, Outcome]) -> None:
    request, outcome = asked

    def refusal(plan: Plan) -> str:
        return "" if plan.num_stages == 2 and len({stage.degrees.tp for stage in plan.stages}) == 1 else "no pipeline of two"

    kept = expressible(request, outcome.choices, refusal, 1)
    assert kept.reason == "no pipeline of two" and kept.choices[0].plan.num_stages == 2
    assert kept.choices[0].estimate.time_s >= outcome.choices[0].estimate.time_s


def test_plans_are_changed_before_they_are_asked_for(asked: tuple[Request, Outcome]) -> None:
    request, outcome = asked
    kept = expressible(request, outcome.choices, lambda plan: "ZeRO" if any(s.zero for s in plan.stages) else "", 1, without_zero)
    assert all(stage.zero == 0 for stage in kept.choices[0].plan.stages) and kept.choices[0].estimate.fits


def test_nothing_is_said_with_the_reason(asked: tuple[Request, Outcome]) -> None:
    request, outcome = asked
    with pytest.raises(InfeasibleError, match="it has no words"):
        expressible(request, outcome.choices, lambda plan: "it has no words", 1)
