"""The one place where a plan is put together: from stages, their ranks, degrees and recomputed ops, micro-batches and a schedule.

Every searcher ends here. A programme leaves some of the truth out (gradient sync between the very ranks, memory to the byte), so what it
found is estimated whole: in both orders of ranks, and with less of the memory where it was too hopeful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.plans.build import join_ranges
from penstock.plans.plan import Degrees, OpRun, Plan, Stage
from penstock.schedules.rules import DEFAULT_SCHEDULE, SCHEDULES
from penstock.search.choice import Choice

if TYPE_CHECKING:
    from penstock.search.space.families import PlanFamily
    from penstock.search.space.request import Request
    from penstock.search.space.stage_costs import StageOption

__all__ = ["assembled", "best_order", "estimated", "first_fitting", "stage_of"]

MEMORY_SHARES = (1.0, 0.97, 0.93, 0.88)
"""Of the memory, tried in turn where the programme was too hopeful: it prices peaks and reserves, the estimate replays them."""


def stage_of(
    first: int, last: int, option: StageOption, devices: tuple[tuple[int, ...], ...], flags: Sequence[int] | NDArray[np.int8] = (),
    runs: tuple[OpRun, ...] = (),
) -> Stage:  # fmt: skip
    """Ops first..last under an option on the given ranks of each replica; `flags` are 1 for ops that are recomputed, `runs` the ops that
    are divided otherwise."""
    pattern = join_ranges((first + int(at), first + int(at) + 1) for at in np.flatnonzero(flags))
    most_dp = max((option.dp, *(run.dp for run in runs)))
    return Stage(
        first, last, devices=devices, degrees=Degrees(option.tp, option.dp), runs=runs, recompute=(pattern,) if pattern else (),
        zero=option.zero if most_dp * len(devices) > 1 else 0, sequence_parallel=option.sequence,
    )  # fmt: skip


def assembled(frame: Plan, stages: Sequence[Stage], samples: int, schedule: str = DEFAULT_SCHEDULE) -> Plan:
    """The plan of these stages, which know the ranks of every replica, with micro-batches of so many samples."""
    own = schedule if len(stages) > 1 or SCHEDULES[schedule].asynchronous else DEFAULT_SCHEDULE
    return replace(
        frame, stages=tuple(stages), num_replicas=len(stages[0].devices), schedule=own,
        micro_batching=replace(frame.micro_batching, samples=samples),
    )  # fmt: skip


def estimated(request: Request, plan: Plan, kind: str) -> Choice:
    """The plan with everything that is predicted of it."""
    return Choice.of(plan, request.estimator.estimate(plan), kind)


def best_order(family: PlanFamily, kind: str, plan_in: Callable[[bool], Plan]) -> Choice:
    """The plan in the better of two orders of ranks: all stages of a replica side by side, or (`plan_in(True)`) all replicas of a stage.

    The first makes messages between stages fast, the second gradient sync; which matters more the estimate tells.
    """
    orders = (False, True) if family.replicas > 1 else (False,)
    found = [estimated(family.request, plan_in(together), kind) for together in orders]
    return min(found, key=lambda choice: (not choice.estimate.fits, choice.estimate.time_s))


def first_fitting(solve: Callable[[float], Choice | None]) -> Choice | None:
    """What `solve` finds with a share of the memory: the largest with which the estimate agrees that it fits. None if it finds nothing."""
    for share in MEMORY_SHARES:
        if (found := solve(share)) is None or found.estimate.fits:
            return found
    return None
