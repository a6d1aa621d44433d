"""What a search leaves beside its plans (`plan.search.json`): what was asked, why each plan lost, the bound, and how both came about."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.cli.search_answer import SearchAnswer
    from penstock.search import Choice

__all__ = ["Trail", "record_path", "write_record"]

FORMAT, VERSION = "penstock-search", 1


class Trail:
    """The best plan and the bound over the time of a search: a `Watch` that remembers."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.points: list[dict[str, Any]] = []

    def note(self, text: str, best_s: float, bound_s: float) -> None:
        """One thing the engine tells; what changes neither number is only counted by its time."""
        best, bound = (value if math.isfinite(value) else None for value in (best_s, bound_s))
        point = {"after_s": round(time.monotonic() - self._begun, 4), "doing": text, "best_s": best, "bound_s": bound}
        if self.points and (self.points[-1]["best_s"], self.points[-1]["bound_s"]) == (best, bound):
            return
        self.points.append(point)


def record_path(path: Path) -> Path:
    """The file of the record of a search whose best plan is in `path`."""
    return path.with_name(f"{path.stem}.search.json")


def write_record(path: Path, asked: Mapping[str, Any], answer: SearchAnswer, trail: Trail) -> None:
    """Writes the record of a search (`plan.search.json`) beside its best plan, which is in `path`."""
    from penstock.cli.plan_words import choice_row
    from penstock.cli.search_answer import baseline_rows, proof_rows
    from penstock.files import write_json

    outcome, best = answer.outcome, answer.choices[0]
    candidates = [
        {**choice_row(choice, answer.count), "file": file.name, "slower": choice.estimate.time_s / best.estimate.time_s - 1,
         "because": _because(choice, best)}
        for choice, file in zip(answer.choices, answer.files, strict=True)
    ]  # fmt: skip
    write_json(record_path(path), {
        "format": FORMAT, "version": VERSION, "request": dict(asked), "bound_s": outcome.bound_s, "formula_s": outcome.formula_s,
        "gap": outcome.gap, "error": outcome.error, "stopped": outcome.stopped, "candidates": candidates,
        "baselines": baseline_rows(answer.request, outcome) if answer.baselines else [],
        "families": [_finite(row) for row in proof_rows(outcome)],
        "progress": trail.points,
    })  # fmt: skip


def _because(choice: Choice, best: Choice) -> list[dict[str, Any]]:
    """Words for where a plan's iteration differs from the first one's, by the parts of `Estimate.shares`, the largest loss first."""
    mine = dict(best.estimate.shares())
    parts = [(name, time_s - mine.get(name, 0.0)) for name, time_s in choice.estimate.shares()]
    return [{"part": name, "longer_s": longer_s} for name, longer_s in sorted(parts, key=lambda part: -part[1]) if longer_s]


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a part of the space that holds no plan has no bound."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}
