"""Proves that programs stay within the memory of their devices: what each holds is followed instruction by instruction.

level │            ┌─F─┐                 ┌─B─┐           what a pass adds at its fullest moment
      │        ┌───┘   └──────────── …───┘   └──┐        held by each micro-batch, from its forward pass to the end of B or W
      │ fixed ─┘                                └─ …     weights, gradients, optimizer state, buffers of messages and gradients

By the same bytes as the estimate that the search goes by, so that what fits there fits here; but in the order of the instructions, with the
shape and the recomputation of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from penstock.costs.memory import SLACK, MemoryBreakdown
from penstock.costs.roofline import Roofline
from penstock.costs.sources import open_costs
from penstock.errors import InfeasibleError, ProfileMissingError, plural
from penstock.models.micro_batch import MicroBatch
from penstock.plans.degrees import parts_of
from penstock.programs import instructions as i
from penstock.programs.lower import lower
from penstock.programs.problems import Problem, picture
from penstock.programs.work import ReplicaWork, shares_of_dp
from penstock.schedules.rules import SCHEDULES, schedule_of
from penstock.timing.estimate import Estimator, PassBytes
from penstock.timing.pipeline import micro_batches

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.costs.source import CostSource
    from penstock.models.ops import Model
    from penstock.plans.plan import Plan

__all__ = ["memory_problems", "peak_bytes", "require_memory"]

_ROUNDING = 1 + 1e-9
"""The search fills devices to the brim, and adds up in another order."""


def require_memory(plan: Plan, model: Model, cluster: Cluster) -> None:
    """Refuses a plan of fixed micro-batches one of whose devices would run out of memory, by the costs that it names.

    Dynamic micro-batches are cut batch by batch so that they fit. Replicas on the same kinds of devices hold the same, so that one is
    followed; and of more micro-batches than make the pipeline full only as many.
    """
    if plan.micro_batching.policy != "fixed":
        return
    try:
        found = _fullest(plan, model, cluster, open_costs(plan.costs, cluster))
    except ProfileMissingError:  # not on this machine, or without these devices: bytes are then by formula; a damaged one is an error
        found = _fullest(plan, model, cluster, Roofline(cluster=cluster))
    if found is not None:
        programs, problem = found
        raise InfeasibleError(
            f"the plan does not fit: {problem}. Use smaller micro-batches, more recomputation, more stages or larger devices; `penstock "
            f"search` finds plans that fit.\n\n{picture(programs, problem)}"
        )


def _fullest(plan: Plan, model: Model, cluster: Cluster, source: CostSource) -> tuple[Sequence[i.Program], Problem] | None:
    """The first replica that does not fit: its programs, and the rank that lacks most."""
    samples, counts = micro_batches(plan)
    seen = set()
    for replica, count in enumerate(counts):
        enough = _enough(plan, count * SCHEDULES[plan.schedule].window(plan.num_groups, count))
        kinds = tuple(tuple(cluster.device(rank).name for rank in stage.devices[replica]) for stage in plan.stages)
        if (kinds, enough) in seen:
            continue
        seen.add((kinds, enough))
        stages = tuple(replace(stage, devices=(stage.devices[replica],)) for stage in plan.stages)
        micros = tuple(_micro_batch(plan, index, samples, replica) for index in range(enough))
        alone = replace(plan, stages=stages, num_replicas=1)
        programs = lower(alone, model, [ReplicaWork(micros, schedule_of(plan.schedule, plan.num_stages, enough, plan.num_chunks))])
        if problems := memory_problems(programs, plan, model, cluster, source):
            return programs, problems[0]
    return None


def _enough(plan: Plan, count: int) -> int:
    """The fewest micro-batches that hold as much as all of them, in whole rounds of the device groups."""
    groups, chunks, in_flight = plan.num_groups, plan.num_chunks, SCHEDULES[plan.schedule].in_flight
    fewer = 2 * groups * chunks + count % groups
    alike = fewer < count and all(
        in_flight(groups, group, fewer, chunks) == in_flight(groups, group, count, chunks) for group in range(groups)
    )
    return fewer if alike else count


def _micro_batch(plan: Plan, index: int, count: int, replica: int = 0) -> MicroBatch:
    """Samples of the plan's length."""
    lengths, dec_lengths = (((length,) * count if length else ()) for length in (plan.seq_length, plan.dec_length))
    rows = (plan.seq_length, plan.dec_length) if plan.micro_batching.layout == "padded" else (0, 0)
    micro = MicroBatch(index, tuple(range(index * count, (index + 1) * count)), plan.micro_batching.layout, lengths, dec_lengths, *rows)
    return msgspec.structs.replace(micro, bounds={dp: micro.even_bounds(dp, parts) for dp, parts in shares_of_dp(plan, replica).items()})


def memory_problems(
    programs: Sequence[i.Program], plan: Plan, model: Model, cluster: Cluster, source: CostSource
) -> list[Problem]:  # fmt: skip
    """For each rank that would hold more than its device has, its fullest moment; the rank that lacks most first."""
    estimator = Estimator(model, cluster, source)
    found = []
    for program in programs:
        device = cluster.device(program.rank)
        states = _states(program, plan, estimator)
        index, level, held = max(_levels(program, plan, estimator, states), key=lambda moment: moment[1])
        size = (1 + SLACK) * level + states.context_bytes
        if size > device.memory_bytes * _ROUNDING:
            text = (
                f"{device.name} has {device.memory_bytes / 1e9:,.2f} GB, but would hold {size / 1e9:,.2f} GB ({round(size):,} of "
                f"{round(device.memory_bytes):,} bytes), {plural(held, 'micro-batch')} among it"
            )
            found.append((size / device.memory_bytes, Problem(program.rank, index, text)))
    return [problem for _, problem in sorted(found, key=lambda pair: -pair[0])]


def peak_bytes(program: i.Program, plan: Plan, estimator: Estimator) -> float:
    """The most that the tensors of a program take at a time, as an allocator counts them: without what it and libraries take themselves."""
    return max(size for _, size, _ in _levels(program, plan, estimator, _states(program, plan, estimator)))


def _states(program: i.Program, plan: Plan, estimator: Estimator) -> MemoryBreakdown:
    """Bytes that the program's rank holds whatever runs: weights, gradients and optimizer state."""
    samples, counts = micro_batches(plan)
    device = estimator.cluster.device(program.rank)
    return estimator.states(plan, [place.stage for place in program.places], samples, max(counts), device)


def _levels(
    program: i.Program, plan: Plan, estimator: Estimator, states: MemoryBreakdown
) -> Iterator[tuple[int, float, int]]:  # fmt: skip
    """(instruction, bytes of tensors at its fullest moment, passes whose activations are held) of everything that needs memory."""
    device = estimator.cluster.device(program.rank)
    fixed = states.state_bytes + states.buffers_bytes
    held: dict[tuple[int, int], PassBytes] = {}
    known: dict[tuple[object, ...], PassBytes] = {}
    for index, step in enumerate(program.instructions):
        if isinstance(step, i.Step):
            above = states.activations_bytes + states.workspace_bytes  # of a pass or of the optimizer, whichever needs more
        elif isinstance(step, i.Forward):
            shares = tuple(
                (part, program.micro_batches[step.micro_batch].shape(part.dp, program.place(step.stage).index // part.tp))
                for part in parts_of(plan.stages[step.stage])
            )
            key = step.stage, step.pattern, shares
            if key not in known:
                stage = plan.stages[step.stage]
                stage = replace(stage, recompute=(stage.pattern(step.pattern),))
                known[key] = estimator.pass_bytes(plan, stage, shares, device.name)
            own = held[step.stage, step.micro_batch] = known[key]
            above = own.forward
        elif isinstance(step, i.Backward | i.BackwardInput | i.BackwardWeight):
            above = held[step.stage, step.micro_batch].backward
        else:
            continue
        level = fixed + sum(own.held for own in held.values()) + above
        yield index, level, len(held)
        if isinstance(step, i.Backward | i.BackwardWeight):
            del held[step.stage, step.micro_batch]
