"""The report as one HTML file that opens from disk: data, style and scripts inside, nothing loaded, nothing run but these scripts.

    head    a policy that allows the style and the script below by their hashes, and nothing else
    body    a data block of JSON, one for each array, and the modules of `page/` as one script

The modules stay plain ES modules, which a browser or node runs as they are. A page from disk cannot import files, so they are joined here:
each becomes a function that returns what it exports, and takes what it imports from those before it. Strings of the data reach the page as
text alone.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from penstock.reports.blocks import Subject, View
from penstock.reports.columns import Columns

__all__ = ["VIEWER", "document", "page_data", "script"]

VIEWER = "https://ui.perfetto.dev"
"""Where a served page can hand a trace to; a page from disk names no address at all."""

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_PATH = re.compile(r"(?<![^\s'\"`:=(,])(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][^\s/\\'\"`,]+)+[/\\]?")
_LONGEST = 2000
"""Letters of a name that are shown: more would be no name."""


@cache
def script() -> str:
    """All modules of the page as one, each after those that it imports."""
    order: list[str] = []

    def add(name: str) -> None:
        for _, imported in _IMPORT.findall(_asset(f"{name}.js")):
            add(imported)
        if name not in order:
            order.append(name)

    add("page")
    return "\n".join(["const modules = {};", *map(_joined, order)])


def _joined(name: str) -> str:
    source = _asset(f"{name}.js")
    names = ", ".join(exported[1] for exported in _EXPORT.findall(source))
    body = _EXPORT.sub(r"\1", _IMPORT.sub(r"const \1 = modules.\2;", source))
    return f"modules.{name} = (() => {{\n{body}return {{ {names} }};\n}})();"


@cache
def _asset(name: str) -> str:
    return (files("penstock.reports") / "page" / name).read_text(encoding="utf-8")


def document(
    title: str, subjects: Sequence[Subject], shared: Sequence[View], *, with_paths: bool = False, live: str = "", seen: str = ""
) -> str:  # fmt: skip
    """The page. `live` is the address from which a served page hears of what came after the version `seen`; a file has none."""
    import penstock

    data, columns = page_data(subjects, shared, with_paths=with_paths)
    data |= {"title": _plain(title, with_paths), "version": penstock.__version__}
    data |= {"live": live, "seen": seen, "viewer": VIEWER if live else ""}
    style, code = _asset("page.css"), script()
    policy = (
        f"default-src 'none'; script-src {_hash(code)}; style-src {_hash(style)}; img-src data: blob:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if live else "")
    )
    return "\n".join([
        "<!doctype html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">', "<title>Penstock report</title>",
        f"<style>{style}</style>", "</head>", "<body>",
        '<noscript>This report is drawn by a script, which this browser does not run.</noscript>',
        f'<script type="application/json" id="data">{_json(data)}</script>',
        *(f'<script type="text/plain" id="column-{number}">{one}</script>' for number, one in enumerate(columns)),
        f'<script type="module">{code}</script>', "</body>", "</html>", "",
    ])  # fmt: skip


def page_data(subjects: Sequence[Subject], shared: Sequence[View], *, with_paths: bool = False) -> tuple[dict[str, Any], list[str]]:
    """The data of a page, and the texts of its arrays."""
    columns = Columns()
    data = {"subjects": _encoded(list(subjects), columns, with_paths), "shared": _encoded(list(shared), columns, with_paths)}
    texts = [one.pop("data") for one in columns.held]
    return {**data, "columns": columns.held}, texts


def _encoded(value: Any, columns: Columns, with_paths: bool) -> Any:
    """Blocks as plain data that JSON has: arrays by their number, what is no number by its name."""
    if isinstance(value, np.ndarray):
        flat = {"column": columns.add(value.ravel())}
        return flat if value.ndim == 1 else {**flat, "shape": list(value.shape)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _encoded(getattr(value, field.name), columns, with_paths) for field in dataclasses.fields(value)}
        return {"block": type(value).__name__, **fields}
    if isinstance(value, list | tuple):
        return [_encoded(one, columns, with_paths) for one in value]
    if isinstance(value, str):
        return _plain(value, with_paths)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    return value


def _plain(text: str, with_paths: bool) -> str:
    """Text without the folders of whoever wrote it, and no longer than a person reads."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return text if with_paths else _PATH.sub(lambda found: re.split(r"[/\\]", found[0].rstrip("/\\"))[-1], text)


def _json(value: Any) -> str:
    """JSON that ends no script element, whatever strings it holds."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
