"""`penstock join`: this machine takes the place of a node that a run has lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.options import BIG, within
from penstock.errors import InputError, plural

__all__ = ["join"]

_REPLACED, _RESUMED = ("--node-rank", "--master"), "--resume"


def join(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given; all nodes see it.")],
    node_rank: Annotated[
        int | None, typer.Option(metavar="R", callback=within(0, BIG), help="Which node to be; the first that is missing if not given.")
    ] = None,
) -> None:
    """Join a run on several nodes that goes on without one of them: this machine starts the ranks of the missing node, and training goes on
    with it from the next copies on.

    It does what the first node was asked to, from the same folder; another version of Penstock, another plan or other data is refused. The
    job's key has to be in the environment, as on the other nodes.

    Example: penstock join run
    """
    from penstock.cli.main import run as run_command
    from penstock.runtime.checkpoints.folder import latest_checkpoint
    from penstock.runtime.nodes.succession import read_led
    from penstock.runtime.run_folder import CHECKPOINTS, plan_of_run

    plan_of_run(run)
    led = read_led(run)
    if led is None:
        raise InputError(f"run '{run}' is not led by a node: it has ended, or was started on one machine, without --node-rank.")
    if not led.command:
        raise InputError(f"run '{run}' was not started from a command line. Start the node as the others were, with its --node-rank.")
    missing = [node for node in range(led.num_nodes) if node not in led.nodes]
    if node_rank is None and not missing:
        raise InputError(f"run '{run}' has all of its {plural(led.num_nodes, 'node')}. There is none to take the place of.")
    number = missing[0] if node_rank is None else node_rank
    newest = latest_checkpoint(run.resolve() / CHECKPOINTS)
    try:
        os.chdir(led.folder)
    except OSError as error:
        raise InputError(f"run '{run}' was started in '{led.folder}', which this machine cannot enter: {error.strerror}. Start the node as "
                         f"the others were, with --node-rank {number}.") from None  # fmt: skip
    host = f"[{led.host}]" if ":" in led.host else led.host
    raise typer.Exit(run_command([*_others(led.command, newest), "--node-rank", str(number), "--master", f"{host}:{led.port}"]))


def _others(words: Sequence[str], newest: Path | None = None) -> Iterator[str]:
    """All words but the node and where it was met. What the run was resumed from may have made room for its newest checkpoint."""
    left = iter(words)
    for word in left:
        name, given, value = word.partition("=")
        if name not in (*_REPLACED, _RESUMED):
            yield word
            continue
        value = value if given else next(left, "")
        if name == _RESUMED:
            yield from (name, value if newest is None else str(newest))
