"""Searches for asynchronous plans: updates count for every micro-batch, kept weights count as memory, and nothing else is offered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cli.export import refusal_of
from penstock.cli.search_options import parse_schedules
from penstock.errors import InputError
from penstock.models.shapes import Shape
from penstock.plans.capabilities import unsupported
from penstock.plans.plan import Degrees, Stage
from penstock.search import Request
from penstock.search.assemble import assembled
from penstock.search.engine import search
from penstock.search.expressible import expressible
from penstock.search.space.families import families
from penstock.search.space.stage_costs import StageOption

ASKED = ("vgg16", "2xp3.2xlarge", 32, "roofline", None)


def request_of() -> Request:
    return Request.of(*ASKED, (2,), float("inf"), ("pipedream",))


def every_plan(request: Request) -> list[tuple[float, bool]]:
    """(time, whether it fits) of all plans of one or two devices, recomputation aside."""
    ops, found = request.model.num_ops, []
    cuts = [(Stage(0, cut, ((0,),)), Stage(cut, ops, ((1,),))) for cut in range(1, ops)]
    for stages in (*cuts, (Stage(0, ops, ((0, 1),), Degrees(1, 2)),)):
        estimate = request.estimator.estimate(assembled(request.frame, stages, 2, "pipedream"))
        found.append((estimate.formula_s, estimate.fits))
    return found


def test_the_best_plan_is_that_of_trying_all() -> None:
    request = request_of()
    outcome = search(request)
    assert outcome.formula_s == pytest.approx(min(time_s for time_s, _ in every_plan(request)), rel=1e-9)
    assert outcome.bound_s <= outcome.formula_s <= 1.03 * outcome.bound_s
    for choice in outcome.choices:
        assert choice.plan.schedule == "pipedream" and choice.plan.precision == "fp32" and not unsupported(choice.plan, request.model)
    # An update of all weights with every micro-batch is what makes its stages slower than the same under 1F1B.
    plain = request.estimator.estimate(replace(outcome.choices[0].plan, schedule="1f1b"))
    assert all(one.work.total_s < own.work.total_s for one, own in zip(plain.stages, outcome.choices[0].estimate.stages, strict=True))


def test_older_weights_need_memory() -> None:
    """With k micro-batches under way a stage holds k versions of its weights, the state among them."""
    asynchronous, plain = (
        next(iter(families(replace(request_of(), schedules=names)))).prices.costs(StageOption(1, 1, 1, zero=0))
        for names in (("pipedream",), ("1f1b",))
    )
    versions = asynchronous.kept - plain.kept
    assert versions.sum() == 4 * rank_parameters_of_vgg() and asynchronous.weights == pytest.approx(plain.weights - versions)


def rank_parameters_of_vgg() -> float:
    return sum(place.op.parameters.at(Shape(1)) for place in request_of().model.ops)


def test_asynchronous_schedules_are_searched_alone() -> None:
    assert parse_schedules("pipedream") == ["pipedream"]
    with pytest.raises(InputError, match="Search for it alone"):
        parse_schedules("1f1b,pipedream")
    tied = Request.of("bert-large", "2xv100-16gb", 8, "roofline", None, (), float("inf"), ("pipedream",))
    assert any("tied: false" in note for note in tied.frame.notes) and tied.frame.precision == "fp32"


def test_dynpipe_gets_a_plan_cut_where_its_blocks_end() -> None:
    """A BERT layer ends after its norm for us and before it for DynPipe: cuts move to where both can have them, at hardly any cost."""
    request = Request.of("bert-large", "4xp3.2xlarge", 64, "roofline", None, (4,), float("inf"), ("pipedream",))
    fastest = search(request, prove=False).choices
    kept = expressible(request, fastest, lambda plan: refusal_of(plan, "dynpipe"), 1)
    assert "inside a block" in kept.reason and kept.choices[0].plan.num_stages == 4
    assert kept.choices[0].estimate.time_s <= 1.02 * fastest[0].estimate.time_s
