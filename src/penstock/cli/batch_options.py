"""Options of the verbs that plan batches, with which parts of the planner are switched to simpler ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import BIG, within

if TYPE_CHECKING:
    from penstock.batching.ways import BatchWays

__all__ = ["MemoryLimit", "Order", "Recompute", "Schedule", "Split", "ways_of"]

Order = Annotated[
    str, typer.Option(metavar="hilbert|sorted|tour", help="Order of samples before they are cut; the best known if not given.")
]
Split = Annotated[
    str,
    typer.Option(
        metavar="dynamic|budget|uniform|packed",
        help="How they are cut: by dynamic programming, up to a budget of tokens, equally many padded to the longest, packed rows.",
    ),
]
Schedule = Annotated[
    str,
    typer.Option(
        help="Run them in the order of 1f1b or gpipe (interleaved if the plan is), or made for them: adaptive, greedy, search."
    ),
]
Recompute = Annotated[str, typer.Option(help="The one mode of recomputation, such as none, selective or full with dynapipe:DIR/NAME.")]
MemoryLimit = Annotated[
    float | None, typer.Option(callback=within(0, BIG, above=True), help="Use at most this many GB (10⁹ bytes) of each device.")
]


def ways_of(order: str, split: str, schedule: str, recompute: str, memory_limit: float | None) -> BatchWays:
    """The ways to plan a batch that the options ask for."""
    from penstock.batching.ways import BatchWays

    return BatchWays(order, split, schedule, recompute, float("inf") if memory_limit is None else memory_limit * 1e9)
