"""`penstock search --costs aceso:DIR` and `fasop:DIR`: the best plan of another planner's own tables, by its own rules, with a bound."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.cli.console import format_share, format_time, format_usd, out, print_json, progress, say, table
from penstock.cli.search_answer import iterations_line
from penstock.cli.search_options import TOP
from penstock.cli.search_places import places_of
from penstock.errors import InputError, shell_words
from penstock.systems import SYSTEMS, TableAnswer, TableSearch

__all__ = ["TABLES", "search_tables", "show_stages"]

TABLES = tuple(name for name, system in SYSTEMS.items() if system.search is not None)
"""Systems whose own tables are searched."""
_REFUSED = {
    "objective": "the tables are searched for time",
    "seq-length": "they hold samples of one length",
    "lengths": "they hold samples of one length",
    "data": "they hold samples of one length",
    "order": "batches are planned as they suit; `penstock batch` has it",
    "split": "batches are planned as they suit; `penstock batch` has it",
    "recompute": "it is chosen; `penstock batch` has it",
    "precision": "they were measured in one precision",
    "gradients": "they were measured in one precision",
    "schedules": "their rules know 1F1B alone",
    "tokens": "give --steps for hours",
    "max-hops": "this search is not refined under the simulator",
    "proof": "its bound comes as one figure",
    "for": "--out writes the plan as the tables' own system has it",
    "export": "--out writes the plan as the tables' own system has it",
}
"""Options of `penstock search` that say nothing here, and why."""


def search_tables(asked: TableSearch, path: Path | None, steps: int | None, json: bool, said: Collection[str]) -> None:
    """Searches, shows and writes to `path`; `said` are the options that were given, some of which say nothing here."""
    kind = asked.costs.partition(":")[0]
    _require_unused(asked.costs, said if kind != "dynapipe" else [name for name in said if name != "lengths"])
    if kind != "aceso" and "cuts" in said:
        raise InputError(f"--cuts does not go with --costs {asked.costs}: its tables are by whole layers. Drop it.")
    if kind != "aceso" and (asked.top not in (1, TOP) or asked.budget_s is not None):
        ends = "this search counts its work and ends by itself"
        name, why = ("--time-budget", ends) if asked.budget_s is not None else ("--top", "it finds one plan")
        raise InputError(f"{name} does not go with --costs {asked.costs}: {why}. Drop it.")
    find = SYSTEMS[kind].search
    if find is None:
        raise InputError(f"costs '{asked.costs}': only the tables of {', '.join(TABLES)} are searched.")
    with progress("searching", quiet=json) as bar:
        answer = find(asked, bar.describe)
    if path is not None:
        from penstock.files import write_text, written_together

        with written_together():
            for place, text in zip(_places(path, answer), [answer.text, *(one.text for one in answer.others)], strict=True):
                write_text(place, text)
    if json:
        _tell_json(asked, answer, path, steps)
    else:
        _tell(kind, answer, path, steps)


def _places(path: Path, answer: TableAnswer) -> list[Path]:
    return places_of(path, 1 + len(answer.others))


def _require_unused(costs: str, said: Collection[str]) -> None:
    """Refuses the options that were given and that the tables leave nothing to do for."""
    for name in (name for name in _REFUSED if name in said):
        raise InputError(f"--{name} does not go with --costs {costs}: {_REFUSED[name]}. Drop it.")


def _tell_json(asked: TableSearch, answer: TableAnswer, path: Path | None, steps: int | None) -> None:
    usd = answer.usd_per_step
    total = {} if steps is None else {"hours": answer.time_s * steps / 3600, "total_usd": None if usd is None else usd * steps}
    print_json({
        "model": asked.model, "costs": asked.costs, "out": path, "time_s": answer.time_s, "lower_bound_s": answer.bound_s,
        "gap": answer.time_s / answer.bound_s - 1 if answer.bound_s else None, **answer.facts, **total, "stages": answer.stages,
        "baselines": {name: None if math.isinf(time_s) else time_s for name, time_s in answer.baselines.items()},
        "others": [{"plan": one.what, "time_s": one.time_s} for one in answer.others],
    })  # fmt: skip


def _tell(kind: str, answer: TableAnswer, path: Path | None, steps: int | None) -> None:
    usd = answer.usd_per_step
    price = "" if usd is None else f", {format_usd(usd)} an iteration for the nodes that have work"
    say(
        f"{format_time(answer.time_s)} an iteration by the tables' own rules; {answer.note}{price}; {_bounded(answer)}.", ""
    )  # fmt: skip
    show_stages(answer.title, answer.stages)
    for name, time_s in answer.baselines.items():
        more = format_share(time_s / answer.time_s - 1)
        say(f"{name} " + ("holds no plan that fits" if math.isinf(time_s) else f"takes {format_time(time_s)}, {more} more"))
    for number, one in enumerate(answer.others, 2):
        say(f"plan {number}: {one.what}, {format_time(one.time_s)}, {format_share(one.time_s / answer.time_s - 1)} more")
    say(*iterations_line(steps or 1, answer.time_s, usd))
    if path is not None:
        say(f"wrote {', '.join(map(str, _places(path, answer)))}{_next(kind, answer, path)}")


def _next(kind: str, answer: TableAnswer, path: Path) -> str:
    """How to get a plan here of the file; of the model the tables do not know our name."""
    files = SYSTEMS[kind].plans
    if files is None:
        return ""
    given = " ".join(f"--{name.replace('_', '-')} …" for name in files.required)
    rounded = " (which rounds what this plan does to parts of ops here: --cuts both finds one without)" if answer.is_torn else ""
    return f"; next: penstock import {shell_words(f'{kind}:{path}')} {given} --out plan.json{rounded}"


def _bounded(answer: TableAnswer) -> str:
    if not answer.bound_s:
        return "no bound is known, the time budget ended before"
    gap = format_share(answer.time_s / answer.bound_s - 1)
    return f"no such plan takes less than {format_time(answer.bound_s)}: this one is at most {gap} above the best possible"


def show_stages(title: str, stages: Sequence[Mapping[str, Any]]) -> None:
    """A table of the stages of a plan of another system."""
    out().print(table(title, ["stage", *stages[0]], [[index, *map(_cell, stage.values())] for index, stage in enumerate(stages)]))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if value < 100 else f"{value:,.0f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
