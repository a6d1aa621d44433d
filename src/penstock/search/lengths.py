"""Plans for samples of many lengths: pipelines found for samples of one length that weigh the same, each judged by planning real batches.

    lengths ─► samples of one length a, as many tokens ─► search ─► pipelines ─► batches of the real lengths ─► the fastest

A token costs by how far it attends, so a is the mean of that over the tokens, Σ L² / Σ L. What micro-batches hold, their token budget
and what they recompute is then decided batch by batch; a pipeline counts by the mean time of some batches drawn from the lengths.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import get_args

from penstock.batching.plan import BatchPlan, SampleLengths
from penstock.batching.ways import BatchWays
from penstock.errors import InfeasibleError, InputError
from penstock.models.shapes import Layout
from penstock.plans.plan import MicroBatching, Plan, Predicted
from penstock.plans.precision import chosen_lengths
from penstock.schedules.rules import CHUNKED_SCHEDULE, DEFAULT_SCHEDULE
from penstock.search.engine import search
from penstock.search.progress import Watch
from penstock.search.simplicity import simplest
from penstock.search.space.request import Request

__all__ = ["LengthsChoice", "fixed_padded_s", "search_for_lengths", "usual_ways_s"]

AS_IT_SUITS = BatchWays()

NUM_BATCHES = 4
"""Batches that a pipeline is judged by."""
_TRIED = 64
"""Plans that the search is asked for; most differ in micro-batches or recomputation alone."""
_JUDGED = 12
"""Different pipelines of them, the most promising ones, that are judged."""


@dataclass(frozen=True)
class LengthsChoice:
    """A plan with dynamic micro-batches, and the batches that it was judged by."""

    plan: Plan
    batches: tuple[BatchPlan, ...]
    bounds_s: Callable[[], list[float]]
    """What no micro-batching of each of the batches takes less than."""

    @property
    def time_s(self) -> float:
        """Seconds of an iteration, on average over the batches."""
        return fmean(batch.predicted_s for batch in self.batches)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, padding left out."""
        return self.num_tokens / self.time_s

    @property
    def num_tokens(self) -> float:
        """Tokens of an iteration, padding left out, on average over the batches."""
        return fmean(batch.num_tokens for batch in self.batches)

    @property
    def num_micro_batches(self) -> float:
        """Micro-batches of an iteration, on average over the batches."""
        return fmean(batch.num_micro_batches for batch in self.batches)

    @property
    def padding_share(self) -> float:
        """The share of computed token positions that is padding."""
        return fmean(batch.padding_share for batch in self.batches)

    @property
    def peak_bytes(self) -> float:
        """What the fullest device holds at most, in the worst of the batches."""
        return max(batch.peak_bytes for batch in self.batches)

    @cached_property
    def bound_s(self) -> float:
        """No micro-batching of the same batches on the same pipeline is faster on average; takes a while where samples have two
        lengths, and only for those who ask."""
        return fmean(self.bounds_s())


def search_for_lengths(
    request: Request, samples: Sequence[SampleLengths], *, top: int = 5, time_budget_s: float = math.inf,
    watch: Watch = lambda text, best_s, bound_s: None, judging: Callable[[int, int], None] = lambda done, all_: None, strict: bool = True,
    ways: BatchWays = AS_IT_SUITS,
) -> list[LengthsChoice]:  # fmt: skip
    """The fastest plans for batches of `request.frame.global_batch` such samples, best first; where not `strict`, a simpler one that is as
    fast as costs can tell before them."""
    if not request.model.seq_length:
        raise InputError(f"model '{request.model.name}' takes images, which have no lengths to plan by.")
    batches = list(_drawn(samples, request.frame.global_batch))
    found = search(_of_one_length(request, samples), top=_TRIED, time_budget_s=time_budget_s, watch=watch)
    pipelines = list(_pipelines(request, [choice.plan for choice in found.choices], samples))[:_JUDGED]
    judged: list[LengthsChoice] = []
    reasons: list[InfeasibleError] = []
    for done, plan in enumerate(pipelines):
        judging(done, len(pipelines))
        try:
            judged.append(_judged(plan, batches, request, ways))
        except InfeasibleError as reason:
            reasons.append(reason)
    if not judged:
        raise InfeasibleError(f"none of the {len(pipelines)} pipelines tried can train on these lengths. Of the first: {reasons[0]}")
    judged.sort(key=lambda choice: (choice.time_s, choice.peak_bytes))
    if not strict:
        error = request.estimator.source.error
        judged.insert(0, judged.pop(simplest([choice.plan for choice in judged], [choice.time_s for choice in judged], error)))
    return judged[:top]


def _drawn(samples: Sequence[SampleLengths], count: int) -> Iterator[list[SampleLengths]]:
    """Batches of the samples in some order, again from the start where they do not suffice; the same every time."""
    order = list(samples)
    random.Random(0).shuffle(order)
    for number in range(1 if len(order) == count else NUM_BATCHES):
        taken = (order[(number * count + place) % len(order)] for place in range(count))
        yield [replace(sample, id=place) for place, sample in enumerate(taken)]


def _of_one_length(request: Request, samples: Sequence[SampleLengths]) -> Request:
    """The request with as many tokens in samples of one length, whose number the devices can divide."""
    own, decoder = [sample.length for sample in samples], [sample.dec_length for sample in samples]
    length = _attended(own)
    wanted = request.frame.global_batch * fmean(own) / length
    devices = request.cluster.num_devices
    count = devices * max(1, round(wanted / devices))
    frame = replace(request.frame, global_batch=count, seq_length=length, dec_length=_attended(decoder) if any(decoder) else 0)
    return replace(request, frame=frame)


def _attended(lengths: Sequence[int]) -> int:
    """Σ L² / Σ L, as a multiple of 8."""
    return max(8, 8 * round(sum(length * length for length in lengths) / sum(lengths) / 8))


def _pipelines(request: Request, plans: Sequence[Plan], samples: Sequence[SampleLengths]) -> Iterator[Plan]:
    """The different ways to lay stages on devices, with dynamic micro-batches of the real lengths."""
    from penstock.batching.planned import with_recompute_choices

    seen = set()
    of_one_length = chosen_lengths(request.model, None)[2]
    longest, longest_dec = max(sample.length for sample in samples), max(sample.dec_length for sample in samples)
    layout: Layout = "packed" if "packed" in request.model.layouts else "padded"
    for plan in plans:
        stages = tuple(replace(stage, recompute=()) for stage in plan.stages)
        if stages in seen:
            continue
        seen.add(stages)
        schedule = CHUNKED_SCHEDULE if plan.num_chunks > 1 else DEFAULT_SCHEDULE
        notes = tuple(note for note in plan.notes if note not in of_one_length)
        yield with_recompute_choices(
            replace(plan, stages=stages, global_batch=request.frame.global_batch, seq_length=longest, dec_length=longest_dec,
                    micro_batching=MicroBatching(layout, "dynamic"), schedule=schedule, predicted=None, notes=notes),
            request.model,
        )  # fmt: skip


def _judged(plan: Plan, batches: Sequence[Sequence[SampleLengths]], request: Request, ways: BatchWays) -> LengthsChoice:
    """What batches of a pipeline take; a sample that fits nowhere is an error."""
    from penstock.batching.bounds.columns import FEW_KNOTS
    from penstock.batching.planned import planned_costs
    from penstock.batching.planner import batch_bound_s

    source, limit_bytes = request.estimator.source, request.memory_limit_bytes
    costs = planned_costs(
        plan, request.model, request.cluster, source, plan.seq_length, plan.dec_length, memory_limit_bytes=limit_bytes
    )  # fmt: skip
    costs = ways.limited(costs)
    planned = tuple(ways.planned(batch, costs) for batch in batches)
    choice = LengthsChoice(plan, planned, lambda: [batch_bound_s(batch, costs, FEW_KNOTS) for batch in batches])
    price_per_h = request.cluster.price_usd_per_h
    price = None if price_per_h is None else price_per_h * choice.time_s / 3600
    predicted = Predicted(choice.time_s, source.name, choice.tokens_per_s, price, price_per_h)
    return replace(choice, plan=replace(plan, costs=source.name, predicted=predicted))


def usual_ways_s(request: Request, samples: Sequence[SampleLengths], plan: Plan) -> dict[str, float | None]:
    """What an iteration takes on the stages of `plan` in each usual way to cut batches, on average over those that plans are judged by;
    None where one of them fits in no size."""
    from penstock.batching.baselines import usual_ways
    from penstock.batching.planned import planned_costs

    costs = planned_costs(
        plan, request.model, request.cluster, request.estimator.source, plan.seq_length, plan.dec_length,
        layouts=[layout for layout in get_args(Layout) if layout in request.model.layouts],
        memory_limit_bytes=request.memory_limit_bytes,
    )  # fmt: skip
    found = [usual_ways(batch, costs) for batch in _drawn(samples, request.frame.global_batch)]
    names = dict.fromkeys(name for ways in found for name in ways)
    return {name: fmean(ways[name].predicted_s for ways in found) if all(name in ways for ways in found) else None for name in names}


def fixed_padded_s(request: Request, samples: Sequence[SampleLengths], plan: Plan) -> float | None:
    """What an iteration takes on the stages of `plan` if micro-batches have a fixed number of samples, all padded to the longest of the
    batch, at the number that suits best; on average over the batches that plans are judged by. None where none fits."""
    from penstock.batching.baselines import best_fixed
    from penstock.batching.planned import planned_costs

    costs = planned_costs(
        plan, request.model, request.cluster, request.estimator.source, plan.seq_length, plan.dec_length,
        layouts=("padded",), memory_limit_bytes=request.memory_limit_bytes,
    )  # fmt: skip
    found = [best_fixed(batch, costs) for batch in _drawn(samples, request.frame.global_batch)]
    times_s = [plan.predicted_s for plan in found if plan is not None]
    return fmean(times_s) if len(times_s) == len(found) else None
