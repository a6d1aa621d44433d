"""Schedules made for the times and bytes of a workload: a device never waits while it has something to do that fits its memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InfeasibleError, InputError, plural
from penstock.schedules.actions import Action, Schedule
from penstock.timing.workload import Integers, Workload

__all__ = ["BACKWARD_FIRST", "First", "Greed", "Weights", "best_greedy", "checked_order", "does_not_fit", "greedy"]

First = Literal["forward", "backward", "alternate"]
Weights = Literal["soon", "last", "for memory"]
_FIRST, _WEIGHTS = get_args(First), get_args(Weights)  # the kernel takes their places in the list
_PATIENCE = (0.0, 0.3)


@dataclass(frozen=True)
class Greed:
    """What a device does first, of all it could do."""

    split: bool = False
    """Input and weight gradients apart: zero-bubble."""
    first: First = "backward"
    """Which of two passes that are ready as early goes first; `alternate`: the one that did not run last."""
    weights: Weights = "last"
    """Weight gradients run right after their input gradients, when nothing else can, or also when a forward pass waits for memory."""
    patience: float = 0.0
    """A device waits for something better to do that comes within this share of what it could do at once."""
    depths: tuple[int, ...] = ()
    """The most micro-batches each stage holds; none given: as many as memory allows."""


BACKWARD_FIRST = Greed()


def greedy(workload: Workload, greed: Greed = BACKWARD_FIRST) -> Schedule:
    """The schedule of one such device policy; no device goes above its limit.

    Raises `InfeasibleError` if not even one micro-batch at a time fits.
    """
    _check(workload, greed)
    found = _feasible(workload, greed, checked_order((), workload.num_micro_batches))
    if found is None:
        raise does_not_fit(workload)
    return _as_schedule(found)


def best_greedy(workload: Workload, order: Sequence[int] = ()) -> Schedule:
    """The shortest of all such schedules, split ones included where the workload has their times."""
    injection = checked_order(order, workload.num_micro_batches)
    fitting = [found for greed in _policies(workload) if (found := _feasible(workload, greed, injection))]
    if not fitting:
        raise does_not_fit(workload)
    return _as_schedule(min(fitting, key=lambda found: found.makespan_s))


class _Found(NamedTuple):
    """A schedule as arrays."""

    actions: NDArray[np.int32]
    bounds: Integers
    makespan_s: float


def _as_schedule(found: _Found) -> Schedule:
    rows = [Action(*row) for row in found.actions.tolist()]
    return tuple(tuple(rows[first:last]) for first, last in pairwise(found.bounds))


def _check(workload: Workload, greed: Greed) -> None:
    if greed.split and not workload.splits:
        raise InputError("greedy: the backward pass is to be split, but durations are of F and B alone. Give all four kinds.")
    if greed.depths and (len(greed.depths) != workload.num_stages or min(greed.depths) < 1):
        raise InputError(f"greedy: depths are {greed.depths}; expected 1 or more for each of {plural(workload.num_stages, 'stage')}.")


def _feasible(workload: Workload, greed: Greed, injection: Integers) -> _Found | None:
    """What the policy gives, with room reserved only where it would get stuck otherwise."""
    return _run(workload, greed, injection, reserve=False) or _run(workload, greed, injection, reserve=True)


def checked_order(order: Sequence[int], count: int) -> Integers:
    """The order of injection as an array; as numbered if none is given."""
    injection = np.array(order if len(order) else range(count), dtype=np.int64)
    if sorted(injection.tolist()) != list(range(count)):
        raise InputError(f"the order of injection {list(order)} does not name each of {plural(count, 'micro-batch')} once.")
    return injection


def _run(workload: Workload, greed: Greed, injection: Integers, reserve: bool) -> _Found | None:
    """What the policy gives; None where memory stops every device."""
    from penstock.ordering.greedy_kernels import GreedLoad, GreedRules, list_schedule

    count, kinds = workload.num_micro_batches, 3 if greed.split else 2
    devices = np.array(workload.devices)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(devices) * count * kinds)]).astype(np.int64)
    actions = np.zeros((int(bounds[-1]), 3), dtype=np.int32)
    depths = np.array(greed.depths or [count] * workload.num_stages, dtype=np.int64)
    load = GreedLoad(
        workload.durations_s, workload.transfers_s, devices, workload.stored_bytes, workload.waiting_bytes, workload.workspace_bytes,
        workload.base_bytes, workload.limit_bytes,
    )  # fmt: skip
    first, weights = _FIRST.index(greed.first), _WEIGHTS.index(greed.weights)
    rules = GreedRules(injection, depths, greed.split, first, weights, greed.patience, reserve)
    written, makespan_s = list_schedule(load, rules, bounds, actions)
    return _Found(actions, bounds, float(makespan_s)) if written == len(actions) else None


def does_not_fit(workload: Workload) -> InfeasibleError:
    """The error that names the micro-batch which alone exceeds a device's limit the most."""
    worst, kinds = (-np.inf, 0, 0, 0.0), len(workload.durations_s)
    for device in range(workload.num_devices):
        own = workload.stages_of(device)
        needed = (
            workload.base_bytes[device] + workload.stored_bytes[own].sum(axis=0) + workload.workspace_bytes[:kinds, own].max(axis=(0, 1))
        )
        m = int(needed.argmax())
        worst = max(worst, (float(needed[m] - workload.limit_bytes[device]), device, m, float(needed[m])))
    _, device, m, held = worst
    return InfeasibleError(
        f"no schedule fits: device {device} needs {held:.4g} bytes for micro-batch {m} alone, its limit is "
        f"{workload.limit_bytes[device]:.4g}. Use smaller micro-batches, recomputation or more stages."
    )


def _policies(workload: Workload) -> Iterator[Greed]:
    """Running ahead as 1F1B, twice as far, or as far as memory allows; what goes first; patient or not; whole or split passes."""
    left = range(workload.num_stages, 0, -1)
    for depths, first, patience in product([tuple(left), tuple(2 * depth for depth in left), ()], _FIRST, _PATIENCE):
        greed = Greed(depths=depths, first=first, patience=patience)
        yield greed
        if workload.splits:
            # pending weight gradients count as held, so that every stage needs the first one's depth to let them wait
            level = tuple(max(depths) for _ in depths)
            yield from (replace(greed, split=True, depths=level, weights=weights) for weights in _WEIGHTS)
