"""Arrays as text that a browser reads quickly: bytes of equal weight together, compressed, in base64.

The first bytes of numbers in a row are nearly all alike, so planes of bytes compress far better than whole numbers do. Times are stored
as differences already (`blocks.Spans`). The same array always gives the same text.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Columns", "packed"]

_LEVEL = 6


def packed(values: NDArray[Any]) -> dict[str, Any]:
    """The array as plain data: its length, its form (f: float32, u: not negative, z: zigzag), the bytes of a number, and the text."""
    if values.dtype.kind == "f":
        form, numbers = "f", np.ascontiguousarray(values, dtype="<f4").view(np.uint32).astype(np.uint64)
        width = 4
    else:
        signed = values.astype(np.int64)
        form = "z" if signed.size and signed.min() < 0 else "u"
        numbers = ((signed << 1) ^ (signed >> 63)).view(np.uint64) if form == "z" else signed.view(np.uint64)
        width = max(1, (int(numbers.max(initial=0)).bit_length() + 7) // 8)
    planes = np.stack([(numbers >> np.uint64(8 * plane)).astype(np.uint8) for plane in range(width)])
    data = base64.b64encode(gzip.compress(planes.tobytes(), _LEVEL, mtime=0)).decode("ascii")
    return {"n": len(values), "form": form, "width": width, "data": data}


@dataclass
class Columns:
    """The arrays of a page; blocks name them by number."""

    held: list[dict[str, Any]] = field(default_factory=list)

    def add(self, values: NDArray[Any]) -> int:
        """Adds an array; returns its number."""
        self.held.append(packed(values))
        return len(self.held) - 1
