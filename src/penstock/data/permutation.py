"""A shuffle with random access: where position p of an order of n goes, without ever holding the order.

A Feistel network over the smallest even number of bits that holds n, walked until it lands below n: a bijection whose
rounds are keyed by the seed. So drawing from ten million samples costs no memory, resuming costs nothing, and the order is
the same for every version of every library.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

__all__ = ["shuffled"]

_ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(29)


def shuffled(positions: npt.ArrayLike, size: int, *seeds: int) -> npt.NDArray[np.int64]:
    """The values at these positions of the order of range(size) that the seeds choose."""
    values = np.array(positions, np.uint64)
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(size, seeds)
    values = _walk_once(values, half, keys)
    while len(outside := np.flatnonzero(values >= size)):
        values[outside] = _walk_once(values[outside], half, keys)
    return values.astype(np.int64)


def _round_keys(size: int, seeds: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    text = ",".join(str(number) for number in (size, *seeds))
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS).digest(), "<u8").astype(np.uint64)


def _walk_once(values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        mixed = (right ^ key) * _MULTIPLIER
        mixed ^= mixed >> _SHIFT
        mixed *= _MULTIPLIER
        left, right = right, left ^ ((mixed >> np.uint64(40)) ^ (mixed >> np.uint64(7))) & mask
    return (left << bits) | right
