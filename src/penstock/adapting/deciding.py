"""Whether to move to another plan: the cheapest step that is nearly as good as the best, once it saves more than it costs.

    gain      time of the present plan less that of the other, at the speeds that were measured; below 3 % nothing is done
    saving    gain × the steps for which speeds are expected to stay as they are
    cost      the pause to move there, and the pause to come back
    cool-down steps after a move in which there is no other: 10, and twice as many after each move in a row that did not pay

Speeds are expected to stay as long as they usually did (the median of the last phases between two changes); once a phase has outlived
that, or where there was none before, as long as they have stayed already. So nothing is staked on a disturbance before it has cost about
what moving would, unless disturbances are known to last.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field, replace

from penstock.adapting.ladder import Ladder, Remedy, Rung
from penstock.costs.speeds import Speeds
from penstock.plans.plan import Plan

__all__ = ["Decider", "Decision"]

LEAST_GAIN = 0.03
ADEQUATE = 0.02
"""A step is as good as the best one if its plan is no slower by more than this."""
COOL_DOWN_STEPS = 10
MAX_DOUBLINGS = 6
NUM_PHASES = 4


@dataclass(frozen=True)
class Decision:
    """A decision after a step, with all that it was made from."""

    step: int
    chosen: Remedy
    """What would be done, or `nothing`."""
    moves: bool
    """Whether it is done now."""
    reason: str
    """The arithmetic in words."""
    gain_s: float = 0.0
    expected_steps: int = 0
    """For how long speeds are expected to stay."""
    cost_s: float = 0.0
    """Both pauses."""
    alternatives: tuple[Remedy, ...] = ()


@dataclass
class Decider:
    """Decides for one run. All ranks that ask it the same come to the same decision."""

    ladder: Ladder
    plan: Plan
    speeds: Speeds = field(default_factory=Speeds)
    left: list[Plan] = field(default_factory=list)
    """Plans that the run has had and could come back to."""
    _phases: deque[int] = field(default_factory=lambda: deque(maxlen=NUM_PHASES))
    _since: int = 0
    _moved: int = -(10**9)
    """The step of the last move."""
    _unpaid: int = 0
    """Moves in a row that cost more than they saved."""
    _balance_s: float = 0.0
    """What the last move has saved so far, less what it cost."""
    _before: Plan | None = None
    _options: tuple[Remedy, ...] = ()
    _last_gain_s: float = 0.0
    _refused: list[tuple[Plan, str]] = field(default_factory=list)
    """Plans that could not be moved to at these speeds, and why."""

    def changed(self, speeds: Speeds, since: int) -> None:
        """Speeds are others since step `since`: a phase has ended."""
        if since > self._since:
            self._phases.append(since - self._since)
        self._since = max(self._since, since)
        self._refused.clear()
        self.refined(speeds)

    def refined(self, speeds: Speeds) -> None:
        """Speeds are known better than before, but have not changed: the phase goes on."""
        self.speeds = speeds
        self._options = ()
        if self._before is not None:
            self._last_gain_s = self.ladder.time_s(self._before, speeds) - self.ladder.time_s(self.plan, speeds)

    def decide(self, step: int) -> Decision:
        """What to do after step `step`."""
        self._balance_s += self._last_gain_s
        if not (self.speeds.ranks or self.speeds.links or self.left or self.plan.micro_batching.made_for_slow):
            return Decision(step, Remedy(Rung.NOTHING, self.plan, 0.0), False, "nothing is slow")
        if not self._options:
            found = self.ladder.options(self.plan, self.speeds, self.left)
            self._options = tuple(replace(one, refused=one.refused or self._why_not(one.plan)) for one in found)
        present, chosen = self._options[0], _cheapest_adequate(self._options)
        gain_s = present.time_s - chosen.time_s
        expected, cost_s = self._expected_steps(step), 2 * chosen.pause_s
        ready = self._moved + self._cool_down()
        if chosen.rung is Rung.NOTHING or gain_s < LEAST_GAIN * present.time_s:
            moves, reason = False, f"the best other plan would gain {gain_s / present.time_s:.1%}, less than {LEAST_GAIN:.0%}"
        elif gain_s * expected < cost_s:
            told = f"{gain_s:.3g} s a step for {expected} expected steps would save {gain_s * expected:.3g} s"
            moves, reason = False, f"{told}, less than the {cost_s:.3g} s of moving there and back"
        elif step < ready:
            moves, reason = False, f"the last move was after step {self._moved}; the next may be after step {ready}"
        else:
            told = f"{gain_s:.3g} s a step for {expected} expected steps save {gain_s * expected:.3g} s"
            moves, reason = True, f"{told}, moving there and back costs {cost_s:.3g} s"
        return Decision(step, chosen, moves, reason, gain_s, expected, cost_s, self._options)

    def _expected_steps(self, step: int) -> int:
        elapsed = max(1, step - self._since + 1)
        usual = int(statistics.median(self._phases)) if self._phases else 0
        return usual - elapsed if usual > 2 * elapsed else elapsed

    def _cool_down(self) -> int:
        """Steps without a move after the last; the move counts as unpaid as long as it is."""
        unpaid = self._unpaid if self._balance_s >= 0 else self._unpaid + 1
        return COOL_DOWN_STEPS * 2 ** min(max(0, unpaid - 1), MAX_DOUBLINGS) if self._before is not None else 0

    def _why_not(self, plan: Plan) -> str:
        return next((reason for other, reason in self._refused if other == plan), "")

    def refuse(self, decision: Decision, reason: str) -> None:
        """The decision could not be carried out; it is not taken again before speeds change."""
        self._refused.append((decision.chosen.plan, reason))
        self._options = ()

    def adopted(self, decision: Decision) -> None:
        """The decision was carried out."""
        if self._before is not None:
            self._unpaid = 0 if self._balance_s >= 0 else self._unpaid + 1
        self._before, self.plan = self.plan, decision.chosen.plan
        self.left = [plan for plan in self.left if plan != self.plan][-3:]
        if self._before not in self.left:
            self.left.append(self._before)
        self._moved, self._balance_s, self._last_gain_s = decision.step, -decision.chosen.pause_s, decision.gain_s
        self._options = ()


def _cheapest_adequate(options: tuple[Remedy, ...]) -> Remedy:
    """The first option that can be done and is slower than the best by no more than `ADEQUATE`."""
    possible = [option for option in options if not option.refused]
    best_s = min(option.time_s for option in possible)
    return next(option for option in possible if option.time_s <= (1 + ADEQUATE) * best_s)
