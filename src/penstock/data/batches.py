"""Global batches: which samples each training step takes, by count or by token budget, from lengths alone.

Every process that asks for step s gets the same samples, whatever the number of ranks, and without having drawn the steps
before (by count), or by reading their lengths once (by tokens; a saved state spares even that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.mixture import Mixture
from penstock.errors import InputError, plural

__all__ = ["GlobalBatch", "GlobalBatches", "Lengths"]

Lengths = Sequence[npt.NDArray[np.integer]]
"""For each side (input, target) the length of every sample."""

_CHUNK = 1 << 12
_SWEEP = 1 << 20


@dataclass(frozen=True, eq=False)
class GlobalBatch:
    """The samples of one step and their lengths after truncation."""

    step: int
    epoch: int
    """The epoch of its first sample."""
    samples: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    """(samples, sides)"""

    @property
    def num_tokens(self) -> int:
        """Tokens of all sides."""
        return int(self.lengths.sum(dtype=np.int64))


@dataclass(frozen=True, eq=False)
class GlobalBatches:
    """All steps of a training run; `batches[step]` draws one, iterating goes on for ever.

    Give `samples_per_batch`, or `tokens_per_batch`: a batch then ends before the sample that would exceed the budget. `limits` truncate
    samples.
    """

    lengths: Lengths
    mixture: Mixture
    samples_per_batch: int | None = None
    tokens_per_batch: int | None = None
    limits: Limits = NO_LIMITS
    _starts: dict[int, int] = field(default_factory=lambda: {0: 0}, init=False, repr=False)
    """Step to its first position in the stream, where known."""

    def __post_init__(self) -> None:
        if (self.samples_per_batch is None) == (self.tokens_per_batch is None):
            raise InputError("a global batch has a number of samples or a budget of tokens: give one of the two.")
        for name, value in (("samples", self.samples_per_batch), ("tokens", self.tokens_per_batch)):
            if value is not None and value < 1:
                raise InputError(f"a global batch of {value} {name} holds nothing; give at least 1.")
        if not self.limits.suit(len(self.lengths)):
            raise InputError(f"{self.limits} do not suit data with {plural(len(self.lengths), 'side')}; each must be at least 1.")
        if self.tokens_per_batch is not None:
            self._check_budget(self.tokens_per_batch)

    def _check_budget(self, budget: int) -> None:
        """Refuses at once what would fail at some later step: a sample that no batch can hold."""
        if self.limits.most(len(self.lengths)) <= budget:
            return
        for start in range(0, len(self.lengths[0]), _SWEEP):
            totals = self._totals(slice(start, start + _SWEEP))
            if totals.max() > budget:
                worst = int(totals.argmax())
                raise InputError(
                    f"sample {start + worst} has {totals[worst]} tokens, more than a batch of {budget}. "
                    "Truncate it, or take a larger budget."
                )

    def __getitem__(self, step: int) -> GlobalBatch:
        if step < 0:
            raise IndexError(f"step {step} lies before the first")
        start, stop = self._bounds(step)
        samples = self.mixture.samples(np.arange(start, stop))
        return GlobalBatch(step, start // self.mixture.epoch_size, samples, self._truncated(samples))

    def state(self, step: int) -> dict[str, int]:
        """State for a checkpoint, so that a run can go on at `step` at once."""
        return {"step": step, "position": self._bounds(step)[0], "seed": self.mixture.seed, "epoch_size": self.mixture.epoch_size}

    def restore(self, state: Mapping[str, int]) -> None:
        """Takes a kept state, if it is one of this data and seed."""
        for name, mine in (("seed", self.mixture.seed), ("epoch_size", self.mixture.epoch_size)):
            if state.get(name) != mine:
                raise InputError(f"the run to resume had {name} {state.get(name)}, this one has {mine}. Use the same data and seed.")
        self._starts[int(state["step"])] = int(state["position"])

    def _bounds(self, step: int) -> tuple[int, int]:
        if self.samples_per_batch is not None:
            return step * self.samples_per_batch, (step + 1) * self.samples_per_batch
        if step + 1 not in self._starts or step not in self._starts:
            self._scan(step)
        return self._starts[step], self._starts[step + 1]

    def _scan(self, step: int) -> None:
        """Finds where steps begin, at least up to the end of `step`, from the last known step before it."""
        known, chunk = max(found for found in self._starts if found <= step), _CHUNK
        budget = self.tokens_per_batch or 0
        while known <= step:
            first = self._starts[known]
            filled = np.cumsum(self._totals(self.mixture.samples(np.arange(first, first + chunk))))
            spent, before = 0, known
            while (end := int(np.searchsorted(filled, spent + budget, side="right"))) < chunk:
                known, spent = known + 1, int(filled[end - 1])
                self._starts[known] = first + end
            if known == before:
                if chunk >= self.mixture.epoch_size and not filled[-1]:
                    raise InputError("no sample has any tokens: a budget of tokens is never filled.")
                chunk *= 2

    def _truncated(self, samples: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.int32]:
        return np.stack(self.limits.kept([lengths[samples] for lengths in self.lengths]), axis=1).astype(np.int32)

    def _totals(self, samples: npt.NDArray[np.int64] | slice) -> npt.NDArray[np.int64]:
        totals: npt.NDArray[np.int64] = self._truncated(samples).sum(axis=1, dtype=np.int64)
        return totals
