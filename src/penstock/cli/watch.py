"""`penstock watch`: the report of a run while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import out

__all__ = ["watch"]


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `penstock train --out` was given.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of 127.0.0.1; 0 takes a free one.")] = 0,
) -> None:
    """Serve the report of a run to a browser on this machine, and keep it up to date until Ctrl-C. The run is never touched.

    Example: penstock watch run --port 8123
    """
    from penstock.reports.live import LivePage, serve
    from penstock.runtime.run_folder import plan_of_run

    plan_of_run(run)
    serve(LivePage(run), port, lambda address: out().print(f"watching {run} at {address} (Ctrl-C ends it)", markup=False, soft_wrap=True))
