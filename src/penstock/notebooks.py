"""What a notebook shows of plans, batches, timelines and results: at once what a saved notebook keeps, and the whole page on request.

The room `reports` makes both. It stands on the rooms whose objects it shows, and is looked up by name when somebody looks.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from typing import Any

from penstock.errors import PenstockError

__all__ = ["Shown"]

_LONGEST = 2000


class Shown:
    """An object with a report of its own."""

    def _repr_html_(self) -> str:
        """A sentence, numbers and pictures, without a script; where there can be none, such as without a profile, the reason."""
        try:
            return str(self._report()._repr_html_())
        except PenstockError as error:
            return f"<pre>{escape(repr(self)[:_LONGEST])}</pre><p>{escape(str(error))}</p>"

    def report(self) -> Any:
        """The whole page, in a frame of its own: zoom, sort, save."""
        return self._report().framed()

    def _report(self) -> Any:
        return import_module("penstock.reports.report").report(self)
