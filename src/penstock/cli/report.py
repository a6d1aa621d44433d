"""`penstock report`: plans, searches, choices of nodes, batches and runs as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.console import JsonFlag, out, print_json
from penstock.cli.options import file_to_write, folder_to_write, parse_steps

__all__ = ["report"]


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="SOURCE...", help="Plans, search records, batches, programs, folders of `pareto` or of runs; any together."),
    ],
    path: Annotated[Path, typer.Option("--out", callback=file_to_write, help="The page to write.")] = Path("report.html"),
    against: Annotated[list[Path] | None, typer.Option(help="Another plan or run, to compare with; may be given again.")] = None,
    steps: Annotated[
        str | None, typer.Option(help="Steps of a run whose timeline is shown (20 or 20-24); if not given, the last ten.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(callback=folder_to_write, help="Also draw every chart into an SVG file here.")] = None,
    tables: Annotated[Path | None, typer.Option("--csv", callback=folder_to_write, help="Also write every table here, as CSV.")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    with_paths: Annotated[bool, typer.Option("--with-paths", help="Keep folders in what is shown; usually only names are.")] = False,
    json: JsonFlag = False,
) -> None:
    """Write one HTML page that opens from disk, without a network: plan, where its time and memory go, candidates, bound, timeline, run.

    Example: penstock report plan.json --out report.html

    Example: penstock report run --against plan.json --steps 20-24
    """
    from penstock.files import write_bytes, write_text, written_together
    from penstock.reports.pictures import pictures_of
    from penstock.reports.report import report_of
    from penstock.reports.tables import tables_of

    found = report_of([*sources, *(against or [])], (None, None) if steps is None else parse_steps(steps))
    page = found.html(with_paths=with_paths)
    written = tables_of(found) if tables is not None else {}
    drawn = pictures_of(found) if figures is not None else {}
    with written_together():
        write_text(path, page)
        for name, text in written.items():
            write_text((tables or path) / name, text)
        for name, picture in drawn.items():
            write_bytes((figures or path) / name, picture)
    views = [view.title for _, view in found.views]
    if json:
        print_json({"out": path, "bytes": len(page.encode()), "views": views, "tables": sorted(written), "figures": sorted(drawn)})
    else:
        out().print(f"wrote {path}: {', '.join(dict.fromkeys(views))}", markup=False, soft_wrap=True)
        for folder, count, what in ((tables, len(written), "tables"), (figures, len(drawn), "figures")):
            if folder is not None:
                out().print(f"wrote {count} {what} to {folder}", markup=False, soft_wrap=True)
    if open_it:
        typer.launch(path.absolute().as_uri())
