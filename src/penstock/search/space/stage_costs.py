"""One way to run a stage, and what every op of the chain costs under it: the arrays that all programmes over stages read.

Costs come from an oracle (tables of another planner, a profile, the roofline) as one `OptionCosts` for each `StageOption`; the programmes
know nothing of where they come from, and count memory and time in whatever units the oracle has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from penstock.costs.table import Floats

__all__ = ["DevicePool", "Ints", "OptionCosts", "StageOption", "sums_before"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage: its devices and how they divide the work."""

    num_devices: int
    tp: int
    dp: int
    pool: int = 0
    """Which of the pools of devices it takes them from."""
    sequence: bool = False
    """Whether tokens are divided between products (sequence parallelism), with tp above 1."""
    zero: int = 1
    """Level of ZeRO where several ranks hold the same weights; above 1 it is the only stage."""


@dataclass(frozen=True, slots=True)
class DevicePool:
    """Equal devices in equal nodes, with what each can hold."""

    num_devices: int
    per_node: int
    memory_limit: float

    def with_share(self, share: float) -> DevicePool:
        """With a share of the memory."""
        return replace(self, memory_limit=share * self.memory_limit)


@dataclass(frozen=True)
class OptionCosts:
    """Costs of every op of the chain under one option, per micro-batch of the stage; [N] unless said otherwise."""

    option: StageOption
    forward: Floats
    compute: Floats
    """Forward and backward."""
    kept: Floats
    """Held until the backward pass, unless recomputed."""
    weights: Floats
    forward_reserve: Floats
    backward_reserve: Floats
    entering: Floats
    """Memory of a stage's input if it starts at the op."""
    enter: Floats
    """[2, N + 1] time of the message before op i, inside a node and across nodes."""
    leave: Floats
    """[2, N + 1] time of the message after op j - 1."""
    algos: tuple[int, ...] = ()
    """The split of each op, where it is not 0 for all."""
    hidden_fill_s: Floats | None = None
    """Time of each op that zero-bubble hides in the fill and drain of the pipeline; it does not count in the sum of stages."""
    passed: Floats | None = None
    """What of `kept` the next stage keeps instead, if the op is the last of its stage."""
    light: NDArray[np.bool_] | None = None
    """Ops that need not run again where they end a recomputed run, since they keep no more than their input; none unless told."""

    open_end: NDArray[np.bool_] | None = None
    """Ops that are recomputed only together with the op behind them, whose forward time has theirs; none unless told."""

    @property
    def not_kept(self) -> Floats:
        """`passed`, or nothing."""
        return np.zeros_like(self.kept) if self.passed is None else self.passed

    @property
    def hidden(self) -> Floats:
        """`hidden_fill_s`, or nothing."""
        return np.zeros_like(self.compute) if self.hidden_fill_s is None else self.hidden_fill_s

    @cached_property
    def ending(self) -> Floats:
        """Forward time of each op as the last one of a recomputed run."""
        ending = self.forward if self.light is None else np.where(self.light, 0.0, self.forward)
        # More than running all ops again: whatever a run that ended here saves, a longer one saves for less.
        return ending if self.open_end is None else np.where(self.open_end, 2 * self.forward.sum(), ending)


def sums_before(amounts: Sequence[Floats]) -> Floats:
    """[C, N + 1] the sum of all ops before an op, option by option."""
    return np.concatenate([np.zeros((len(amounts), 1)), np.cumsum(np.stack(amounts), axis=1)], axis=1)
