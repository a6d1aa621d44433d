"""What a reproduced figure is made of: curves, claims that are checked, and the files it needs.

A figure is a description: `make` computes its `Drawing` from a folder of published data, through searches and simulators that exist for
their own sake. Published numbers are drawn as they are and named so; nothing is fitted to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from penstock.errors import InputError, near_misses, plural
from penstock.processes.states import family_cpu_s
from penstock.reproduce.peers.checkout import Peer, PeerError

__all__ = [
    "Attached", "Claim", "Drawing", "Evidence", "FigureSpec", "Plotted", "Reproduction", "at_least", "at_most", "compared", "reproduced",
    "rows_of", "within",
]  # fmt: skip

Result = TypeVar("Result")
Key = TypeVar("Key")
Place = float | str
"""Where a point stands on the horizontal axis: a number, or a name of a bar."""


@dataclass(frozen=True)
class Plotted:
    """One line or set of bars; None where there is no value."""

    label: str
    x: Sequence[Place]
    y: Sequence[float | None]
    published: bool = False
    """Whether the values are somebody's published ones, not of this run."""


@dataclass(frozen=True)
class Claim:
    """One thing that is expected of a figure, and what was found."""

    what: str
    expected: str
    found: float
    holds: bool


def at_least(what: str, found: float, least: float) -> Claim:
    """A number that should not be below another."""
    return Claim(what, f"≥ {least:g}", float(found), bool(found >= least))


def at_most(what: str, found: float, most: float) -> Claim:
    """A number that should not be above another."""
    return Claim(what, f"≤ {most:g}", float(found), bool(found <= most))


def within(what: str, found: float, published: float, share: float) -> Claim:
    """A number that should be a published one, but for a share of it."""
    return Claim(what, f"{published:g} ± {share:.1%}", float(found), bool(abs(found / published - 1) <= share))


@dataclass(frozen=True)
class Attached:
    """A file beside a figure, such as a plan to run."""

    path: str
    """In the folder of the figure."""
    what: str
    text: str


@dataclass(frozen=True)
class Drawing:
    """A figure that was made: what to draw, and what holds."""

    curves: Sequence[Plotted]
    x_title: str
    y_title: str
    claims: Sequence[Claim] = ()
    kind: Literal["bars", "lines", "points"] = "bars"
    log_x: bool = False
    log_y: bool = False
    diagonal: bool = False
    """Whether a line shows where both axes have the same value."""
    note: str = ""
    """What of it is not from this run, and what it leaves out."""
    attached: Sequence[Attached] = ()
    took_s: float = 0.0
    """Wall seconds of making it; what figures share counts for the first of them."""
    cpu_s: float = 0.0
    """Processor seconds, those of processes that it started and that ended included."""


@dataclass(frozen=True)
class Evidence:
    """The data of one system, whether a short form is enough, and a checkout of the system to run beside ours."""

    folder: Path
    quick: bool = False
    peer: Peer | None = None
    kept: dict[str, object] = field(default_factory=dict, compare=False, repr=False)
    """What one figure computed and another needs as well."""

    def once(self, key: str, work: Callable[[], Result]) -> Result:
        """The result of `work`, done once for all figures of a system."""
        if key not in self.kept:
            self.kept[key] = work()
        return self.kept[key]  # type: ignore[return-value]

    def beside(self, title: str, keys: Iterable[Key], work: Callable[[Peer, Key], Result]) -> tuple[dict[Key, Result], str]:
        """What the system itself finds for each key, once for all figures, and why some have no answer."""
        if self.peer is None:
            return {}, f"{title}'s own answers are of earlier runs; --peer NAME=CHECKOUT runs it beside ours."
        peer = self.peer

        def attempt() -> tuple[dict[Key, Result], str]:
            found: dict[Key, Result] = {}
            failures = []
            for key in keys:
                try:
                    found[key] = work(peer, key)
                except PeerError as error:
                    failures.append(str(error))
            failed = plural(len(failures), "time")
            return found, f"{title} gave no answer {failed}, and earlier ones stand there: {failures[0]}" if failures else ""

        return self.once(f"beside {title}", attempt)


def compared(label: str, places: Sequence[str], found: Mapping[str, float], known: Mapping[str, float]) -> list[Plotted]:
    """A peer's values: those found in this run, and published ones for places that have none."""
    curves = [
        Plotted(label, places, [found.get(place) for place in places]),
        Plotted(label, places, [None if place in found else known.get(place) for place in places], published=True),
    ]
    return [curve for curve in curves if any(y is not None for y in curve.y)]


@dataclass(frozen=True)
class FigureSpec:
    """One figure by its name in the paper, or a word for what is no figure there."""

    name: str
    title: str
    make: Callable[[Evidence], Drawing]
    needs: tuple[str, ...] = ()
    """Files or folders of the data without which it cannot be made."""


@dataclass(frozen=True)
class Reproduction:
    """All figures of one system."""

    name: str
    figures: tuple[FigureSpec, ...]
    origin: str
    """Where its data comes from, and as what files."""

    def chosen(self, names: Sequence[str]) -> tuple[FigureSpec, ...]:
        """The figures of these names; all without any."""
        known = {figure.name: figure for figure in self.figures}
        for name in names:
            if name not in known:
                raise InputError(f"{self.name} has no figure '{name}'. {near_misses(name, known)}")
        return tuple(known[name] for name in names) if names else self.figures

    def missing(self, figure: FigureSpec, folder: Path) -> list[str]:
        """What the folder lacks of what a figure needs."""
        return [need for need in figure.needs if not (folder / need).exists()]

    def why_not(self, figure: FigureSpec, folder: Path) -> str:
        """What to do where data is missing."""
        lacking = ", ".join(self.missing(figure, folder))
        return f"figure {figure.name} of {self.name} needs {lacking} in '{folder}'. {self.origin} Then give the folder with --data."


def reproduced(one: Reproduction, names: Sequence[str], evidence: Evidence) -> Iterator[tuple[FigureSpec, Drawing | str]]:
    """Each figure with its drawing, or with what is missing for it."""
    for figure in one.chosen(names):
        if one.missing(figure, evidence.folder):
            yield figure, one.why_not(figure, evidence.folder)
            continue
        start, cpu = time.perf_counter(), family_cpu_s()
        drawing = figure.make(evidence)
        yield figure, replace(drawing, took_s=time.perf_counter() - start, cpu_s=family_cpu_s() - cpu)


def rows_of(curves: Sequence[Plotted]) -> list[Mapping[str, object]]:
    """Every point as a row: for the CSV file of a figure."""
    return [
        {"series": curve.label, "published": curve.published, "x": x, "y": y}
        for curve in curves for x, y in zip(curve.x, curve.y, strict=True)
    ]  # fmt: skip
