"""The spaces of simpler searches, from the same costs: what their best plans would be here.

data parallel     one stage, no tensor parallelism, ZeRO 0 to 3
Megatron grid     equal stages, one tp degree inside a node, recompute all or nothing
AMP               equal stages, nothing recomputed; chosen by AMP's own cost model, which takes the average speed of all devices and knows
                  no memory: the first of its ranking that fits
FASOP             equal degrees, stages of any numbers of layers, nothing recomputed; here for one kind of devices
Aceso             stages of any ops on parts of nodes, recomputation of any ops, one pipeline (no replicas), 1F1B
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.plans.build import uniform_stages
from penstock.plans.plan import Plan
from penstock.plans.validity import check_plan
from penstock.schedules.rules import DEFAULT_SCHEDULE
from penstock.search.assemble import assembled, estimated
from penstock.search.choice import Choice
from penstock.search.partition.pipelines import best_pipeline, equal_pipeline
from penstock.search.space.families import MAX_DEPTH, families
from penstock.search.space.request import Request, micro_batch_sizes
from penstock.search.uniform import plans_of_grid
from penstock.timing.iteration_estimate import Estimate

__all__ = ["BASELINES", "Baseline", "amp_s", "best_of"]


@dataclass(frozen=True)
class Baseline:
    """A search space, and its best plan for a request if any fits."""

    name: str
    about: str
    find: Callable[[Request], Choice | None]


def best_of(baseline: Baseline, request: Request) -> Choice | None:
    """The fastest plan of a baseline's space that fits, timed by the clock."""
    found = baseline.find(request if request.asynchronous else replace(request, schedules=(DEFAULT_SCHEDULE,)))
    return None if found is None else found.clocked()


def _fastest(found: Iterable[Choice | None]) -> Choice | None:
    """The fastest of the plans that fit."""
    fitting = [choice for choice in found if choice is not None and choice.estimate.fits]
    return min(fitting, key=lambda choice: choice.estimate.time_s, default=None)


def _best_uniform(request: Request, plans: Iterable[Plan]) -> Choice | None:
    return _fastest(estimated(request, plan, "grid") for plan in plans)


def _data_parallel(request: Request) -> Choice | None:
    frame, count = request.frame, request.cluster.num_devices

    def plans() -> Iterator[Plan]:
        for replicas in [n for n in range(count, 0, -1) if frame.global_batch % n == 0][:1]:
            for zero in (0, 1, 2, 3) if replicas > 1 else (0,):
                stages = uniform_stages(request.model, pp=1, tp=1, replicas=replicas, zero=zero)
                for samples in micro_batch_sizes(frame.global_batch, replicas, request.micro_batches):
                    plan = assembled(frame, stages, samples)
                    if not check_plan(plan, request.model, request.cluster):
                        yield plan

    return _best_uniform(request, plans())


def _megatron(request: Request) -> Choice | None:
    return _best_uniform(request, (plan for plan in plans_of_grid(request) if plan.stages[0].zero <= 1))


def _amp(request: Request) -> Choice | None:
    plans = (plan for plan in plans_of_grid(request) if plan.stages[0].zero <= 1 and not any(stage.recompute for stage in plan.stages))
    ranked = sorted((estimated(request, plan, "grid") for plan in plans), key=lambda choice: amp_s(choice.estimate))
    return next((choice for choice in ranked if choice.estimate.fits), None)


def amp_s(estimate: Estimate) -> float:
    """What AMP would say of a plan: fill and steady state at the average speed, messages in full, and the longest gradient sum."""
    seen = [stage.work.forward_pass_s + stage.work.backward_pass_s for stage in estimate.stages]
    if len({stage.device for stage in estimate.stages}) > 1:
        seen = [sum(seen) / len(seen)] * len(seen)
    messages_s = sum(stage.work.transfer_in_s + stage.work.transfer_out_s for stage in estimate.stages)
    return (estimate.num_micro_batches - 1) * max(seen) + sum(seen) + messages_s + max(stage.sync_s for stage in estimate.stages)


def _fasop(request: Request) -> Choice | None:
    def pipelines() -> Iterator[Choice | None]:
        known_s = math.inf
        for family in families(request):
            for option in family.options:
                deep = family.num_devices // option.num_devices
                if option.dp == 1 and len(family.pools) == 1 and family.num_devices % option.num_devices == 0 and deep <= MAX_DEPTH:
                    yield (found := equal_pipeline(family, option, known_s))
                    known_s = known_s if found is None else found.estimate.time_s

    return _fastest(pipelines())


def _aceso(request: Request) -> Choice | None:
    def pipelines() -> Iterator[Choice | None]:
        known_s = math.inf
        for family in families(request):
            if family.replicas == 1:
                yield (found := best_pipeline(family, known_s))
                known_s = known_s if found is None else found.estimate.time_s

    return _fastest(pipelines())


BASELINES = (
    Baseline("data parallel", "one stage, ZeRO 0 to 3", _data_parallel),
    Baseline("Megatron grid", "equal stages, one tp inside a node, recompute all or none, sequence parallelism, ZeRO-1", _megatron),
    Baseline("AMP", "equal stages, nothing recomputed, by average speeds and without memory: the first that fits", _amp),
    Baseline("FASOP", "equal degrees, any numbers of layers, nothing recomputed", _fasop),
    Baseline("Aceso", "one pipeline of stages of any ops, any ops recomputed", _aceso),
)
