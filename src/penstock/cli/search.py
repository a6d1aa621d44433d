"""`penstock search`: the best plans for a model on a cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import search_options as given
from penstock.cli.batch_options import Order, Recompute, Split, ways_of
from penstock.cli.console import JsonFlag, VerboseFlag, format_share, format_time, progress
from penstock.cli.options import Gradients, Precision, SeqLength, options_said
from penstock.cli.plan_words import choice_row, choices_table
from penstock.cli.search_answer import SearchAnswer, why_first
from penstock.cli.search_options import MAX_HOPS, SCHEDULE_NAMES, TOP, limit_bytes, parse_schedules, parse_sizes
from penstock.cli.search_record import Trail, record_path, write_record
from penstock.cli.search_tables import TABLES, beside, search_tables
from penstock.errors import InputError, near_misses, shell_words
from penstock.files import reserve_output
from penstock.schedules.rules import SCHEDULES
from penstock.systems import TableSearch

if TYPE_CHECKING:
    from penstock.cli.export import Target
    from penstock.plans.plan import Plan
    from penstock.search import Objective, Outcome, Request

__all__ = ["choice_row", "choices_table", "parse_sizes", "search", "why_first", "write_plans"]


def search(
    model: given.ModelName,
    cluster: given.ClusterName = "",
    global_batch: given.GlobalBatch = None,
    costs: given.Costs = "roofline",
    objective: given.Goal = "time",
    seq_length: SeqLength = None,
    precision: Precision = None,
    gradients: Gradients = None,
    lengths: given.Lengths = None,
    data: given.Data = None,
    order: Order = "",
    split: Split = "",
    recompute: Recompute = "",
    micro_batches: given.MicroBatches = "",
    schedules: given.Schedules = SCHEDULE_NAMES,
    memory_limit: given.MemoryLimit = None,
    steps: given.Steps = None,
    tokens: given.Tokens = None,
    time_budget: given.TimeBudget = None,
    max_hops: given.MaxHops = MAX_HOPS,
    top: given.Top = TOP,
    path: given.PlanFile = None,
    strict: given.Strict = False,
    baselines: given.Baselines = False,
    proof: given.Proof = False,
    for_: given.For = "",
    export: given.Export = "",
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:
    """Find the fastest or the cheapest plans: stages cut between any two ops, each with its own devices, degrees and recomputed ops,
    on devices of any kinds; says how much faster than the best of them any plan could be.

    Ctrl-C, or the end of the time budget, gives the best plan so far. Status 3 if no plan fits.

    Example: penstock search --model gpt-1.3b --cluster 4xa100-40gb --global-batch 64 --out plan.json

    Example: penstock search --costs aceso:DIR --model gpt_1_3B --cluster 1x4 --global-batch 1024 --memory-limit 28 --out aceso.json
    """
    from penstock.files import written_together
    from penstock.search import Objective, Request, num_steps

    said = options_said(search, locals())
    _reserve_beside(path, top)
    target = _target(export)
    _check_for(for_)
    if costs.partition(":")[0] in TABLES:
        sizes = parse_sizes(micro_batches)
        tables = TableSearch(costs, model, cluster, global_batch, sizes, memory_limit, baselines, top, time_budget, lengths)
        search_tables(tables, path, steps, json, said)
        return
    goal = Objective.parse(objective)
    ways = ways_of(order, split, "", recompute, None)
    if lengths is None and data is None and (ways.cuts or recompute):
        raise InputError("--order, --split and --recompute say how batches are planned. Give --lengths or --data.")
    if for_ in _SEARCHED_FOR:
        if "schedules" not in said:
            schedules = _SEARCHED_FOR[for_]
        precision = precision or "fp32"
    _check_schedules(schedules, {"--for": for_, "--export": target.system if target else ""})
    request = Request.of(
        model, *_required(cluster, global_batch), costs, seq_length, parse_sizes(micro_batches), limit_bytes(memory_limit),
        parse_schedules(schedules), precision, gradients,
    )  # fmt: skip
    _check_model(request, for_, target.system if target else "")
    count = num_steps(request, steps, tokens)
    if lengths is not None or data is not None:
        from penstock.cli.search_lengths import lengths_of, search_lengths

        _check_lengths(said, lengths, target)
        samples = lengths_of(request, lengths, data)
        plans = search_lengths(
            request, lengths or data or Path(), samples, top, time_budget, steps, tokens, json, path, strict, ways, baselines, verbose
        )
        if target:
            _export(plans[0], target, path)
        return
    trail = Trail()
    request, outcome = _found(request, goal, count, top, time_budget, max_hops, trail, quiet=json)
    limits = ""
    if for_:
        outcome, limits = _kept_to(for_, request, outcome, top)
    # Under a limit of money or hours a slower plan may be one too many.
    strict = strict or not goal.is_time
    choices = outcome.choices if strict else outcome.simple_first
    note = limits if goal.is_time else f"of {cluster}, {request.cluster.name} is best for {objective}{limits and '; '}{limits}"
    asked = {"model": model, "cluster": cluster, "costs": costs, "objective": objective}
    with written_together():
        paths = write_plans(path, [choice.plan for choice in choices])
        answer = SearchAnswer(request, outcome, choices, asked | {"out": path}, paths, count, strict, baselines, proof, note)
        if path is not None:
            best = choices[0].plan
            write_record(path, asked | {
                "global_batch": global_batch, "steps": count, "seq_length": best.seq_length, "precision": best.precision,
                "micro_batches": micro_batches, "schedules": schedules, "memory_limit_gb": memory_limit, "strict": strict,
            }, answer, trail)  # fmt: skip
    if target:
        _export(choices[0].plan, target, path)
    if json:
        answer.tell_json()
    else:
        answer.tell(verbose)


def _required(cluster: str, global_batch: int | None) -> tuple[str, int]:
    """What only other planners' tables do without."""
    if not cluster or global_batch is None:
        missing, hint = ("--cluster", "4xa100-40gb") if not cluster else ("--global-batch", "64")
        raise InputError(f"{missing} is missing. Give it, as in `{missing} {hint}`.")
    return cluster, global_batch


def _found(
    request: Request, goal: Objective, count: int, top: int, time_budget: float | None, max_hops: int, trail: Trail, quiet: bool
) -> tuple[Request, Outcome]:
    """The best plans; for money on the nodes that are best, which the request returned asks for."""
    from penstock.search import chosen, offers
    from penstock.search import search as find

    with progress("searching", quiet=quiet) as bar:

        def tell(text: str, best_s: float, bound_s: float) -> None:
            trail.note(text, best_s, bound_s)
            best = "-" if best_s == math.inf else format_time(best_s)
            known = math.inf not in (best_s, bound_s) and bound_s
            gap = f", at most {format_share(best_s / bound_s - 1)} above the best possible" if known else ""
            bar.describe(f"{text}: best {best}{gap}")

        if not goal.is_time:
            found, _ = offers(
                request, count, lambda text, done, all_: bar.describe(f"{text} ({done} of {all_} clusters)"), len(os.sched_getaffinity(0))
            )
            request = request.on(chosen(found, goal).cluster)
        return request, find(request, top=top, time_budget_s=time_budget or math.inf, watch=tell, max_hops=max_hops)


def _check_for(system: str) -> None:
    from penstock.cli.export import FOR

    if system and system not in FOR:
        raise InputError(f"--for is '{system}': there is no such system to plan for. {near_misses(system, FOR)}")


def _check_schedules(schedules: str, systems: Mapping[str, str]) -> None:
    """Says before the search that a system, named by an option, updates weights at other times than all plans of some schedules."""
    from penstock.cli.export import TARGETS

    apart = any(SCHEDULES[name].asynchronous for name in parse_schedules(schedules))
    for option, system in systems.items():
        if system in _SEARCHED_FOR and not apart:
            raise InputError(
                f"{option} is for {system}, whose stages update after every micro-batch: no plan of --schedules {schedules} does. Search "
                f"with --for {system} alone, or --schedules {_SEARCHED_FOR[system]}."
            )
        if system in TARGETS and system not in _SEARCHED_FOR and apart:
            raise InputError(
                f"--schedules is '{schedules}', whose stages update after every micro-batch; {system} ({option}) updates once an "
                "iteration. Leave one of the two out."
            )


def _kept_to(system: str, request: Request, outcome: Outcome, top: int) -> tuple[Outcome, str]:
    """The plans that a system can express, and a sentence on what that costs."""
    from penstock.cli.export import refusal_of
    from penstock.cli.plan_words import plan_name
    from penstock.search.expressible import expressible

    kept = expressible(
        request, outcome.choices, lambda plan: refusal_of(plan, system), top, _CHANGES.get(system)
    )
    fastest, best = outcome.choices[0], kept.choices[0]
    slower = best.estimate.time_s / fastest.estimate.time_s
    found = replace(outcome, choices=kept.choices, offered=best, formula_s=slower * outcome.formula_s)
    if not kept.reason:
        return found, ""
    name = f"{plan_name(fastest.plan)} at {format_time(fastest.estimate.time_s)}"
    return found, f"{system} cannot express the fastest plan found, {name}: {kept.reason} This one is {format_share(slower - 1)} slower"


def _undivided(plan: Plan) -> Plan:
    """The plan for systems without ZeRO."""
    return replace(plan, stages=tuple(replace(stage, zero=0) for stage in plan.stages))


def _asynchronous(plan: Plan) -> Plan:
    """The plan as DynPipe runs it: updates of each stage on their own."""
    return replace(_undivided(plan), schedule="pipedream")


_SEARCHED_FOR = {"dynpipe": "pipedream"}
"""The schedule that a system runs, where it is none of those that are searched together; such plans are in fp32."""
_CHANGES: Mapping[str, Callable[[Plan], Plan]] = {"aceso": _undivided, "fasop": _undivided, "dynpipe": _asynchronous}
"""What a plan becomes for systems that have less, before it is asked whether they take it."""


def _check_lengths(said: Collection[str], lengths: Path | None, target: Target | None) -> None:
    """Refuses options that say nothing of batches planned one by one, and systems that have none; how long samples are, files of lengths
    say, and data does not."""
    from penstock.cli.export import LAUNCHERS

    for name in (*(["seq-length"] if lengths else []), "micro-batches", "objective", "proof", "for", "max-hops"):
        if name in said:
            raise InputError(
                f"--{name} does not go with --lengths or --data, whose batches are planned one by one, for time. Drop one of them."
            )
    if target and target.system not in LAUNCHERS:
        raise InputError(
            f"--export is for {target.system}, which cannot express micro-batches that differ from batch to batch, as --lengths and --data "
            "plan them. Drop one of them."
        )


def _target(text: str) -> Target | None:
    """What `--export` names, checked before the search whose plan it is to get."""
    from penstock.cli.export import WEIGHTS, parse_target

    target = parse_target(text, "--export") if text else None
    if target and target.system == WEIGHTS:
        other = shell_words("penstock", "export", "RUN", "--to", text)
        raise InputError(f"--export is '{text}': a plan has no weights. Export those of a checkpoint: {other}")
    return target


def _check_model(request: Request, *systems: str) -> None:
    """Says before the search that a system takes no plan of the model."""
    from penstock.cli.export import check_model

    for system in systems:
        check_model(system, request.model, request.schedules)


def _export(plan: Plan, target: Target, path: Path | None) -> None:
    from penstock.cli.export import export_plan

    try:
        export_plan(plan, target, path or Path("plan.json"))
    except InputError as error:
        raise InputError(f"{error} The search was not in vain: its plans are in '{path}'." if path else str(error)) from None


def _reserve_beside(path: Path | None, top: int) -> None:
    """What a search writes beside the file that `--out` names."""
    for place in () if path is None else (record_path(path), *beside(path, top)):
        reserve_output(place)


def write_plans(path: Path | None, plans: Sequence[Plan]) -> list[Path]:
    """Writes the best plan to `path` and the next ones beside it; the files written."""
    from penstock.files import written_together
    from penstock.plans.schema import write_plan

    if path is None:
        return []
    paths = [path, *beside(path, len(plans))]
    with written_together():
        for target, plan in zip(paths, plans, strict=True):
            write_plan(target, plan)
    return paths
