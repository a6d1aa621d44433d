"""`penstock replan`: ask a running job to move to another plan."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.console import JsonFlag, err, print_json, say
from penstock.cli.options import BIG, within
from penstock.errors import InfeasibleError, InputError, PenstockError, shell_words

if TYPE_CHECKING:
    from penstock.adapting.events import RunEvent

__all__ = ["replan"]

_PAUSE_S = 0.1
_ERRORS = {error.exit_status: error for error in (PenstockError, InputError, InfeasibleError)}


def replan(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given; the run goes on.")],
    path: Annotated[Path, typer.Option("--plan", metavar="PLAN", help="Plan file to move to: of the same model, batch and devices.")],
    at: Annotated[int, typer.Option(callback=within(0, BIG), help="The first step under the plan; 0: as soon as it can be.")] = 0,
    json: JsonFlag = False,
) -> None:
    """Ask a running job to move to another plan, live, and wait until it has: weights, optimizer state and data position go along.

    Status 2: the plan is not one that this job could have. 3: no room while both plans are held. 1: the move was aborted. In all of these
    training goes on under the old plan.

    Example: penstock replan run --plan other.json --at 500
    """
    from penstock.adapting.asking import ask_for, withdraw
    from penstock.plans.schema import read_plan
    from penstock.runtime.run_folder import plan_of_run

    plan_of_run(run)
    plan = read_plan(path)
    _require_running(run)
    request = ask_for(run, plan, at)
    try:
        told = _answer(run, request, json)
    except (KeyboardInterrupt, SystemExit):  # SIGTERM
        withdraw(run)
        raise
    if told.event == "aborted":
        raise _ERRORS.get(told.status or 1, PenstockError)(f"run '{run}': {told.text}")
    if json:
        print_json({"run": run, "step": told.step, "moved_bytes": told.moved_bytes, "pause_s": told.pause_s})
    else:
        say(f"run '{run}': {told.text}")


def _require_running(run: Path) -> None:
    """Refuses a run that nobody would answer for."""
    from penstock.runtime.run_lock import LOCK, is_held

    lock = run / LOCK
    owner = lock.stat().st_uid if lock.exists() else os.geteuid()
    if owner != os.geteuid():
        raise InputError(f"run '{run}' belongs to user {owner}, and you are user {os.geteuid()}. Ask its owner.")
    if not is_held(run):
        raise InputError(f"run '{run}' is not running on this machine. Go on with it under another plan with --resume.")


def _answer(run: Path, request: str, quiet: bool) -> RunEvent:
    """The event that says what became of a request."""
    from penstock.adapting.asking import withdraw
    from penstock.adapting.events import read_events
    from penstock.runtime.run_lock import is_held

    heard = False
    while True:
        goes_on = is_held(run)  # before events are read: the last may be the answer
        for event in read_events(run):
            if event.request == request and event.event != "asked":
                return event
            if event.request == request and not heard and not quiet:
                heard = True
                say(f"run '{run}' {event.text}", to=err())
        if not goes_on:
            withdraw(run)
            go_on = f"penstock train PLAN … {shell_words('--resume', run)}"
            raise PenstockError(f"run '{run}' ended before it moved. Resume it under the plan: {go_on}")
        time.sleep(_PAUSE_S)
