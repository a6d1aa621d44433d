"""When to move: gains, pauses, expectations and cool-downs by hand, and a short form of the simulated runs of `benchmarks/adapting.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmark_modules import load_benchmark

from penstock.adapting.deciding import Decider, Decision
from penstock.adapting.ladder import Remedy, Rung
from penstock.costs.speeds import Speeds
from penstock.plans.plan import MicroBatching, Plan, Stage

HOME = Plan("gpt-350m", "2xcpu", 8, (Stage(0, 4, ((0,),)), Stage(4, 8, ((1,),))), MicroBatching(samples=1))
OTHER = replace(HOME, stages=(Stage(0, 6, ((0,),)), Stage(6, 8, ((1,),))))
SLOW = Speeds.of({1: 2.0})


class Table:
    """A ladder of two plans: HOME takes 1 s or `slow_s`, OTHER always `other_s`; a move takes `pause_s`."""

    def __init__(self, slow_s: float = 1.5, other_s: float = 1.1, pause_s: float = 1.0) -> None:
        self.slow_s, self.other_s, self.pause_s = slow_s, other_s, pause_s

    def time_s(self, plan: Plan, speeds: Speeds) -> float:
        return self.other_s if plan == OTHER else self.slow_s if speeds.ranks else 1.0

    def options(self, plan: Plan, speeds: Speeds, known: Any = ()) -> tuple[Remedy, ...]:
        new = OTHER if plan == HOME else HOME
        return (Remedy(Rung.NOTHING, plan, self.time_s(plan, speeds)), Remedy(Rung.CUTS, new, self.time_s(new, speeds), self.pause_s, 100))


def decider(**more: float) -> Decider:
    return Decider(Table(**more), HOME)  # type: ignore[arg-type]


def test_nothing_is_done_while_nothing_is_slow() -> None:
    decision = decider().decide(100)
    assert not decision.moves and decision.chosen.rung is Rung.NOTHING and decision.reason == "nothing is slow"


def test_an_undisturbed_run_looks_for_no_plans() -> None:
    own = decider()
    own.ladder.options = None  # type: ignore[assignment,method-assign]
    assert not any(own.decide(step).moves for step in range(5))


def test_a_gain_below_three_per_cent_is_left() -> None:
    own = decider(slow_s=1.12)
    own.changed(SLOW, 10)
    assert not any(own.decide(step).moves for step in range(10, 500))


def test_without_experience_a_move_waits_until_the_loss_is_worth_it() -> None:
    """0.4 s a step against two pauses of 0.9 s: after five steps, if speeds stay as long as they have."""
    own = decider(pause_s=0.9)
    own.changed(SLOW, 0)
    assert [own.decide(step).moves for step in range(8)] == [False] * 4 + [True] * 4
    decision = own.decide(4)
    assert decision.gain_s == pytest.approx(0.4) and decision.expected_steps == 5 and decision.cost_s == 1.8
    assert "0.4 s a step for 5 expected steps save 2 s" in decision.reason
    assert [option.rung for option in decision.alternatives] == [Rung.NOTHING, Rung.CUTS]


def test_with_experience_a_move_is_made_at_once_or_not_at_all() -> None:
    """Phases that last a hundred steps are worth moving for from the first; phases of four never are."""
    own = decider()
    own.changed(SLOW, 100)
    assert own.decide(102).moves
    short = decider()
    for step in range(4, 40, 4):
        short.changed(SLOW if step % 8 else Speeds(), step)
        assert not short.decide(step + 2).moves and not short.decide(step + 3).moves


def test_speeds_are_expected_to_stay_for_what_is_left_of_a_usual_phase() -> None:
    """Of a hundred steps; once half of them are over, for as long as they have stayed."""
    own = decider()
    own.changed(SLOW, 100)
    assert [own.decide(step).expected_steps for step in (100, 110, 148, 149, 400)] == [99, 89, 51, 50, 301]
    own.changed(Speeds.of({1: 3.0}), 95)  # of another rank, and told later: no phase of less than nothing
    assert own.decide(110).expected_steps == 89


def test_the_first_move_is_followed_by_ten_steps_without_another() -> None:
    """Whether or not it has paid by then."""
    own = decider(pause_s=0.01)
    own.changed(SLOW, 100)
    assert moved(own, 120).step == 120
    own.changed(Speeds(), 121)
    own._phases.extend([1000] * 4)  # so that nothing but the cool-down holds it back
    assert next(step for step in range(121, 140) if own.decide(step).moves) == 130


def test_an_adequate_step_that_is_cheaper_is_taken() -> None:
    """Shares are one per cent slower than cuts and need no pause."""

    class Shares(Table):
        def options(self, plan: Plan, speeds: Speeds, known: Any = ()) -> tuple[Remedy, ...]:
            nothing, cuts = super().options(plan, speeds, known)
            return nothing, Remedy(Rung.SHARES, replace(OTHER, notes=("shares",)), cuts.time_s * 1.01), cuts

    own = Decider(Shares(), HOME)  # type: ignore[arg-type]
    own.changed(SLOW, 10)
    decision = own.decide(10)
    assert decision.moves and decision.chosen.rung is Rung.SHARES and decision.cost_s == 0.0


def test_a_refused_step_is_not_taken() -> None:
    class Refusing(Table):
        def options(self, plan: Plan, speeds: Speeds, known: Any = ()) -> tuple[Remedy, ...]:
            nothing, cuts = super().options(plan, speeds, known)
            return nothing, replace(cuts, refused="no room")

    own = Decider(Refusing(), HOME)  # type: ignore[arg-type]
    own.changed(SLOW, 10)
    assert own.decide(400).chosen.rung is Rung.NOTHING


def moved(own: Decider, step: int) -> Decision:
    decision = own.decide(step)
    assert decision.moves
    own.adopted(decision)
    return decision


def test_moves_that_do_not_pay_make_the_next_one_wait_longer() -> None:
    """The load ends as soon as the run has moved for it, and comes back as soon as the run is back."""
    own = decider(other_s=1.4, slow_s=2.2)
    waits, step = [], 0
    for turn in range(6):
        own.changed(SLOW if turn % 2 == 0 else Speeds(), step)
        own._phases.extend([1000] * 4)  # phases are believed to last, so that only the cool-down holds moves back
        begun = step
        while not own.decide(step).moves:
            step += 1
        own.adopted(own.decide(step))
        waits.append(step - begun)
        step += 1
    assert waits[0] == 0 and waits[-1] > waits[1] >= 8


def test_a_move_that_paid_starts_anew() -> None:
    own = decider()
    own.changed(SLOW, 100)
    first = moved(own, 105)
    own.refined(SLOW)
    assert own.plan == OTHER and own.left == [HOME] and first.chosen.plan == OTHER
    for step in range(106, 300):
        own.decide(step)
    own.changed(Speeds(), 300)
    assert moved(own, 301).chosen.plan == HOME and own._unpaid == 0


def test_a_move_that_saves_less_than_its_pause_has_not_paid() -> None:
    """0.4 s a step for three steps, against a pause of 2 s; for thirty steps it pays."""
    for steps, unpaid in ((3, 1), (30, 0)):
        own = decider(pause_s=2.0)
        own.changed(SLOW, 100)
        moved(own, 105)
        for step in range(106, 106 + steps):
            own.decide(step)
        own.adopted(replace(own.decide(106 + steps), chosen=Remedy(Rung.CUTS, HOME, 1.0)))
        assert own._unpaid == unpaid


def test_what_a_move_saves_is_known_better_as_speeds_are() -> None:
    """The load is over, and the plan that the run has left would be faster by now: every step costs what was saved before."""
    own = decider(pause_s=0.0)
    own.changed(SLOW, 100)
    moved(own, 105)
    assert own._last_gain_s == pytest.approx(0.4)
    own.refined(Speeds())
    assert own._last_gain_s == pytest.approx(-0.1)


def test_what_was_refused_may_be_tried_again_once_speeds_are_others() -> None:
    own = decider()
    own.changed(SLOW, 100)
    own.refuse(own.decide(400), "no room just now")
    assert own.decide(401).chosen.rung is Rung.NOTHING
    own.changed(Speeds.of({1: 2.5}), 410)
    assert own.decide(800).chosen.rung is Rung.CUTS


def test_a_gain_of_less_than_three_per_cent_is_not_worth_what_costs_cannot_tell() -> None:
    """However long speeds stay, and though moving costs nothing."""
    own = decider(slow_s=1.13, pause_s=0.0)
    own.changed(SLOW, 0)
    own._phases.extend([10**6] * 4)
    decision = own.decide(10)
    assert not decision.moves and decision.gain_s == pytest.approx(0.03) and "less than 3%" in decision.reason


def test_the_last_few_plans_may_come_back() -> None:
    """All of a long run's would make every decision slower than the one before."""
    own = decider()
    for number in range(9):
        plan = replace(OTHER, notes=(str(number),))
        own.adopted(Decision(number, Remedy(Rung.CUTS, plan, 1.0), True, ""))
    assert [plan.notes for plan in own.left] == [("4",), ("5",), ("6",), ("7",)]


def test_a_simulated_run_is_nearly_as_good_as_one_that_knew() -> None:
    """Rank 3 of eight is twice as slow from step 60 to 160, and then well again."""
    benchmark = load_benchmark("adapting")
    factors = np.ones((260, 8))
    factors[60:160, 3] = 2.0
    story = benchmark.told(factors)
    assert 1 <= story.num_moves <= 3  # a plan that is nearly as good for both is kept
    assert story.clairvoyant_s[60:160].sum() >= 0.9 * story.ours_s[60:160].sum()
    assert story.clairvoyant_s[-50:].sum() >= 0.97 * story.ours_s[-50:].sum()
    assert story.clairvoyant_s.sum() <= story.ours_s.sum() < 0.85 * story.static_s.sum()
