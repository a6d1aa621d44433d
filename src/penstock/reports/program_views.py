"""The views of programs: whether they are safe, what each rank does, and when, as far as a plan given beside them prices it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.errors import plural
from penstock.plans.references import model_of
from penstock.programs.check import check_programs
from penstock.programs.flow import follow
from penstock.programs.instructions import Program, stage_of
from penstock.reports.batch_views import micro_batch_blocks
from penstock.reports.blocks import Block, Fact, Facts, SpanKind, Subject, Table, Text, View
from penstock.reports.plan_views import add_execution, critical_causes
from penstock.reports.span_lanes import LETTERS, SpanLanes
from penstock.schedules.actions import Action
from penstock.timing.execution import execute

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["programs_subject"]

_MOST_PROBLEMS = 20
_USUAL = {"Wait": "wait", "Start": "transfer"}
"""Colours by the ends of names."""
_SLOT_S = 1.0
"""Of an instruction whose time nobody knows."""


def programs_subject(name: str, programs: Sequence[Program], plans: Sequence[Plan]) -> Subject:
    """Programs of one iteration; the first plan that has their ranks and stages says what they take."""
    plan = next((one for one in plans if _suits(one, programs)), None)
    micro_batches = {program.replica: program.micro_batches for program in programs}
    table = [(replica, number, one) for replica, own in sorted(micro_batches.items()) for number, one in enumerate(own)]
    return Subject("programs", name, (
        View("glance", "Glance", _glance(programs)),
        View("plan", "Plan", [_per_rank(programs)]),
        View("batch", "Batch", micro_batch_blocks(table)),
        View("timeline", "Timeline", _in_order(programs) if plan is None else _priced(programs, plan)),
    ))  # fmt: skip


def _suits(plan: Plan, programs: Sequence[Program]) -> bool:
    """Whether these are all programs of an iteration under the plan."""
    first, ranks = programs[0], {one.rank for one in programs}
    return (plan.num_stages, plan.num_replicas, {*plan.ranks}) == (first.num_stages, first.num_replicas, ranks)


def _glance(programs: Sequence[Program]) -> list[Block]:
    first, places = programs[0], {place.stage for program in programs for place in program.places}
    alone = len(programs) == 1 and len(places) * first.num_replicas < first.num_stages * first.num_replicas
    problems = follow(first) if alone else check_programs(programs)
    safe = "they are not safe" if problems else "this rank alone is consistent" if alone else "they are proven safe"
    sentence = f"Programs of {plural(len(programs), 'rank')} for iteration {first.iteration}: {safe}."
    facts = (
        Fact("stages", first.num_stages, "count"), Fact("replicas", first.num_replicas, "count"),
        Fact("samples", first.num_samples, "count"), Fact("positions in the loss", first.loss_tokens, "count"),
        Fact("instructions", sum(len(program.instructions) for program in programs), "count"),
    )  # fmt: skip
    return [Text(sentence), Facts(facts), *(Text(str(problem), note=True) for problem in problems[:_MOST_PROBLEMS])]


def _per_rank(programs: Sequence[Program]) -> Block:
    rows = []
    for program in programs:
        kinds = Counter(type(step).__name__ for step in program.instructions)
        stages = " ".join(f"{place.stage} (ops {place.first}:{place.last})" for place in program.places)
        rows.append((program.rank, program.replica, stages, len(program.micro_batches), len(program.instructions),
                     kinds["SendStart"], kinds["ReceiveStart"]))  # fmt: skip
    columns = ("rank", "replica", "stages", "micro-batches", "instructions", "sends", "receives")
    return Table("what each rank does", columns, ("number", "number", "text", *("number",) * 4), tuple(rows))


def _in_order(programs: Sequence[Program]) -> list[Block]:
    """Every instruction in one slot: an order, and no time."""
    lanes = SpanLanes()
    for program in programs:
        for name in {type(step).__name__: None for step in program.instructions}:
            usual = next((colour for end, colour in _USUAL.items() if name.endswith(end)), "other")
            lanes.kind(name, SpanKind(name, *LETTERS.get(name, (name, usual))))
        spans = [(at * _SLOT_S, (at + 1) * _SLOT_S, type(step).__name__, stage_of(step), getattr(step, "micro_batch", -1))
                 for at, step in enumerate(program.instructions)]  # fmt: skip
        lanes.add(f"rank {program.rank}", f"replica {program.replica}", "in order", spans, replica=program.replica)
    note = "What instructions take is not known: each has one slot, in the order of its rank. Give their plan too, and it is simulated."
    return [Text(note, note=True), lanes.block("instructions in their order")]


def _priced(programs: Sequence[Program], plan: Plan) -> list[Block]:
    """The passes of every replica as the clock runs them by the plan's costs, a rank for each device."""
    from penstock.runtime.telemetry.predicting import PASSES, Pass, ProgramTimes

    times, lanes = ProgramTimes(plan, model_of(plan)), SpanLanes()
    for replica in sorted({program.replica for program in programs}):
        own = [program for program in programs if program.replica == replica]
        work = times.workload(own[0], own[1:])
        # Ranks that share stages run the same passes, but for those without samples: the one that runs most stands for them.
        ranks: dict[int, Program] = {}
        for program in own:
            device = work.devices[program.places[0].stage]
            if device not in ranks or len(program.instructions) > len(ranks[device].instructions):
                ranks[device] = program
        schedule = tuple(
            tuple(Action(one.stage, PASSES[type(one)], one.micro_batch) for one in ranks[device].instructions if isinstance(one, Pass))
            for device in range(work.num_devices)
        )
        run = execute(schedule, work)
        add_execution(lanes, run, [f"rank {ranks[device].rank}" for device in range(work.num_devices)], replica=replica)
    block = lanes.block("one iteration, simulated by the plan's costs")
    return [block, *critical_causes(block)]
