"""FASOP's own cost files: `known_cost/<model>_<GPU>_<tp>.npy`, a vector of forward seconds for each entry of a model's list of layers."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from penstock.costs.table import Floats
from penstock.errors import InputError, plural
from penstock.files import readable_bytes
from penstock.systems.fasop.inputs import FasopModel
from penstock.systems.plain_pickle import read_plain_pickle

__all__ = ["layer_times", "vector_files"]

_MAX_BYTES = 2**24
_NAME = re.compile(r"(?P<model>.+)_(?P<gpu>[^_]+)_(?P<tp>[1-9][0-9]{0,3})\.npy")
_FORWARD_AND_BACKWARD = 3.0
"""FASOP takes a backward pass as twice the forward one."""


def vector_files(folder: Path) -> dict[tuple[str, str, int], Path]:
    """The cost files of a folder, or of `known_cost` in it, by (model, GPU, tp)."""
    found = ((_NAME.fullmatch(path.name), path) for part in (folder, folder / "known_cost") for path in sorted(part.glob("*.npy")))
    return {(match["model"], match["gpu"], int(match["tp"])): path for match, path in found if match}


def layer_times(
    files: Mapping[tuple[str, str, int], Path], models: Mapping[str, FasopModel]
) -> Iterator[tuple[str, tuple[str, int, int], Floats]]:
    """Model, (GPU, tp, micro-batch), and seconds of its layers forward and backward, at every micro-batch that divides the global one."""
    for (name, gpu, tp), path in files.items():
        if name not in models:
            continue
        model = models[name]
        forward_s = _read_vector(path)
        if forward_s.shape != (len(model.layer_types),) or not (np.isfinite(forward_s) & (forward_s >= 0)).all():
            layers = f"{len(model.layer_types)} times, the layers of {name}"
            raise InputError(f"costs '{path}' hold {plural(forward_s.size, 'number')}; expected {layers}.")
        for size in (size for size in range(1, model.global_batch_size + 1) if model.global_batch_size % size == 0):
            factors = [model.scaled(gpu, layer, size) for layer in model.layer_types]
            yield name, (gpu, tp, size), _FORWARD_AND_BACKWARD * forward_s * factors


def _read_vector(path: Path) -> Floats:
    """The numbers in a `.npy` file; an array of objects is read as plain data, never unpickled."""
    data = readable_bytes(path, "costs", _MAX_BYTES)
    try:
        file = io.BytesIO(data)
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, kind = header(file)
        if kind.hasobject:
            return np.array(read_plain_pickle(data[file.tell() :], f"costs '{path}'"), dtype=np.float64)
        if math.prod(shape) * kind.itemsize > len(data):  # numpy would make room for it first
            raise ValueError("it ends early")
        return np.asarray(np.load(io.BytesIO(data), allow_pickle=False), dtype=np.float64)
    except (EOFError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"costs '{path}' are not a vector of numbers as numpy saves one: {error}.") from None
