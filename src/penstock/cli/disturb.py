"""`penstock disturb`: slow down a run that goes on, or kill and freeze its ranks, to see what it makes of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.cli.console import err, say
from penstock.cli.options import BIG, slower_ranks, within
from penstock.errors import InputError

__all__ = ["disturb"]

Kind = Literal["kill", "freeze"]


def disturb(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given.")],
    slow: Annotated[
        list[str] | None, typer.Option(metavar="RANK=FACTOR", help="This rank takes so many times as long; repeatable.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(metavar="A-B=FACTOR", help="Messages between two ranks take so many times as long; repeatable.")
    ] = None,
    data: Annotated[
        float | None, typer.Option(metavar="FACTOR", help="Loading samples takes so many times as long as computing with them.")
    ] = None,
    kill: Annotated[
        list[str] | None,
        typer.Option(metavar="RANK[@PHASE]", help="Kill this rank, at once or in a phase (forward, backward, update …); repeatable."),
    ] = None,
    freeze: Annotated[list[str] | None, typer.Option(metavar="RANK[@PHASE]", help="Stop this rank as SIGSTOP does; repeatable.")] = None,
    node: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Kill the supervisor of this node, and its ranks with it; repeatable.")
    ] = None,
    first: Annotated[
        int | None, typer.Option("--from", metavar="STEP", callback=within(0, BIG), help="The first such step; soon if not given.")
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", callback=within(0, BIG), help="How many steps are slower; until the run ends if not given.")
    ] = 0,
) -> None:
    """Slow down ranks, links or data loading of a run that goes on, or kill and freeze its ranks.

    Timed and paced devices slow down by themselves. Beside ranks on a processor run processes that keep it busy; ranks on a GPU keep it
    busy themselves, so that others that share it are not slowed. That goes on until the run ends, --steps are over, or Ctrl-C, and is
    steered so that the factor is about met; the factor that was reached is told at the end. Only timed and paced devices have links and
    data loading that can be slowed.

    Example: penstock disturb run --slow 3=1.5 --steps 100

    Example: penstock disturb run --kill 1@backward
    """
    slows = bool(slow or link or data is not None)
    if not slows and not kill and not freeze and not node:
        raise InputError("there is nothing to do. Give --slow 3=1.5, --link 0-1=4, --data 2, --kill 1, --freeze 1 or --node 1.")
    from penstock.adapting.disturbing import changes_of, require_node, require_rank, running, strike, strike_node
    from penstock.adapting.disturbing import disturb as begin

    slower, links = slower_ranks(slow or []), dict(map(_link, link or []))
    strikes = [*(_strike("kill", text) for text in kill or []), *(_strike("freeze", text) for text in freeze or [])]
    target = running(run)
    # All of it is checked before any of it is done: what has been killed stays so.
    for kind, rank, _ in strikes:
        require_rank(target, kind, rank, first)
    for number in node or []:
        require_node(target, number)
    changes = changes_of(target, slower, links, data, first, steps) if slows else []
    for kind, rank, phase in strikes:
        say(strike(target, kind, rank, phase, first))
    for number in node or []:
        say(strike_node(target, number))
    if changes:
        if not target.clocked:
            err().print("keeping devices busy; Ctrl-C ends it", markup=False)
        begin(target, changes, say)


def _strike(option: Kind, text: str) -> tuple[Kind, int, str]:
    """Parses `--kill 1@backward` into what is done, the rank and the phase."""
    from penstock.runtime.recovering.faults import PHASES

    rank, _, phase = text.partition("@")
    if not re.fullmatch("[0-9]{1,9}", rank) or (phase not in PHASES and phase != "") or text.endswith("@"):
        raise InputError(f"--{option} is '{text}'; a rank such as 1 was expected, or 1@backward. Phases: {', '.join(PHASES)}.")
    return option, int(rank), phase


def _link(text: str) -> tuple[tuple[int, int], float]:
    """Parses `--link 0-1=4` into two ranks and a factor."""
    found = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})=(.+)", text)
    try:
        if found is None:
            raise ValueError
        return (int(found[1]), int(found[2])), float(found[3])
    except ValueError:
        raise InputError(f"--link is '{text}'; two ranks and a factor such as 0-1=4 were expected.") from None
