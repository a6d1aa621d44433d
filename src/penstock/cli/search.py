"""`penstock search`: the best plans for a model on a cluster."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli import search_options as given
from penstock.cli.batch_options import Order, Recompute, Split, ways_of
from penstock.cli.console import JsonFlag, VerboseFlag, format_share, format_time, progress
from penstock.cli.options import Gradients, Precision, SeqLength, options_said
from penstock.cli.search_answer import SearchAnswer
from penstock.cli.search_options import MAX_HOPS, SCHEDULE_NAMES, TOP, limit_bytes, parse_schedules, parse_sizes
from penstock.cli.search_places import reserve_beside, write_plans
from penstock.cli.search_record import Trail, write_record
from penstock.cli.search_systems import Systems
from penstock.cli.search_tables import TABLES, search_tables
from penstock.errors import InputError
from penstock.systems import TableSearch

if TYPE_CHECKING:
    from penstock.search import Objective, Outcome, Request

__all__ = ["search"]


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
    cuts: given.TableCuts = "ops",
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
    reserve_beside(path, top)
    systems = Systems.of(for_, export)
    if costs.partition(":")[0] in TABLES:
        sizes = parse_sizes(micro_batches)
        tables = TableSearch(costs, model, cluster, global_batch, sizes, memory_limit, baselines, top, time_budget, lengths, cuts)
        search_tables(tables, path, steps, json, said)
        return
    if "cuts" in said:
        raise InputError(f"--cuts is for --costs aceso:DIR; costs are '{costs}'. Drop it; --for keeps plans to the cuts of a system.")
    goal = Objective.parse(objective)
    ways = ways_of(order, split, "", recompute, None)
    if lengths is None and data is None and (ways.cuts or recompute):
        raise InputError("--order, --split and --recompute say how batches are planned. Give --lengths or --data.")
    schedules, precision = systems.usual(schedules, precision, said)
    systems.check_schedules(schedules)
    request = Request.of(
        model, *_required(cluster, global_batch), costs, seq_length, parse_sizes(micro_batches), limit_bytes(memory_limit),
        parse_schedules(schedules), precision, gradients,
    )  # fmt: skip
    systems.check_model(request)
    count = num_steps(request, steps, tokens)
    if lengths is not None or data is not None:
        from penstock.cli.search_lengths import lengths_of, search_lengths

        systems.check_lengths(said, lengths)
        samples = lengths_of(request, lengths, data)
        plans = search_lengths(
            request, lengths or data or Path(), samples, top, time_budget, steps, tokens, json, path, strict, ways, baselines, verbose
        )
        systems.export(plans[0], path)
        return
    trail = Trail()
    request, outcome = _found(request, goal, count, top, time_budget, max_hops, trail, quiet=json)
    outcome, limits = systems.kept(request, outcome, top)
    # Under a limit of money or hours a slower plan may be one too many.
    strict = strict or not goal.is_time
    choices = outcome.choices if strict else outcome.simple_first
    note = limits if goal.is_time else f"of {cluster}, {request.cluster.name} is best for {objective}{limits and '; '}{limits}"
    asked = {"model": model, "cluster": cluster, "costs": costs, "objective": objective}
    recorded = asked | {
        "global_batch": global_batch, "steps": count, "seq_length": choices[0].plan.seq_length, "precision": choices[0].plan.precision,
        "micro_batches": micro_batches, "schedules": schedules, "memory_limit_gb": memory_limit, "strict": strict,
    }  # fmt: skip
    with written_together():
        paths = write_plans(path, [choice.plan for choice in choices])
        answer = SearchAnswer(request, outcome, choices, asked | {"out": path}, paths, count, strict, baselines, proof, note)
        if path is not None:
            write_record(path, recorded, answer, trail)
    systems.export(choices[0].plan, path)
    if json:
        answer.tell_json()
    else:
        answer.tell(verbose)


def _required(cluster: str, global_batch: int | None) -> tuple[str, int]:
    """Refuses a search without cluster or global batch, which only other planners' tables do without."""
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
