"""What a profile is measured in: units of work, each saved when it is done, so that a killed run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.models.catalog import TRACED
from penstock.models.ops import Model
from penstock.profiling.module_parts import windows
from penstock.profiling.whole import ROUNDS

__all__ = ["COPIES", "Unit", "units_of"]

COPIES = 3
"""Copies of a repeated block in a measured chain; the inner ones count."""


@dataclass(frozen=True)
class Unit:
    """One piece of profiling work: a sweep over sizes of the chain or over lengths of its attention ops, the chain as a whole, or beside a
    load."""

    model: Model
    sweep: str
    tp: int
    algo: int = 0
    layout: str = "padded"
    load: float = 0.0
    """Processes that keep the device busy meanwhile."""

    @property
    def round(self) -> int:
        """Which of the comparisons with the whole it is; 0 for all else, which comes before them."""
        sweep, _, number = self.sweep.partition(" ")
        return int(number) if sweep == "whole" else 0

    @property
    def name(self) -> str:
        """The name under which the unit is remembered as done."""
        load = f" {self.load:g} busy" if self.load else ""
        return f"{self.model.name} {self.model.dtype} {self.sweep} tp{self.tp} algo{self.algo} {self.layout}{load}"


def units_of(model: Model, tps: Sequence[int], *, on_gpu: bool) -> Iterator[Unit]:
    """All work that a profile of a model consists of, at these degrees of tensor parallelism where the model divides by them."""
    if model.family == TRACED:  # divided parts are modelled
        count = len([*windows(model, COPIES)])
        yield from (Unit(model, f"parts {number}", 1, layout=layout) for number in range(count) for layout in model.layouts)
        return
    degrees = [tp for tp in tps if model.max_tp() % tp == 0]
    for tp in degrees:
        yield Unit(model, "sizes", tp)
        if tp > 1 and any(len(op.splits) > 1 for op in model.distinct_ops):
            yield Unit(model, "sizes", tp, algo=1)
        if any(op.kind == "attention" for op in model.distinct_ops):
            for layout in model.layouts:
                yield Unit(model, "lengths", tp, layout=layout)
        if tp == 1 and on_gpu:
            yield from (Unit(model, f"whole {number}", tp) for number in range(1, ROUNDS + 1))
