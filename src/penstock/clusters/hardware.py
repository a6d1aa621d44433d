"""The parts of a cluster: devices, links, and the nodes that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import InputError, near_misses, plural

__all__ = ["SLOWED_MARK", "Device", "Link", "Node", "slowest", "unknown_name", "unnamed"]

SLOWED_MARK = " of rank "
"""Between the name of a kind and the rank of a device that has times of its own."""

# A dtype the hardware lacks runs at the rate of the next one it has; `Device.supports` says when that happens. The matrix units of a V100
# or T4 have fp16 alone: bf16 is widened to fp32 there.
_FALLBACK = {"fp8": "bf16", "bf16": "fp32", "fp16": "fp32", "tf32": "fp32"}
_DTYPES = {
    "fp32": "fp32",
    "float32": "fp32",
    "tf32": "tf32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "fp8": "fp8",
}


def unknown_name(what: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is in no catalogue; names that begin like it come before those spelt like it."""
    known = list(known)
    begins = [candidate for candidate in known if name and candidate.lower().startswith(name.lower())]
    hint = f"Did you mean {' or '.join(repr(candidate) for candidate in begins)}?" if begins else near_misses(name, known)
    return InputError(f"{what} {name!r} is not known. {hint}")


def _require_positive(owner: str, **values: float | None) -> None:
    """Every value must be a finite number above zero; None is allowed and means "has none"."""
    for field, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{owner}: {field} is {value!r}, a finite number above 0 was expected.")


@dataclass(frozen=True, slots=True)
class Link:
    """What one device sends in one direction: bandwidth and the delay of an empty message.

    On a switched fabric any two devices get this bandwidth; on a mesh (V100, MI300X) it is the sum over the device's links,
    which collectives reach and a lone pair does not.
    """

    kind: str
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        _require_positive(f"link '{self.kind}'", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s)
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise InputError(f"link '{self.kind}': latency_s is {self.latency_s!r}, 0 or more was expected.")


def slowest(links: Iterable[Link]) -> Link:
    """The link with the least bandwidth; of equals, the one with the longest latency."""
    return min(links, key=lambda link: (link.bandwidth_bytes_per_s, -link.latency_s))


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator kind: memory, dense peak rates (never the sparse ones), and the links it usually comes with."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    fp32_flops_per_s: float
    """Outside the matrix units: what elementwise work and strict fp32 products reach."""
    tf32_flops_per_s: float | None
    fp16_flops_per_s: float | None
    bf16_flops_per_s: float | None
    fp8_flops_per_s: float | None
    intra: Link
    """Between two of them in one node, unless the node says otherwise."""
    inter: Link
    """The network of a whole node of them, unless the node says otherwise."""
    num_rails: int = 1
    """Rails of that network, see `Node.num_rails`."""
    source: str = ""

    def __post_init__(self) -> None:
        _require_positive(
            f"device '{self.name}'",
            memory_bytes=self.memory_bytes,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            num_rails=self.num_rails,
            **{f"{dtype}_flops_per_s": self._rate(dtype) for dtype in ("fp32", "tf32", "fp16", "bf16", "fp8")},
        )

    @property
    def kind(self) -> str:
        """The name of all devices of its kind, also of one that is slower than the others, see `Cluster.slowed`."""
        return self.name.partition(SLOWED_MARK)[0]

    @property
    def is_guess(self) -> bool:
        """Whether its rates come from nowhere: processors differ too much for a datasheet, and some devices are not in the catalogue."""
        return "assumed" in self.source

    def _rate(self, dtype: str) -> float | None:
        rate: float | None = getattr(self, f"{dtype}_flops_per_s")
        return rate

    def supports(self, dtype: str) -> bool:
        """Whether the hardware has `dtype` itself; where not (bf16 on a T4) peak_flops_per_s answers for what emulates it."""
        return self._rate(_dtype(dtype)) is not None

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak rate for `dtype`, or for the dtype that emulates it: fp8 → bf16 → fp32, fp16 → fp32, tf32 → fp32."""
        short = _dtype(dtype)
        while (rate := self._rate(short)) is None:
            short = _FALLBACK[short]
        return rate


def _dtype(name: str) -> str:
    """The short form of a dtype name, torch's own spelling accepted."""
    short = _DTYPES.get(name.lower().removeprefix("torch."))
    if short is None:
        raise unknown_name("dtype", name, _DTYPES)
    return short


@dataclass(frozen=True, slots=True)
class Node:
    """A machine kind: some devices of one kind, the link between them, the network to other nodes, and a price."""

    name: str
    device: Device
    num_devices: int
    intra: Link
    inter: Link
    """The network of the whole node: its devices share this bandwidth when they talk at once."""
    price_usd_per_h: float | None = None
    price_date: str = ""
    price_source: str = ""
    num_rails: int = 1
    """Independent network paths that make up `inter`: one device alone drives one of them."""
    device_ids: tuple[int, ...] = ()
    """Accelerator index of each device in rank order, where that is not simply 0, 1, 2…"""

    def __post_init__(self) -> None:
        _require_positive(f"node '{self.name}'", num_devices=self.num_devices, num_rails=self.num_rails)
        price = self.price_usd_per_h
        if price is not None and not (math.isfinite(price) and price >= 0):
            raise InputError(f"node '{self.name}': price_usd_per_h is {price!r}, 0 or more was expected.")
        if self.device_ids and len(self.device_ids) != self.num_devices:
            raise InputError(f"node '{self.name}': {len(self.device_ids)} device_ids for {plural(self.num_devices, 'device')}.")

    @property
    def label(self) -> str:
        """Name and content: 'p4d.24xlarge (8 × a100-40gb)', or only the content for a node that was never named."""
        content = f"{self.num_devices} × {self.device.name}"
        return content if self.name == unnamed(self.num_devices, self.device) else f"{self.name} ({content})"


def unnamed(num_devices: int, device: Device) -> str:
    """The name of a node that has none of its own."""
    return f"{num_devices}x{device.name}"
