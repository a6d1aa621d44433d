"""What a run decides besides its plan: learning rate, update rule, clipping, seed. Without torch, so that commands can ask cheaply."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import InputError
from penstock.schedules.rules import SCHEDULES

__all__ = ["VECTORS", "LearningRate", "OptimizerSettings", "TrainingSettings"]

VECTORS = "vectors"
"""What stands for all weights of one dimension where weights without decay are named."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """Rises from 0 to `peak` over `warmup_steps`, then stays or falls to `peak` × `end_share` at `total_steps`.

    >>> [round(LearningRate(1.0, warmup_steps=2, total_steps=6, decay="linear").at(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    peak: float = 3e-4
    warmup_steps: int = 0
    total_steps: int = 0
    """Where the fall ends; needed unless `decay` is constant."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    end_share: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise InputError(f"the learning rate is {self.peak}; a number above 0 was expected.")
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise InputError(
                f"the learning rate falls ({self.decay}) until step {self.total_steps}, but rises until step {self.warmup_steps}. "
                "Use fewer warm-up steps, or more steps."
            )

    def at(self, step: int) -> float:
        """The rate of step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        left = 1.0 - done if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.peak * (self.end_share + (1.0 - self.end_share) * left)


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """AdamW, LAMB or SGD, with all that it needs besides gradients and the learning rate."""

    kind: Literal["adamw", "lamb", "sgd"] = "adamw"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    """SGD only."""
    no_decay: tuple[str, ...] = ()
    """Weights that do not decay: those of one dimension (`vectors`: biases, norms), and those with one of these words in their names."""

    def decays(self, name: str, num_dimensions: int) -> bool:
        """Whether a weight decays, by its name in checkpoints and the dimensions of the whole tensor."""
        return not any(num_dimensions <= 1 if word == VECTORS else word in name for word in self.no_decay)


@dataclass(frozen=True)
class TrainingSettings:
    """Learning rate, update rule, clipping and seed: what decides a run's losses besides its batches."""

    rate: LearningRate = field(default_factory=LearningRate)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip_norm: float | None = 1.0
    """Gradients are scaled down where their global norm is larger; None: never."""
    seed: int = 0
    """Decides initial weights and dropout."""
    on_nan: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradients that are not finite: end the run, or drop the update and go on."""

    deterministic: bool = False
    """On a GPU: two runs give the same bits, at the price of slower kernels where the fast ones add in any order."""

    def __post_init__(self) -> None:
        if self.on_nan not in ("stop", "skip"):
            raise InputError(f"--on-nan is '{self.on_nan}'; stop or skip was expected.")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"clip_norm is {self.clip_norm}; a number above 0 was expected, or none.")

    def require_suits(self, schedule: str) -> None:
        """Refuses what a schedule cannot do."""
        if not SCHEDULES[schedule].asynchronous:
            return
        if self.clip_norm is not None:
            raise InputError(
                f"gradients are to be clipped to a norm of {self.clip_norm:g}, but under schedule '{schedule}' no rank knows those of all "
                "stages. Use --clip 0."
            )
        if self.optimizer.kind == "lamb":
            raise InputError(f"under schedule '{schedule}' stages update by themselves, but LAMB needs norms over all ranks. Use adamw.")
        if self.on_nan != "stop":
            raise InputError(f"under schedule '{schedule}' stages update by themselves, so no update can be dropped. Use --on-nan stop.")
