"""`penstock train` of a job: what was found out is told first, then it is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.console import format_bytes, format_count, format_time, print_json, progress, say
from penstock.cli.train import run_training
from penstock.errors import InputError, plural, shell_words
from penstock.processes.fork_server import warm_up

if TYPE_CHECKING:
    from penstock.jobs.starting import ReadyJob

__all__ = ["run_job"]


def run_job(file: Path | None, options: Mapping[str, Any], texts: Sequence[str], compare: bool, json: bool) -> None:
    """Trains the job of a file, or of options alone; what is given beside a file replaces its fields."""
    from penstock.jobs.job_file import job_from, parse_changes, read_job

    for name, field in (("--model", "model.source"), ("--data", "data.path"), ("--out", "out")):
        if file is None and field not in options:
            raise InputError(
                f"{name} is missing. Train with: penstock train --model M --data chats.jsonl --out RUN; or give a job or a plan file."
            )
    where = "the job" if file is None else f"job file '{file}'"
    job = job_from({} if file is None else read_job(file), {**options, **parse_changes(texts)}, where)
    first = os.environ.get("RANK", "0") == "0"
    if "RANK" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
        warm_up()  # it imports torch while the plan is searched
    from penstock.jobs.starting import AllDoneError, ready

    try:
        with progress("looking", quiet=json or not first) as bar:
            found = ready(job, bar.describe)
    except AllDoneError as done:
        if first and json:
            print_json({"job": job.out, "losses": [], "done": str(done)})
        elif first:
            say(str(done))
        return
    trainer = found.trainer()
    if first and not json:
        say(*findings(found))
    go_on = "the same command goes on from there"
    run_training(trainer, compare=compare, json=json, go_on=go_on, more=_facts(found))


def findings(found: ReadyJob) -> Iterator[str]:
    """Lines on what was found out, one for each thing that one would ask."""
    from penstock.plans.precision import described_training
    from penstock.plans.references import cluster_of
    from penstock.search import short_name

    job, filled, plan = found.job, found.prepared.filled, found.plan
    has_tokens, cluster = bool(found.model.seq_length), cluster_of(plan)
    begins = (found.resume and f"goes on after step {found.first_step:,}") or _begins(job.model.weights, job.model.source)
    yield f"model    {found.model.name}, {format_count(found.model.num_parameters)} weights ({begins})"
    yield from (f"note     {note}" for note in found.model.notes)
    lengths = f" of {filled.own.min():,} to {filled.own.max():,} tokens, {filled.mean:,.0f} on average" if has_tokens else ""
    where = "prepared earlier" if found.prepared.was_there else "prepared now"
    yield f"data     {plural(len(filled.own), 'sample')}{lengths} ({where}: {found.prepared.folder})"
    yield f"devices  {cluster.describe()}"
    yield f"costs    {found.costs}"
    yield f"plan     {short_name(plan)}: {described_training(plan)}"
    yield from _times(found)
    written = Path(job.out) / "job.yaml"
    yield f"written  {written} has all of it: `{shell_words('penstock', 'train', written)}` repeats it, or goes on"
    if found.changes:
        yield f"changed  {'; '.join(found.changes)}"


def _times(found: ReadyJob) -> Iterator[str]:
    """Words on what a step takes, what devices hold, how far that is from the best possible, and what else was found."""
    from penstock.search import short_name

    steps, unit = (found.job.train.steps or 0) - found.first_step, "tokens" if found.model.seq_length else "images"

    def in_all(time_s: float) -> str:
        return f"; {steps:,} steps take {format_time(time_s * steps)}" if steps > 1 else ""

    if found.found is None:
        known = found.plan.predicted
        expected = "" if known is None else f": {format_time(known.time_s)}{in_all(known.time_s)}"
        yield f"step     {plural(found.plan.global_batch, 'sample')}{expected}"
        yield f"chosen   {'as given: ' + found.job.plan.file if found.job.plan.file else 'earlier, when this run began'}"
        return
    best = found.found.found[0]
    yield (
        f"step     {plural(found.plan.global_batch, 'sample')}, {format_count(best.tokens)} {unit} in "
        f"{plural(round(best.num_micro_batches), 'micro-batch')}: {format_time(best.time_s)} ±{found.found.error:.0%}, "
        f"{format_count(best.tokens / best.time_s)} {unit}/s{in_all(best.time_s)}"
    )
    yield f"memory   {format_bytes(best.peak_bytes)} of {format_bytes(best.limit_bytes)} on the fullest device"
    yield f"bound    at most {best.gap:.1%} above the best possible on these stages"
    for other in found.found.found[1:2]:
        yield f"beside   the next best, {short_name(other.plan)}: {format_time(other.time_s)} ({other.time_s / best.time_s - 1:+.1%})"
    if found.found.fixed_padded_s:
        padded_s = found.found.fixed_padded_s
        yield f"beside   fixed padded micro-batches: {format_time(padded_s)} ({padded_s / best.time_s:.2f} times as long)"


def _begins(weights: str, source: str) -> str:
    from penstock.jobs.models import first_weights
    from penstock.models.huggingface import found_source

    found = first_weights(found_source(source), weights)
    return f"begins with {found}" if found else "begins with random weights"


def _facts(found: ReadyJob) -> dict[str, Any]:
    best = found.found.found[0] if found.found else None
    return {
        "job": str(Path(found.job.out) / "job.yaml"), "model": found.model.name, "data": found.prepared.folder, "costs": found.costs,
        "first_step": found.first_step, "changed": list(found.changes), "global_batch": found.plan.global_batch,
        "predicted_s": found.plan.predicted.time_s if found.plan.predicted else None,
        "bound_s": best.bound_s if best else None, "peak_bytes": best.peak_bytes if best else None,
        "next_best_s": found.found.found[1].time_s if found.found and len(found.found.found) > 1 else None,
        "fixed_padded_s": found.found.fixed_padded_s if found.found else None,
    }  # fmt: skip
