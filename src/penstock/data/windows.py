"""Where the pipeline of an asynchronous plan is drained: between two such steps one program holds all global batches, without a break.

    steps     0 … 9 │ 10 11 │ 12 … 21 │ 22 23 │ 24 …      ten batches at most, and an evaluation after every twelve steps
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Drains"]


@dataclass(frozen=True)
class Drains:
    """The steps before which the pipeline of an asynchronous plan is empty.

    They follow from the settings alone, not from what happens: every process knows them, whenever it began.
    """

    most: int = 1
    """Steps between two of them."""
    every: tuple[int, ...] = ()
    """Before all multiples of these; 0 has none."""
    at: tuple[int, ...] = ()
    """Before these besides."""

    def after(self, step: int) -> int:
        """The first one after a step: where the program that begins with that step ends.

        >>> drains, step = Drains(10, every=(12,), at=(25,)), 0
        >>> [step := drains.after(step) for _ in range(6)]
        [10, 12, 22, 24, 25, 35]
        """
        needed = [multiple for number in self.every if number for multiple in (step // number * number, (step // number + 1) * number)]
        needed += [0, *self.at]
        since = max(one for one in needed if one <= step)
        return min([since + ((step - since) // self.most + 1) * self.most, *(one for one in needed if one > step)])
