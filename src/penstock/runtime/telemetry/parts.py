"""What a step's time went into on a rank, and which part of it is the largest cause that a step took longer, or less long, than predicted.

    step   │ planning │ load │ forward │ backward │ transfers │ forward … │ update │ host │ pauses │

Every rank's parts add up to the same step, so what one rank does too slowly the others show as waiting. A cause is looked for on the rank
whose own work is furthest off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["HOST_BOUND", "RankTimes", "StepDifference", "StepParts", "largest_cause"]

HOST_BOUND = 0.9
"""From this share of the passes on, in which the host is busy to issue them, it is the host that is slow."""
_EFFECT = "transfers_s"
"""The part in which a rank also waits for others."""


@dataclass(frozen=True)
class StepParts:
    """Seconds of one step on one rank, by what they went into."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    update_s: float = 0.0
    transfers_s: float = 0.0
    """Messages and collectives that compute does not hide, and waiting for other ranks."""
    loading_s: float = 0.0
    """Samples of micro-batches, from memory to the device."""
    host_s: float = 0.0
    """The host, beside all of these; none is predicted, since the costs of passes have the host's time in them."""
    planning_s: float = 0.0
    """Waiting for the step's program."""
    pauses_s: float = 0.0
    """Between steps: evaluations, checkpoints, and agreeing whether to go on."""

    @property
    def total_s(self) -> float:
        """The step, and the pause after it."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class RankTimes:
    """Measured times of one rank, as means over its steps."""

    parts: StepParts
    issuing_s: float | None = None
    """Of the passes, how long the host took to issue them; None where it is the host that computes."""
    peak_bytes: float | None = None
    """Most memory of the device in use; None where it is not measured, as on a processor."""


@dataclass(frozen=True)
class StepDifference:
    """The part that differs most in the direction in which the whole step differs."""

    part: str
    """A field of `StepParts`, without its unit."""
    rank: int
    measured_s: float
    """The whole step."""
    predicted_s: float
    difference_s: float
    """Of the part alone; below 0 where it took less than predicted."""
    is_host: bool = False
    """Whether passes are slow because the host issues them no faster."""


def largest_cause(predicted: Mapping[int, StepParts], measured: Mapping[int, RankTimes]) -> StepDifference | None:
    """The largest cause of a difference between predicted and measured steps; None where nothing was measured, or nothing differs."""
    differences = {rank: _difference(predicted[rank], own.parts) for rank, own in measured.items()}
    slowest = max(measured, key=lambda rank: measured[rank].parts.total_s, default=None)
    if slowest is None or not (whole_s := sum(differences[slowest].values())):
        return None
    sign = 1.0 if whole_s > 0 else -1.0
    rank = max(differences, key=lambda rank: sign * (sum(differences[rank].values()) - differences[rank][_EFFECT]))
    name, difference_s = max(differences[rank].items(), key=lambda part: sign * part[1])
    own = measured[rank]
    passes_s = own.parts.forward_s + own.parts.backward_s
    is_host = name in ("forward_s", "backward_s") and own.issuing_s is not None and own.issuing_s >= HOST_BOUND * passes_s
    return StepDifference(name.removesuffix("_s"), rank, own.parts.total_s, predicted[rank].total_s, difference_s, is_host and sign > 0)


def _difference(predicted: StepParts, measured: StepParts) -> dict[str, float]:
    before = asdict(predicted)
    return {name: time_s - before[name] for name, time_s in asdict(measured).items()}
