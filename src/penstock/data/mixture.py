"""The endless stream of samples that training draws from: tasks mixed by weight, shuffled anew in every epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.data.permutation import shuffled
from penstock.errors import InputError

__all__ = ["Mixture", "Task", "apportion"]

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """Samples `start` to `stop` of a data set; `weight` is its share of the stream, None: its share of the samples."""

    name: str
    start: int
    stop: int
    weight: float | None = None

    @property
    def size(self) -> int:
        """The number of its samples."""
        return self.stop - self.start


@dataclass(frozen=True)
class Mixture:
    """Which sample stands at each position of the stream.

    An epoch has as many positions as there are samples. Without weights each sample comes once in it; with weights a task has its
    share of the positions, filled from its own shuffled order, which goes on where the epoch before left it.
    """

    tasks: tuple[Task, ...]
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not self.epoch_size:
            raise InputError("there are no samples to draw from.")
        weighted = [task for task in self.tasks if task.weight is not None]
        if weighted and len(weighted) < len(self.tasks):
            raise InputError(f"{len(weighted)} of {len(self.tasks)} tasks have a weight; give one to all or to none.")
        for task in weighted:
            if task.weight is None or not 0 <= task.weight < float("inf"):
                raise InputError(f"the weight of task '{task.name}' is {task.weight}; it must be zero or more.")
            if task.weight and not task.size:
                raise InputError(f"task '{task.name}' has weight {task.weight}, but no samples.")
        if weighted and not sum(task.weight or 0 for task in weighted):
            raise InputError("all tasks have weight zero: there is nothing to draw.")

    @property
    def epoch_size(self) -> int:
        """Positions in one epoch: as many as there are samples."""
        return sum(task.size for task in self.tasks)

    def shares(self) -> list[int]:
        """The number of positions of an epoch that each task has; they sum to its size."""
        if all(task.weight is None for task in self.tasks):
            return [task.size for task in self.tasks]
        return apportion(self.epoch_size, [task.weight or 0.0 for task in self.tasks])

    def samples(self, positions: npt.ArrayLike) -> Indices:
        """The samples at these positions of the stream."""
        places = np.asarray(positions, np.int64)
        epochs = places // self.epoch_size
        result = np.empty(places.shape, np.int64)
        for epoch, here in _groups(epochs):
            result[here] = self._of_epoch(places[here] - epoch * self.epoch_size, epoch)
        return result

    def _of_epoch(self, places: Indices, epoch: int) -> Indices:
        if self.shuffle:
            places = shuffled(places, self.epoch_size, self.seed, epoch)
        shares = self.shares()
        ends = np.cumsum(shares)
        owners = np.searchsorted(ends, places, side="right")
        result = np.empty(places.shape, np.int64)
        for index, here in _groups(owners):
            drawn = places[here] - (ends[index] - shares[index]) + epoch * shares[index]
            result[here] = self.tasks[index].start + self._of_task(index, drawn)
        return result

    def _of_task(self, index: int, drawn: Indices) -> Indices:
        """The samples of a task that its n-th draws give: round after round over all of them, each in another order."""
        size = self.tasks[index].size
        if not self.shuffle or self.tasks[index].weight is None:  # then a draw is a sample of this epoch, in shuffled order already
            return drawn % size
        rounds, places = np.divmod(drawn, size)
        result = np.empty(drawn.shape, np.int64)
        for number, here in _groups(rounds):
            result[here] = shuffled(places[here], size, self.seed, number, index)
        return result


def _groups(keys: npt.NDArray[np.int64]) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Each key that occurs, and where it does."""
    order = np.argsort(keys, kind="stable")
    if len(order):
        for here in np.split(order, np.flatnonzero(np.diff(keys[order])) + 1):
            yield int(keys[here[0]]), here


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole parts of `total` in proportion to weights, the largest remainders rounded up."""
    exact = [total * (weight / sum(weights)) for weight in weights]
    parts = [int(part) for part in exact]
    for index in sorted(range(len(parts)), key=lambda index: (parts[index] - exact[index], index))[: total - sum(parts)]:
        parts[index] += 1
    return parts
