"""Versions of a stage's weights, for schedules that update them while micro-batches are under way.

    pass       F0  F1  B0  F2  B1  F3  B2 …       stage 0 of 2
    newest      0   0   0   1   1   2   2         updated after each backward pass
    used        0   0   0   1   0   2   1         a backward pass runs with what its forward pass used

A version lives as long as a micro-batch in flight has used it, so there are at most as many as micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd import _unsafe_preserve_version_counter

__all__ = ["WeightStash"]


class WeightStash:
    """The weights of one stage and those older versions of them that are still needed."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._newest = [parameter.data for parameter in self.parameters]
        self._used: dict[int, list[torch.Tensor]] = {}

    def use(self, micro_batch: int) -> None:
        """A forward pass has used the newest version."""
        self._used[micro_batch] = self._newest

    @contextmanager
    def restored(self, micro_batch: int) -> Iterator[None]:
        """The version that the micro-batch's forward pass used is in place, for the last time."""
        self._put(self._used.pop(micro_batch))
        yield
        self._put(self._newest)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The weights may be changed: they are a new version then, unless nobody needs the one before."""
        if any(version is self._newest for version in self._used.values()):
            self._newest = [values.clone() for values in self._newest]
            self._put(self._newest)
        # Graphs of passes under way know a weight by its counter of changes; what they saved is not what changes.
        with _unsafe_preserve_version_counter(tuple(self.parameters)):
            yield

    def abandon(self) -> None:
        """Forgets the micro-batches that are under way; the newest version is in place."""
        self._used.clear()
        self._put(self._newest)

    @property
    def num_versions(self) -> int:
        """Versions of the weights that are in memory."""
        return len({id(version) for version in (self._newest, *self._used.values())})

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.data = value
