"""The plain twin of the page's reader of packed columns."""

from __future__ import annotations

import base64
import gzip
from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpacked(column: dict[str, Any]) -> NDArray[Any]:
    """The array that `packed` was given, as a browser reads it."""
    planes = np.frombuffer(gzip.decompress(base64.b64decode(column["data"])), np.uint8).reshape(column["width"], column["n"])
    numbers = np.zeros(column["n"], np.uint64)
    for number, plane in enumerate(planes):
        numbers |= plane.astype(np.uint64) << np.uint64(8 * number)
    if column["form"] == "f":
        return numbers.astype(np.uint32).view(np.float32)
    whole = numbers.astype(np.int64)
    return (whole >> 1) ^ -(whole & 1) if column["form"] == "z" else whole
