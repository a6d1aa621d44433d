"""Deciding which samples stay and which split they go to, from digests of their texts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.mixture import apportion
from penstock.errors import InputError

__all__ = ["DROPPED", "SPLITS", "first_of_equals", "parse_split", "split_samples"]

SPLITS = ("train", "validation", "test")
DROPPED = 255
"""The split code of a sample that goes nowhere."""

Digests = npt.NDArray[Any]
"""(samples, 2) uint64"""


def parse_split(text: str) -> tuple[float, ...]:
    """The parts of `949,50,1`: train, validation, test; missing ones are zero."""
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= len(SPLITS) or not all(0 <= part < float("inf") for part in parts) or not parts[0]:
        raise InputError(f"--split is '{text}'; up to three parts for train, validation and test were expected, as in 949,50,1.")
    return (*parts, *(0.0,) * (len(SPLITS) - len(parts)))


def first_of_equals(digests: Digests) -> npt.NDArray[np.bool_]:
    """True for each sample that has no equal before it."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equals stay in their order
    arranged = digests[order]
    fresh = np.ones(len(digests), bool)
    fresh[order[1:]] = (arranged[1:] != arranged[:-1]).any(axis=1)
    return fresh


def split_samples(digests: Digests, kept: npt.NDArray[np.bool_], parts: Sequence[float]) -> npt.NDArray[np.uint8]:
    """The split code of each sample: exact shares, chosen by digest, so that neither order nor seed decides."""
    codes = np.full(len(digests), DROPPED, np.uint8)
    indices = np.flatnonzero(kept)
    order = indices[np.lexsort((digests[indices, 1], digests[indices, 0]))]
    codes[order] = np.repeat(np.arange(len(parts), dtype=np.uint8), apportion(len(order), parts))
    return codes
