"""`penstock reproduce`: the figures of a published system, made again from its data, with what was expected and what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.console import JsonFlag, out, print_json, say, table
from penstock.cli.options import folder_to_write
from penstock.errors import InputError, near_misses

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="aceso, dynapipe, fasop, dynpipe, or all.")],
    figure: Annotated[list[str], typer.Option(help="Only this figure, by its number or name; may be given several times.")] = [],  # noqa: B006
    data: Annotated[Path, typer.Option(help="Folder of published data, with a folder of each system in it.", metavar="DIR")] = Path("data"),
    out_: Annotated[Path, typer.Option("--out", help="Folder for figures and the page.", callback=folder_to_write)] = Path("reproduced"),
    peer: Annotated[
        list[str], typer.Option(help="Run the planner of aceso, fasop or dynapipe beside ours.", metavar="NAME=CHECKOUT")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="Fewer points, in minutes.")] = False,
    json: JsonFlag = False,
) -> None:
    """Make a system's published figures again: SVG, PNG, CSV and result.json of each, and one page with all of them.

    Example: penstock reproduce aceso --figure 8 --data DIR --out figures
    """
    from penstock.reproduce import REPRODUCTIONS, Evidence, reproduced, write_figure, write_page
    from penstock.reproduce.peers import peers_of

    if name != "all" and name not in REPRODUCTIONS:
        raise InputError(f"there are no figures of '{name}'. {near_misses(name, [*REPRODUCTIONS, 'all'])}")
    if name == "all" and figure:
        raise InputError("--figure names a figure of one system; give the system instead of 'all'.")
    peers = peers_of(peer)
    unused = [one for one in peers if name not in ("all", one)]
    if unused:
        raise InputError(f"--peer {unused[0]} has no part in the figures of {name}. Drop it, or reproduce all.")
    results: list[dict[str, Any]] = []
    missing: list[str] = []
    for one in REPRODUCTIONS.values() if name == "all" else (REPRODUCTIONS[name],):
        for spec, made in reproduced(one, figure, Evidence(data / one.name, quick, peers.get(one.name))):
            if isinstance(made, str):
                missing.append(made)
                continue
            results.append(write_figure(out_ / one.name / spec.name, one.name, spec, made))
            if not json:
                say(f"{one.name}, {spec.title}: {results[-1]['verdict']} ({made.took_s:.0f} s, {made.cpu_s:.0f} CPU s)")
    if not results:
        raise InputError(missing[0])
    write_page(out_ / "index.html", results, missing)
    if json:
        print_json({"results": results, "missing": missing})
        return
    rows = [(r["system"], r["figure"], c["what"], c["expected"], f"{c['found']:.4g}", "" if c["holds"] else "does not hold")
            for r in results for c in r["claims"]]  # fmt: skip
    out().print(table("", ["system", "figure", "what", "expected", "found", ""], rows))
    for text in missing:
        say(f"left out: {text}")
    for system in dict.fromkeys(result["system"] for result in results):
        took_s, cpu_s = (sum(result[key] for result in results if result["system"] == system) for key in ("took_s", "cpu_s"))
        say(f"{system}: {took_s:.0f} s in all, {cpu_s:.0f} s of processors")
    say(f"all of it: {out_ / 'index.html'}")
