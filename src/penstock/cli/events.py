"""`penstock events`: what a run noticed about its devices, and what it decided."""

from __future__ import annotations

import textwrap
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.console import JsonFlag, err, out, print_json, print_json_line, say, visible

if TYPE_CHECKING:
    from penstock.adapting.events import RunEvent

__all__ = ["events", "show_events"]

_PAUSE_S = 0.5
_WIDTH = 80


def events(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given.")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what is still to come, until the run ends.")] = False,
    json: JsonFlag = False,
) -> None:
    """Tell what a run has noticed: ranks that became slow or fast, late samples and programs, costs that are off; and what it decided.

    Works while a run goes on, and after one that was killed. With --follow, --json prints one object per line.

    Example: penstock events run --follow
    """
    from penstock.adapting.events import EVENTS, read_events
    from penstock.runtime.run_folder import plan_of_run
    from penstock.runtime.run_lock import is_held

    plan_of_run(run)
    found = list(read_events(run))
    if json and not follow:
        print_json({"run": run, "watched": (run / EVENTS).is_file(), "events": [_fields(event) for event in found]})
        return
    shown = show_events(found, json)
    while follow and is_held(run):
        time.sleep(_PAUSE_S)
        shown += show_events(list(read_events(run))[shown:], json)
    shown += show_events(list(read_events(run))[shown:], json)
    if not shown:
        unwatched = "it was not watched (--adapt off, a rehearsal, or more ranks than cores)."
        told = "nothing has been noticed." if (run / EVENTS).is_file() else unwatched
        say(f"run '{run}': {told}", to=err())


def _fields(event: RunEvent) -> Any:
    import msgspec

    return msgspec.to_builtins(event)


def show_events(found: list[RunEvent], json: bool = False) -> int:
    """Prints events; how many."""
    for event in found:
        if json:
            print_json_line(_fields(event))
        else:
            out().print("\n".join(_lines(event)), markup=False, highlight=False, soft_wrap=True)
    return len(found)


def _lines(event: RunEvent) -> list[str]:
    """One event in the width of a terminal, its text below itself where it is long."""
    when = datetime.fromtimestamp(event.time_s).strftime("%H:%M:%S")
    head = f"step {event.step:<7} {when}  {visible(event.event):<8} "
    return textwrap.wrap(visible(event.text), _WIDTH, initial_indent=head, subsequent_indent=" " * len(head))
