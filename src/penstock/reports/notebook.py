"""A report in a notebook: a sentence, its numbers and one picture, without a script, so that a saved notebook keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from penstock.reports.blocks import Facts, Spans, Stack, Subject, Text
from penstock.reports.pictures import picture_of
from penstock.reports.units import shown

if TYPE_CHECKING:
    from penstock.reports.report import Report

__all__ = ["Framed", "static_html"]

_MOST_BYTES = 200_000
_MOST_SUBJECTS = 3
_HEIGHT_PX = 720


@dataclass(frozen=True)
class Framed:
    """A page that a notebook shows in a frame: its script runs there, apart from the notebook and its origin."""

    html: str

    def _repr_html_(self) -> str:
        """The frame; it may run its own script and save files, and nothing else."""
        return (
            '<iframe title="Penstock report" sandbox="allow-scripts allow-downloads" '
            f'style="width: 100%; height: {_HEIGHT_PX}px; border: 0" srcdoc="{escape(self.html)}"></iframe>'
        )


def static_html(report: Report) -> str:
    """HTML of at most 200 kB; pictures that would go beyond it are left out."""
    parts: list[str] = []
    batches = [Subject("batch", "", (view,)) for view in report.shared if view.name == "batch"]
    for subject in [*report.subjects, *batches][:_MOST_SUBJECTS]:
        for part in _of(subject):
            if sum(map(len, parts)) + len(part) < _MOST_BYTES:
                parts.append(part)
    return f'<div class="penstock">{"".join(parts)}</div>'


def _of(subject: Subject) -> Iterable[str]:
    blocks = [block for view in subject.views for block in view.blocks]
    yield f"<h4>{escape(subject.kind)} {escape(subject.name[:200])}</h4>"
    yield from (f"<p>{escape(block.text[:2000])}</p>" for block in blocks if isinstance(block, Text))
    for block in blocks:
        if isinstance(block, Facts):
            rows = (f"<tr><th>{escape(one.label)}</th><td>{escape(shown(one.value, one.unit))}</td><td>{escape(one.note)}</td></tr>"
                    for one in block.facts)  # fmt: skip
            yield f"<table>{''.join(rows)}</table>"
    for block in blocks:
        if isinstance(block, Stack | Spans) and (drawn := picture_of(block)) is not None:
            svg = drawn.decode()
            yield svg[svg.index("<svg") :]
