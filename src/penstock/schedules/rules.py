"""The pipeline schedules: one record each, read by search, timing, plans, programs, the command line and the exporters.

A new schedule is one record here, the function that gives its order (see `orders`), and its test. Nothing else names schedules: other
files ask a record for what they need to know (`SCHEDULES[plan.schedule].splits_backward`), never for its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from penstock.errors import InputError, near_misses, plural
from penstock.schedules.actions import Schedule
from penstock.schedules.in_flight import all_held, as_many_as_groups, as_stages_left, by_chunk
from penstock.schedules.interleaved import interleaved
from penstock.schedules.orders import gpipe, one_forward_one_backward
from penstock.schedules.zero_bubble import zero_bubble

__all__ = [
    "ASYNCHRONOUS_SCHEDULES", "CHUNKED_SCHEDULE", "DEFAULT_SCHEDULE", "SCHEDULES", "SEARCHED_SCHEDULES", "ScheduleRules", "schedule_of",
    "unchunked",
]  # fmt: skip


_ENOUGH, _MOST_BATCHES = 200, 10
"""Micro-batches beside which filling and draining a pipeline counts for little; and global batches that run without a break at most."""


@dataclass(frozen=True)
class ScheduleRules:
    """All that is particular to a schedule. A device group runs one stage, or with `chunked` several.

    `pipeline_s` is one formula for all: an order with another bubble than 1F1B's, less `fill_relief` and chunks, needs a term of its own
    there (a test holds it against the clock). The search cuts stages for what 1F1B or ZB-H1 hold, so an order that holds more is best
    left to plans that name it: `searched=False`.
    """

    name: str
    """As plan files and commands have it."""
    about: str
    """One line for people, as `penstock check` shows it."""
    order: Callable[[int, int, int], Schedule]
    """(device groups, chunks of each, micro-batches) → the actions of each group."""
    in_flight: Callable[[int, int, int, int], tuple[int, ...]]
    """(device groups, group, micro-batches, chunks) → the most micro-batches whose activations each chunk of that group holds."""
    fill_relief: int = 0
    """How many times a stage's weight gradients of one micro-batch run while the pipeline fills and drains, at most; see `pipeline_s`."""
    min_groups: int = 1
    """Device groups that it needs."""
    chunked: bool = False
    """Whether every group has several stages."""
    splits_backward: bool = False
    """Whether weight gradients are a pass of their own."""
    recomputes: bool = True
    """Whether ops may be recomputed."""
    searched: bool = True
    """Whether the search chooses it; any valid plan may name it."""
    asynchronous: bool = False
    """Whether a stage updates its weights after every micro-batch; forward passes already run keep those that they used."""

    def window(self, num_groups: int, num_micro_batches: int) -> int:
        """Global batches of so many micro-batches that run without a break between them, where nothing asks for one: of asynchronous
        schedules enough for filling and draining the pipeline to count for little, and no more, for all of them are in memory."""
        return _window(num_groups, num_micro_batches) if self.asynchronous else 1

    @property
    def plain(self) -> bool:
        """Whole forward and backward passes of one stage per group, one update for all: orders that fit any lengths can replace it."""
        return self.whole_passes and not self.chunked

    @property
    def whole_passes(self) -> bool:
        """Whole forward and backward passes, one update for all: micro-batches of any lengths can run in it."""
        return not (self.splits_backward or self.asynchronous)

    def pipeline_s(
        self, times_s: Sequence[float], num_micro_batches: int, num_chunks: int = 1, weight_s: Sequence[float] = ()
    ) -> float:
        """Time of one replica from the first forward to the last backward pass by closed formula.

        t is what each device group takes for one micro-batch (both passes, messages and all its chunks included), w its weight
        gradients alone. The slowest group is never idle between its first and its last micro-batch; the others add the time to reach
        it and to come back, less what of their weight gradients fits there:

            micro-batches · max(t) + Σ others max(0, t - relief · w) / chunks

        Asynchronous schedules fill and drain once in a `window` of several global batches, of which one is timed here.

        The relief is `fill_relief` from as many micro-batches as groups on. With one micro-batch only the drain can be filled, relief 1;
        each further one fills the way to one more group (exactly so for equal groups, as the clock shows).

        >>> SCHEDULES["1f1b"].pipeline_s([1.0, 2.0, 1.0], num_micro_batches=4)
        10.0
        """
        slowest = max(range(len(times_s)), key=lambda group: times_s[group])
        weights = weight_s if self.fill_relief else [0.0] * len(times_s)
        filled = min(1.0, (num_micro_batches - 1) / max(len(times_s) - 1, 1))
        relief = 1 + (self.fill_relief - 1) * filled if self.fill_relief else 0.0
        fill_s = sum(max(0.0, times_s[group] - relief * weights[group]) for group in range(len(times_s)) if group != slowest)
        window = self.window(len(times_s), num_micro_batches)
        return num_micro_batches * times_s[slowest] + fill_s / (num_chunks if self.chunked else window)


def _window(num_groups: int, num_micro_batches: int) -> int:
    return 1 if num_groups == 1 else min(_MOST_BATCHES, -(-_ENOUGH // num_micro_batches))


def _in_window(num_groups: int, group: int, num_micro_batches: int, num_chunks: int = 1) -> tuple[int, ...]:
    """One micro-batch for each stage that is left, of other global batches too."""
    return as_stages_left(num_groups, group, _window(num_groups, num_micro_batches) * num_micro_batches, num_chunks)


_RULES = (
    ScheduleRules(
        "1f1b", "One forward, one backward in turn once the pipeline is full; a stage holds as many micro-batches as stages are left.",
        lambda groups, chunks, count: one_forward_one_backward(groups, count), as_stages_left,
    ),
    ScheduleRules(
        "gpipe", "All forward passes, then all backward passes: as fast as 1F1B, with all activations held at once.",
        lambda groups, chunks, count: gpipe(groups, count), all_held, searched=False,
    ),
    ScheduleRules(
        "interleaved", "1F1B with several chunks of the model on each device group, so that the pipeline fills in shorter steps.",
        interleaved, by_chunk, min_groups=2, chunked=True,
    ),
    ScheduleRules(
        "zero-bubble", "1F1B with weight gradients apart, run where devices would be idle (ZB-H1, Qi et al., 2024); recomputes nothing.",
        lambda groups, chunks, count: zero_bubble(groups, count), as_many_as_groups,
        # A stage's bubble shrinks from F + I + W to F + I - W: one W fills the drain, another need not be waited for.
        fill_relief=2, min_groups=2, splits_backward=True,
        # A split backward pass keeps a linear op's input for its second half, so that recomputing would save nothing.
        recomputes=False,
    ),
    ScheduleRules(
        # Differs from 1F1B in when weights are updated, not in the order of passes, and learns otherwise than one process does.
        "pipedream", "1F1B whose stages update after every micro-batch and keep older weights for passes under way: for comparisons.",
        lambda groups, chunks, count: one_forward_one_backward(groups, count), _in_window, searched=False, asynchronous=True,
    ),
)  # fmt: skip

SCHEDULES = {rules.name: rules for rules in _RULES}
DEFAULT_SCHEDULE = _RULES[0].name
"""Valid for every pipeline, so that any other can be replaced by it."""
CHUNKED_SCHEDULE = next(rules.name for rules in _RULES if rules.chunked)
"""The one that the search cuts chunks for."""
SEARCHED_SCHEDULES = tuple(rules.name for rules in _RULES if rules.searched)
ASYNCHRONOUS_SCHEDULES = tuple(rules.name for rules in _RULES if rules.asynchronous)
"""Searched where they alone are asked for: what they learn is not what the others do."""


def schedule_of(name: str, num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """The order of the schedule of this name; a chunked one puts `num_chunks` of the stages on each device group."""
    if name not in SCHEDULES:
        raise InputError(f"schedule '{name}' has no fixed order. {near_misses(name, SCHEDULES)}")
    chunks = num_chunks if SCHEDULES[name].chunked else 1
    if chunks < 1 or num_stages % chunks:
        raise InputError(f"schedule '{name}': {plural(num_stages, 'stage')} cannot be {plural(chunks, 'chunk')} on each device.")
    return SCHEDULES[name].order(num_stages // chunks, chunks, num_micro_batches)


def unchunked(names: Collection[str]) -> list[str]:
    """Of these schedules those with one stage per device group, which the same search serves; those that split backward passes first,
    since what they find is shorter and makes the rest of the search quicker."""
    return sorted((name for name in names if not SCHEDULES[name].chunked), key=lambda name: not SCHEDULES[name].splits_backward)
