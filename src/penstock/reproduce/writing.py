"""Files of a reproduced figure (SVG, PNG, CSV, result.json), and the page that gathers all of them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from penstock.errors import plural
from penstock.files import csv_text, write_bytes, write_json, write_text
from penstock.reproduce.drawing import drawn
from penstock.reproduce.figures import Drawing, FigureSpec, rows_of

__all__ = ["write_figure", "write_page"]

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}img{max-width:100%}"
    "td,th{text-align:left;padding:.1rem .8rem .1rem 0}.no{color:#b00020}.note{color:#555}"
)


def write_figure(folder: Path, system: str, figure: FigureSpec, drawing: Drawing) -> dict[str, Any]:
    """Writes one figure into a folder of its own; returns what `result.json` holds."""
    title = f"{system}, {figure.title}"
    for form in ("svg", "png"):
        write_bytes(folder / f"figure.{form}", drawn(title, drawing, form))
    columns = ("series", "published", "x", "y")
    write_text(folder / "figure.csv", csv_text(columns, ([row[name] for name in columns] for row in rows_of(drawing.curves))))
    claims = [{"what": c.what, "expected": c.expected, "found": c.found, "holds": c.holds} for c in drawing.claims]
    verdict = "shown" if not claims else "holds" if all(c.holds for c in drawing.claims) else "does not hold"
    result = {
        "system": system, "figure": figure.name, "title": figure.title, "verdict": verdict, "claims": claims, "note": drawing.note,
        "files": [{"path": one.path, "what": one.what} for one in drawing.attached],
        "published": sorted({curve.label for curve in drawing.curves if curve.published}), "took_s": drawing.took_s, "cpu_s": drawing.cpu_s,
    }  # fmt: skip
    write_json(folder / "result.json", result)
    for one in drawing.attached:
        write_text(folder / one.path, one.text)
    return result


def write_page(path: Path, results: Sequence[dict[str, Any]], missing: Sequence[str]) -> None:
    """One page with every figure, its verdict and its numbers; figures that lack data are named with what to do."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Reproduced figures</title><style>{_STYLE}</style>",
             "<h1>Reproduced figures</h1>"]  # fmt: skip
    for result in results:
        at = f"{result['system']}/{result['figure']}"
        parts.append(f"<h2>{escape(result['system'])}: {escape(result['title'])}</h2><img src='{escape(at)}/figure.svg' alt=''>")
        rows = "".join(
            f"<tr{'' if c['holds'] else ' class=no'}><td>{escape(c['what'])}<td>{escape(c['expected'])}<td>{c['found']:.4g}"
            f"<td>{'holds' if c['holds'] else 'does not hold'}</tr>" for c in result["claims"]
        )  # fmt: skip
        parts.append(f"<table><tr><th>what<th>expected<th>found<th></tr>{rows}</table>" if rows else "")
        took = f"Made in {result['took_s']:.0f} s, {result['cpu_s']:.0f} s of processors."
        parts.append(f"<p class=note>{escape(result['note'])} {took}</p>")
        files = "".join(f"<li><a href='{escape(at)}/{escape(one['path'])}'>{escape(one['path'])}</a>: {escape(one['what'])}"
                        for one in result["files"])  # fmt: skip
        parts.append(f"<details><summary>{plural(len(result['files']), 'file')}</summary><ul>{files}</ul></details>" if files else "")
    parts += [f"<p class=no>{escape(text)}</p>" for text in missing]
    write_text(path, "\n".join(part for part in parts if part) + "\n")
