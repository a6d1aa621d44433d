"""The one message after each program: what one process says, all know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.plans.build import uniform_plan
from penstock.runtime.request import EvalRecord
from penstock.runtime.steps.agreeing import Agreed, Order, agree, broadcast_plan
from penstock.runtime.steps.messages import StepMessage
from penstock.runtime.telemetry.figures import RankFigures
from penstock.runtime.telemetry.steps import StepRecord

PLAN = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4, pp=2)
MEMBERS = 0, 3


def groups_of(own: int, other: torch.Tensor, order: bytes = b"") -> Any:
    """The groups of process 0 or 3 of two, of which the other sends what is given."""
    sent: list[torch.Tensor] = []

    def gather(values: torch.Tensor) -> torch.Tensor:
        sent.append(values)
        return torch.stack([values, other] if own == 0 else [other, values])

    return SimpleNamespace(gather=gather, broadcast=lambda message, size: (message or order)[:size], sent=sent)


def agreed(own: int, words: list[StepMessage], other: list[StepMessage], order: Order | None = None) -> Agreed:
    """What process `own` concludes, while the other says `other`, and has the order if it is the first."""
    here, there = (order, b"") if own == 0 else (None, b"" if order is None else order.packed())
    rows = torch.tensor([word.row() for word in other], dtype=torch.float64)
    groups = groups_of(own, rows, there)
    found = agree(groups, MEMBERS, words, here)
    assert len(groups.sent) == 1  # however many steps
    return found


def test_what_each_says_of_every_step_is_known_to_all() -> None:
    mine = [StepMessage(samples=3), StepMessage(samples=4, figures=RankFigures(3.0, 2.0, 0.5, 0.25, 7.0), copied=9.0)]
    record = StepRecord(4, 5.5, 0.1, 100, 1000.0, skipped=True)
    its = [StepMessage(samples=7), StepMessage(samples=8, record=record, evaluated=EvalRecord(5, 2.5, 0.125), copied=4.0)]
    found = agreed(0, mine, its)
    assert found.messages == ({0: mine[0], 3: its[0]}, {0: mine[1], 3: its[1]})
    assert agreed(3, its, mine).messages == found.messages
    assert found.safe_copy == 4.0 and found.order is None


@pytest.mark.parametrize("exact", [False, True])
def test_a_plan_that_the_first_process_orders_goes_to_all(exact: bool) -> None:
    order = Order(PLAN, exact)
    assert agreed(0, [StepMessage()], [StepMessage()], order).order == order
    assert agreed(3, [StepMessage()], [StepMessage(order_bytes=len(order.packed()))], order).order == order


@pytest.mark.parametrize("own", [0, 3])
def test_any_of_them_ends_all(own: int) -> None:
    hurt = StepMessage(lost_store=True, asked_to_end=15)
    for calm, hit in (([StepMessage()], [hurt]), ([hurt], [StepMessage()])):
        found = agreed(own, calm, hit)
        assert found.has_lost_store and found.ended_by == 15
    assert not agreed(own, [StepMessage()], [StepMessage()]).has_lost_store


def test_a_node_that_leaves_ends_nobody_else() -> None:
    found = agreed(0, [StepMessage()], [StepMessage(asked_to_end=-15)])
    assert (found.ended_by, found.leaving) == (0, (3,))


@pytest.mark.parametrize(("due", "busy"), [((1, 0), (0, 0)), ((0, 0), (0, 0)), ((1, 0), (0, 1)), ((1, 0), (1, 0))])
def test_a_checkpoint_is_due_when_none_is_still_written(due: tuple[int, int], busy: tuple[int, int]) -> None:
    mine, its = ([StepMessage(is_due=bool(d), is_saving=bool(b))] for d, b in zip(due, busy, strict=True))
    found = agreed(0, mine, its)
    assert found.is_due == (any(due) and not any(busy)) and found.is_saving == any(busy)


@pytest.mark.parametrize("plan", [PLAN, None])
def test_a_plan_of_the_first_process_alone(plan: Any) -> None:
    message = b"" if plan is None else Order(plan).packed()
    assert broadcast_plan(groups_of(0, torch.tensor([0])), plan) == plan
    assert broadcast_plan(groups_of(3, torch.tensor([len(message)]), message), None) == plan
