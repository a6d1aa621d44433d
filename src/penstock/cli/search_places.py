"""Where `penstock search` writes: the best plan to `--out`, the next ones and its record beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.search_record import record_path
from penstock.files import reserve_output

if TYPE_CHECKING:
    from penstock.plans.plan import Plan

__all__ = ["places_of", "reserve_beside", "write_plans"]


def places_of(path: Path, count: int) -> list[Path]:
    """The files of so many plans, of which the first is in `path`: `plan.json`, `plan.2.json`, `plan.3.json` …"""
    return [path, *(path.with_name(f"{path.stem}.{number}{path.suffix}") for number in range(2, count + 1))]


def reserve_beside(path: Path | None, top: int) -> None:
    """Refuses to write over what the command reads or writes elsewhere; `path` itself was refused as an option."""
    for place in () if path is None else (record_path(path), *places_of(path, top)[1:]):
        reserve_output(place)


def write_plans(path: Path | None, plans: Sequence[Plan]) -> list[Path]:
    """Writes the best plan to `path` and the next ones beside it; the files written."""
    from penstock.files import written_together
    from penstock.plans.schema import write_plan

    paths = [] if path is None else places_of(path, len(plans))
    with written_together():
        for target, plan in zip(paths, plans, strict=False):
            write_plan(target, plan)
    return paths
