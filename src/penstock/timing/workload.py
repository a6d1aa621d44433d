"""What a schedule has to carry: times of actions and transfers, the device of each stage, and the bytes they hold.

A micro-batch's bytes on the device of a stage, from its forward pass to its backward pass (B, or I and W):

    level │              ┌── workspace of F            ┌── of B or I     ┌── of W
          │         ┌────┴─────────── stored ──────────┴────┐            │
          │ message │                                       └── waiting ─┴┐
          │ ┌───────┘                                                     └───
            arrives   F                                  B or I          W
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.errors import InputError

__all__ = ["Contention", "Floats", "Integers", "Workload", "links_of", "read_only", "split_backward", "workload_of"]

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Contention = Literal["none", "pair", "device"]
"""What transfers take turns on: nothing, the link from one device to another, or the sending device."""


@dataclass(frozen=True)
class Workload:
    """Arrays over stages and micro-batches; `workload_of` fills in what is usual and checks them."""

    durations_s: Floats
    """[2 or 4, stages, micro-batches]: F and B, or F, B, I and W."""
    transfers_s: Floats
    """[2, stages - 1, micro-batches]: activations from stage s to s + 1, and their gradients back."""
    devices: tuple[int, ...]
    """The device of each stage."""
    links: Integers
    """[2, stages - 1]: transfers with the same number take turns; those with -1 wait for nothing."""
    overlap: bool
    """Whether a device computes while it sends; otherwise it waits until its transfers have ended."""
    after_s: Floats
    """[stages]: work after a stage's last backward pass (gradients reduced among replicas), on a stream of its own if `overlap`."""
    stored_bytes: Floats
    """[stages, micro-batches]: held from the forward to the backward pass."""
    waiting_bytes: Floats
    """[stages, micro-batches]: what of it is held on until W where the backward pass is split."""
    workspace_bytes: Floats
    """[4, stages, micro-batches]: held beside while F, B, I or W run."""
    message_bytes: Floats
    """[2, stages - 1, micro-batches]: held by the receiver from a transfer's start until F starts, or until B or I ends."""
    base_bytes: Floats
    """[devices]: held all the time (weights and what the optimizer keeps)."""
    limit_bytes: Floats
    """[devices]"""

    @property
    def num_stages(self) -> int:
        """Stages, all chunks of all devices counted."""
        return int(self.durations_s.shape[1])

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one iteration."""
        return int(self.durations_s.shape[2])

    @property
    def num_devices(self) -> int:
        """Devices."""
        return len(self.base_bytes)

    @property
    def splits(self) -> bool:
        """Whether backward passes may be split."""
        return bool(self.durations_s.shape[0] == 4)

    def stages_of(self, device: int) -> list[int]:
        """The stages a device runs, in order."""
        return [stage for stage, own in enumerate(self.devices) if own == device]


def workload_of(
    durations_s: ArrayLike, transfers_s: ArrayLike | None = None, *, devices: Sequence[int] | None = None,
    contention: Contention | ArrayLike = "none", overlap: bool = True, after_s: ArrayLike = 0.0, stored_bytes: ArrayLike = 0.0,
    waiting_bytes: ArrayLike | None = None, workspace_bytes: ArrayLike = 0.0, message_bytes: ArrayLike = 0.0,
    base_bytes: ArrayLike = 0.0, limit_bytes: ArrayLike = np.inf,
) -> Workload:  # fmt: skip
    """A checked workload: numbers stand for whole arrays, each stage has a device of its own unless `devices` says otherwise.

    `contention` may also be the array `links`. What waits for W is all that is stored, unless given.
    """
    durations = read_only(durations_s)
    if durations.ndim != 3 or durations.shape[0] not in (2, 4) or 0 in durations.shape:
        raise InputError(f"workload: durations have shape {durations.shape}; expected (2 or 4, stages, micro-batches).")
    _, stages, count = durations.shape
    own = tuple(range(stages)) if devices is None else tuple(int(device) for device in devices)
    num_devices = _count_devices(own, stages)
    cuts = (2, stages - 1, count)
    stored = _array("stored_bytes", stored_bytes, (stages, count))
    links = links_of(own, contention) if isinstance(contention, str) else np.asarray(contention, dtype=np.int64)
    if links.shape != (2, stages - 1) or links.min(initial=0) < -1 or links.max(initial=-1) >= links.size:
        raise InputError(f"workload: links are {links.tolist()}; expected 2 × {stages - 1} numbers from -1 to {2 * stages - 3}.")
    found = Workload(
        durations_s=_array("durations_s", durations, durations.shape),
        transfers_s=_array("transfers_s", 0.0 if transfers_s is None else transfers_s, cuts),
        devices=own,
        links=np.ascontiguousarray(links),
        overlap=overlap,
        after_s=_array("after_s", after_s, (stages,)),
        stored_bytes=stored,
        waiting_bytes=_array("waiting_bytes", stored if waiting_bytes is None else waiting_bytes, (stages, count)),
        workspace_bytes=_array("workspace_bytes", workspace_bytes, (4, stages, count)),
        message_bytes=_array("message_bytes", message_bytes, cuts),
        base_bytes=_array("base_bytes", base_bytes, (num_devices,)),
        limit_bytes=_array("limit_bytes", limit_bytes, (num_devices,), finite=False),
    )
    if (found.waiting_bytes > stored).any():
        raise InputError("workload: waiting_bytes are part of stored_bytes, but larger somewhere.")
    return found


def read_only(values: ArrayLike) -> Floats:
    """The values as the clocks take them. Arrays that may be written are of another type to a kernel, which would be compiled again for
    every mixture of both."""
    array = np.ascontiguousarray(values, dtype=np.float64).view()
    array.flags.writeable = False
    return array


def _array(name: str, values: ArrayLike, shape: tuple[int, ...], finite: bool = True) -> Floats:
    """The values in this shape, numbers and leading axes of length one stretched."""
    array = np.asarray(values, dtype=np.float64)
    try:
        array = read_only(np.broadcast_to(array, shape))
    except ValueError:
        raise InputError(f"workload: {name} has shape {array.shape}; expected {shape}.") from None
    if np.isnan(array).any() or (array < 0).any() or (finite and np.isinf(array).any()):
        raise InputError(f"workload: {name} holds numbers that are negative, infinite or none at all.")
    return array


def _count_devices(devices: tuple[int, ...], num_stages: int) -> int:
    if len(devices) != num_stages or set(devices) != set(range(max(devices, default=0) + 1)):
        raise InputError(f"workload: devices are {list(devices)}; expected one for each of {num_stages} stages, all from 0 on in use.")
    return max(devices) + 1


def links_of(devices: Sequence[int], contention: str) -> Integers:
    """The number of what each transfer takes turns on; -1 between stages of one device."""
    if contention not in ("none", "pair", "device"):
        raise InputError(f"contention '{contention}' is not known. Known: none, pair, device.")
    numbers: dict[tuple[int, ...], int] = {}
    links = np.full((2, max(0, len(devices) - 1)), -1, dtype=np.int64)
    for cut in range(links.shape[1]):
        before, after = devices[cut], devices[cut + 1]
        for direction, ends in enumerate(((before, after), (after, before))):
            if contention != "none" and before != after:
                links[direction, cut] = numbers.setdefault(ends if contention == "pair" else ends[:1], len(numbers))
    return links


def split_backward(durations_s: ArrayLike, weight_s: ArrayLike) -> Floats:
    """Durations of F, B, I and W from those of F and B, and the part of B that is weight gradients."""
    forward, backward = np.asarray(durations_s, dtype=np.float64)
    weight = np.broadcast_to(np.asarray(weight_s, dtype=np.float64), backward.shape)
    if (weight > backward).any():
        raise InputError("split_backward: weight gradients are part of the backward pass, but take longer somewhere.")
    return np.stack([forward, backward, backward - weight, weight])
