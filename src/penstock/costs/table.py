"""The one form in which every cost source answers: arrays over (distinct op, shape, tp, algo, device)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ProfileMissingError
from penstock.models.shapes import Shape

__all__ = ["CostTable", "Floats"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class CostTable:
    """Costs of a model's distinct ops; O ops, S shapes, T tp degrees, A splits (`algo`), D device kinds.

    Times that a source cannot give are infinite, so that a search never chooses them.
    """

    op_names: tuple[str, ...]
    """Distinct ops, axis O."""
    chain: NDArray[np.int32]
    """For each position of the chain, its distinct op."""
    shapes: tuple[Shape, ...]
    tps: tuple[int, ...]
    algos: tuple[int, ...]
    devices: tuple[str, ...]
    forward_s: Floats
    """[O, S, T, A, D] without tensor-parallel collectives where the source can tell them apart."""
    backward_s: Floats
    forward_comm_s: Floats
    """[O, S, T, A, D] tensor-parallel collectives (zero where the source holds them in the op's own time)."""
    backward_comm_s: Floats
    parameters: Floats
    """[O, T, A] weights per rank, in elements."""
    kept_bytes: Floats
    """[O, S, T, A] saved for the backward pass, a tensor shared by neighbours counted at the first that saves it."""
    workspace_bytes: Floats
    """[O, S, T, A] extra during the forward pass."""
    backward_workspace_bytes: Floats
    input_bytes: Floats
    """[O, S, T, A] what a pipeline cut before the op sends, per rank."""
    output_bytes: Floats
    """[O, S, T, A] what a pipeline cut after the op sends, per rank."""
    host_s: Floats = field(default_factory=lambda: np.zeros((0, 0, 3, 0, 0)))
    """[O, S, 3, T, D] what issuing the op takes the host: forward, backward, and forward again when recomputed. Work that is smaller
    than this waits for the host. Empty where the source holds it in the op's own time."""

    def __post_init__(self) -> None:
        o, s, t, a, d = len(self.op_names), len(self.shapes), len(self.tps), len(self.algos), len(self.devices)
        for name in ("forward_s", "backward_s", "forward_comm_s", "backward_comm_s"):
            self._expect(name, (o, s, t, a, d))
        for name in ("kept_bytes", "workspace_bytes", "backward_workspace_bytes", "input_bytes", "output_bytes"):
            self._expect(name, (o, s, t, a))
        self._expect("parameters", (o, t, a))

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        got = getattr(self, name).shape
        if got != shape:
            raise ValueError(f"cost table: {name} has shape {got}, expected {shape}")

    def shape_index(self, shape: Shape) -> int:
        """Position of `shape` on axis S."""
        if shape not in self.shapes:
            raise ProfileMissingError(f"the cost table was not built for {shape}; it holds {len(self.shapes)} shapes.")
        return self.shapes.index(shape)

    def tp_index(self, tp: int) -> int:
        """Position of a tensor-parallel degree on axis T."""
        if tp not in self.tps:
            raise ProfileMissingError(f"costs hold tp {', '.join(map(str, self.tps))}; tp={tp} was asked for.")
        return self.tps.index(tp)

    def device_index(self, device: str) -> int:
        """Position of a device kind on axis D."""
        if device not in self.devices:
            raise ProfileMissingError(f"costs hold devices {', '.join(self.devices)}; '{device}' was asked for.")
        return self.devices.index(device)
