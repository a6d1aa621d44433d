"""DynaPipe's figure 17: iterations as planned, and as eight real processes run their programs, in which ops are waits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from penstock.batching.costs import PipelineCosts
from penstock.batching.plan import BatchPlan
from penstock.batching.planned import with_recompute_choices
from penstock.batching.planner import plan_batch
from penstock.batching.workloads import batch_durations_s, batch_workload
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.references import model_of
from penstock.programs.check import require_safe
from penstock.programs.instructions import Program
from penstock.programs.lower import lower
from penstock.programs.work import work_of
from penstock.reproduce.dynapipe_batches import costs_of, drawn_batch
from penstock.reproduce.figures import Drawing, Evidence, FigureSpec, Plotted, at_most
from penstock.systems.dynapipe.tables import open_configuration
from penstock.timing.workload import Workload

if TYPE_CHECKING:
    from penstock.runtime.worker import Worker

__all__ = ["TIMED", "TimedIteration", "iteration_of", "run_iterations"]

_PIPELINES = {"gptA": ("gpt-6.7b", "GPT 6.7B: pp 4, dp 2"), "t5C": ("t5-11b", "T5 11B: tp 2, pp 4")}
"""Configurations of DynaPipe that have a pipeline: our name of the model, and a title."""
_CLUSTER, _LONGEST = "8xa100-40gb", 2048
_TOKENS, _QUICK_TOKENS = (16_384, 32_768, 65_536), (8_192, 16_384)
_ROUNDS = 3
"""How often each iteration runs; the fastest counts, since whatever else the machine does can only delay it."""
_MOST = 0.03


@dataclass(frozen=True)
class TimedIteration:
    """One planned batch, ready to run: the program of each rank, and what passes and transfers take in each replica."""

    programs: tuple[Program, ...]
    workloads: tuple[Workload, ...]
    planned_s: float


def iteration_of(plan: Plan, costs: PipelineCosts, batch: BatchPlan, number: int) -> TimedIteration:
    """Lowers a planned batch to programs that are proven safe."""
    model = model_of(plan)
    times = [batch_durations_s(costs, own.micro_batches, replica) for replica, own in enumerate(batch.replicas)]
    work = [replace(own, durations_s=durations_s) for own, durations_s in zip(work_of(batch, plan), times, strict=True)]
    programs = lower(plan, model, work, number)
    require_safe(programs, plan, model)
    workloads = tuple(batch_workload(costs, own.micro_batches, replica) for replica, own in enumerate(batch.replicas))
    return TimedIteration(programs, workloads, batch.predicted_s)


def run_iterations(worker: Worker, plan: Plan, iterations: Sequence[TimedIteration]) -> list[float]:
    """A job for workers: seconds of each iteration on timed devices, until the last rank is done, by the clock on the wall."""
    from penstock.runtime.devices.timed import TimedRank
    from penstock.runtime.transport.world import World

    world = World(plan, worker.groups)
    rank = TimedRank(world, observer=worker.status)
    programs = [(iteration.programs[world.place], iteration.workloads) for iteration in iterations]
    return [rank.run(program, workloads[program.replica]) for program, workloads in programs]


def _iterations(evidence: Evidence, name: str) -> tuple[Plan, list[TimedIteration]]:
    """Batches of a few sizes under a configuration, and the plan that places its stages on ranks."""
    costs, (_, config) = costs_of(evidence, name), open_configuration(evidence.folder / name)
    plan = uniform_plan(
        _PIPELINES[name][0], _CLUSTER, global_batch=config.dp, micro_batch=1, pp=config.pp, tp=config.tp, replicas=config.dp,
        zero=config.zero,
    )  # fmt: skip
    plan = with_recompute_choices(plan, model_of(plan))
    tokens = _QUICK_TOKENS if evidence.quick else _TOKENS
    batches = [drawn_batch(costs.has_decoder, _LONGEST, size, seed) for size in tokens for seed in range(1 if evidence.quick else 2)]
    return plan, [iteration_of(plan, costs, plan_batch(one.samples, costs), number) for number, one in enumerate(batches)]


def _timed(evidence: Evidence) -> Drawing:
    from penstock.runtime.workers import WorkerPool

    planned = {name: _iterations(evidence, name) for name in _PIPELINES}
    curves, claims = [], []
    with WorkerPool(max(len(plan.ranks) for plan, _ in planned.values())) as workers:
        for name, (plan, iterations) in planned.items():
            title = _PIPELINES[name][1]
            rounds = np.array(workers.run(run_iterations, plan, iterations * _ROUNDS)[0]).reshape(_ROUNDS, -1)
            measured_s = rounds.min(axis=0).tolist()
            planned_s = [iteration.planned_s for iteration in iterations]
            curves.append(Plotted(title, [1e3 * one for one in planned_s], [1e3 * one for one in measured_s]))
            error = fmean(abs(found / said - 1) for found, said in zip(measured_s, planned_s, strict=True))
            claims.append(at_most(f"{title}: mean error of planned iterations", error, _MOST))
    return Drawing(curves, "planned, ms per iteration", "measured on timed ranks, ms per iteration", claims, "points", diagonal=True, note=(
        "Every rank is a process of this machine: programs, messages and the executor are real, but an op is a wait for as long as "
        "DynaPipe's tables say, so errors are those of running what was planned, not of the tables. By the clock on the wall, "
        f"the fastest of {_ROUNDS} rounds: other load on the machine delays them still (load average {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} processors). "
        "DynaPipe's own figure compares with A100s; its values are not published."
    ))  # fmt: skip


TIMED = FigureSpec("17", "figure 17: iterations as planned and as run on timed ranks", _timed, ("configs.json",))
