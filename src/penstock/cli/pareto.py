"""`penstock pareto`: every choice of nodes that is worth its money."""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Sequence
from itertools import count as counted
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, VerboseFlag, format_time, format_usd, out, print_json, progress, say, table
from penstock.cli.options import BATCH, BIG, Gradients, Precision, SeqLength, folder_to_write, within
from penstock.cli.plan_words import choice_row, plan_name
from penstock.cli.search_options import parse_sizes
from penstock.errors import plural

if TYPE_CHECKING:
    from penstock.clusters import Cluster
    from penstock.search import Offer, Request
    from penstock.search.money import LeftOut

__all__ = ["pareto"]

_SHOWN, _NAME_LETTERS = 20, 120
"""Choices left out that are listed; letters of a file's name, of which systems allow 255 bytes."""

FORMAT, VERSION = "penstock-pareto", 1


def pareto(
    model: Annotated[str, typer.Option(help="Model name, YAML file, traced description (.json) or hf:PATH.")],
    cluster: Annotated[str, typer.Option(help="The pool: kinds of nodes with the most of each, such as 4xp4d.24xlarge+8xg5.24xlarge.")],
    global_batch: Annotated[int, typer.Option(callback=within(1, BATCH), help="Samples of one iteration.")],
    costs: Annotated[str, typer.Option(help="roofline, profile:FILE (or the name of a shipped profile).")] = "roofline",
    seq_length: SeqLength = None,
    precision: Precision = None,
    gradients: Gradients = None,
    micro_batches: Annotated[str, typer.Option(help="Micro-batch sizes to try, such as 1,2,4; all that divide the batch if none.")] = "",
    steps: Annotated[int | None, typer.Option(callback=within(1, BIG), help="Iterations to train for.")] = None,
    tokens: Annotated[
        float | None, typer.Option(callback=within(0, 1e18, above=True), help="Tokens to train for, instead of --steps.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", callback=folder_to_write, help="Folder for pareto.csv, pareto.json, the chart and a plan for each choice."),
    ] = None,
    dominated: Annotated[bool, typer.Option("--dominated", help="Also show choices that others beat, and which.")] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Show every choice with its plan or why it has none; with --out also clusters.csv, as FASOP's.")
    ] = False,
    verbose: VerboseFlag = False,
    json: JsonFlag = False,
) -> None:
    """Compare every choice of nodes from a pool by time and money, each with its best plan; says which are left out, and why.

    Example: penstock pareto --model gpt2-xl --cluster 2xp4d.24xlarge+4xg5.24xlarge --global-batch 256 --steps 10000 --out choices
    """
    from penstock.search import Request, num_steps, offers

    request = Request.of(
        model, cluster, global_batch, costs, seq_length, parse_sizes(micro_batches), math.inf, precision=precision, gradients=gradients
    )
    count = num_steps(request, steps, tokens)
    with progress("comparing clusters", quiet=json) as bar:
        found, left = offers(
            request, count, lambda text, done, all_: bar.describe(f"{text} ({done} of {all_})"), len(os.sched_getaffinity(0))
        )
    found.sort(key=lambda offer: (bool(offer.dominated_by), offer.hours))
    rows = [_row(offer, count) for offer in found]
    others = [{"cluster": one.cluster.name, "status": one.status, "reason": one.reason} for one in left]
    if folder is not None:
        if every:
            _write_all(folder / "clusters.csv", request, found, left)
        _write(folder, found, rows, {"model": model, "cluster": cluster, "global_batch": global_batch, "steps": count, "left_out": others})
    if json:
        print_json({"model": model, "cluster": cluster, "steps": count, "out": folder, "choices": rows, "left_out": others})
        return
    _show(request, found, rows, others, f"{model}, global batch {global_batch}, {plural(count, 'iteration')}: choices from {cluster}",
          dominated=dominated, every=every, verbose=verbose)  # fmt: skip
    if folder is not None:
        say(f"wrote plans, {'clusters.csv, ' if every else ''}pareto.csv, pareto.json and pareto.svg to {folder}.")


def _show(
    request: Request, found: Sequence[Offer], rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]], title: str, *,
    dominated: bool, every: bool, verbose: bool,
) -> None:  # fmt: skip
    """Prints the choices worth having as sentences and a table, and why `others` are left out."""
    from penstock.plans.precision import described_training

    say(*_sentences(found), "")
    names = {offer.cluster.name: plan_name(offer.choice.plan) for offer in found}
    shown = [row for row in rows if dominated or every or not row["dominated_by"]]
    cells = [
        [row["cluster"], format_time(row["time_s"]), f"{row['hours']:,.2f}", format_usd(row["usd"]), names[row["cluster"]],
         row["dominated_by"] or "-", row["devices"], row["pp"], row["tp"], row["replicas"]] for row in shown
    ]  # fmt: skip
    cells += [[one["cluster"], *["-"] * 4, one["status"], *["-"] * 4] for one in others if every]
    columns = ["nodes", "iteration", "hours", "money", "plan", "beaten by", "devices", "pp", "tp", "replicas"]
    out().print(table(title, columns, cells, more=columns[-4:], verbose=verbose))
    notes = (*request.frame.notes, *request.estimator.source.notes(request.model))
    say(described_training(request.frame), *(f"note: {note}" for note in notes))
    beaten = sum(bool(row["dominated_by"]) for row in rows)
    if not (dominated or every):
        say(f"{plural(beaten, 'more choice')} searched, beaten by one of these (--dominated shows all).")
    if others:
        listed = others if every else others[:_SHOWN]
        say(f"left out ({len(others)}):", *(f"  {one['cluster']}: {one['reason']}" for one in listed))
        say(*([f"  and {len(others) - _SHOWN} more (--all lists them)"] if len(others) > len(listed) else []))


def _sentences(found: Sequence[Offer]) -> list[str]:
    """Sentences on the fastest and the cheapest choice."""
    best = [offer for offer in found if not offer.dominated_by]
    ends = {"fastest": min(best, key=lambda offer: offer.hours), "cheapest": min(best, key=lambda offer: offer.usd)}
    return [
        f"{word}: {offer.cluster.name}, {offer.hours:,.2f} hours and {format_usd(offer.usd)} with {plan_name(offer.choice.plan)}"
        for word, offer in ends.items()
    ]  # fmt: skip


def _row(offer: Offer, count: int) -> dict[str, Any]:
    return {
        "cluster": offer.cluster.name, "devices": offer.num_devices, "hours": offer.hours, "usd": offer.usd, "bound_s": offer.bound_s,
        "dominated_by": offer.dominated_by, **choice_row(offer.choice, count),
    }  # fmt: skip


def _write(folder: Path, found: list[Offer], rows: list[dict[str, Any]], asked: dict[str, Any]) -> None:
    """The choices as a table and as data, with the file of each plan; choices that were left out are told with their reasons."""
    from penstock.files import csv_text, write_json, write_text, written_together
    from penstock.plans.schema import write_plan

    best = [offer for offer in found if not offer.dominated_by]
    names = _file_names([offer.cluster.name for offer in best])
    left = iter(names)
    choices = [{**row, "file": None if row["dominated_by"] else next(left)} for row in rows]
    with written_together():
        write_text(folder / "pareto.csv", csv_text(list(rows[0]), ([row.get(name) for name in rows[0]] for row in rows)))
        write_json(folder / "pareto.json", {"format": FORMAT, "version": VERSION, **asked, "choices": choices})
        for offer, name in zip(best, names, strict=True):
            write_plan(folder / name, offer.choice.plan)
        _chart(folder / "pareto.svg", found)


def _write_all(path: Path, request: Request, found: Sequence[Offer], left: Sequence[LeftOut]) -> None:
    """Every choice of nodes under the columns of FASOP's results that mean something here, the fastest first; then those without a plan."""
    from penstock.files import csv_text, write_text
    from penstock.systems.fasop.rows import COLUMNS

    fields = ("mbs", "tp", "dp", "pp", "node_placement", "partition", "time_s", "pipeline_s", "price_usd_per_step", "is_oom",
              "train_cost_usd")  # fmt: skip
    rows: list[list[Any]] = []
    for offer in sorted(found, key=lambda offer: offer.hours):
        plan, estimate = offer.choice.plan, offer.choice.estimate
        ranks = plan.stages[0].degrees.dp * plan.num_replicas
        starts = request.blocks.start
        partition = [sum(int(stage.first <= first < stage.last) for first in starts[:-1]) for stage in plan.stages]
        status = f"dominated by {offer.dominated_by}" if offer.dominated_by else "worth having"
        rows.append([
            -(-estimate.samples // plan.stages[0].degrees.dp), offer.choice.tp, ranks, plan.num_stages, _placement(offer.cluster),
            partition, estimate.time_s, estimate.pipeline_s, estimate.price_usd, False, offer.usd, status, "",
        ])  # fmt: skip
    rows += [
        [*[None] * 4, _placement(one.cluster), *[None] * 4, one.status == "out of memory", None, one.status, one.reason] for one in left
    ]
    write_text(path, csv_text([*(COLUMNS[name] for name in fields), "status", "reason"], rows))


def _placement(cluster: Cluster) -> list[str]:
    """The name of each node, in rank order, as FASOP lists them."""
    return [run.node.name for run in cluster.runs for _ in range(run.count)]


def _file_names(names: Sequence[str]) -> list[str]:
    """A file for each choice: nodes may be called anything, also `x/../../y`, and so that two of them look alike."""
    found: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:_NAME_LETTERS]
        numbered = (f"{plain}.{number}" if number > 1 else plain for number in counted(1))
        free = next(one for one in numbered if one.lower() not in found)  # some disks know no capitals
        found[free.lower()] = f"{free}.json"
    return list(found.values())


def _chart(path: Path, found: list[Offer]) -> None:
    """Hours against money, the undominated choices joined and named."""
    from matplotlib.figure import Figure

    from penstock.files import write_text

    figure = Figure(figsize=(9, 6))
    axes = figure.add_subplot()
    beaten = [offer for offer in found if offer.dominated_by]
    best = sorted((offer for offer in found if not offer.dominated_by), key=lambda offer: offer.hours)
    axes.scatter([offer.hours for offer in beaten], [offer.usd for offer in beaten], color="lightgrey", label="beaten by another")
    axes.plot([offer.hours for offer in best], [offer.usd for offer in best], "o-", label="worth having")
    for offer in best:
        axes.annotate(offer.cluster.name, (offer.hours, offer.usd), fontsize=7, xytext=(4, 4), textcoords="offset points", parse_math=False)
    axes.set(xlabel="hours", ylabel="USD", title="time and money")
    axes.legend()
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    write_text(path, drawn.getvalue())
