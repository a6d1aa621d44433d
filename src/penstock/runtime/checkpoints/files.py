"""Safetensors files written in one pass: each tensor's bytes go from memory to disk once, with their checksum."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch

from penstock.errors import InputError

__all__ = ["DTYPE_NAMES", "checksum", "sync_folder", "tensor_bytes", "write_safetensors"]

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_CHUNK_BYTES = 1 << 24


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def checksum(data: memoryview, start: int = 0) -> int:
    """CRC-32 of some bytes, or of those after others whose checksum is `start`."""
    return zlib.crc32(data, start)


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], about: Mapping[str, str] | None = None
) -> tuple[int, dict[str, int]]:
    """Writes contiguous CPU tensors and waits until the disk has them; the file's size, and the checksum of each tensor."""
    entries: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each lies at a multiple of its size
    offset = 0
    for name in order:
        tensor = tensors[name]
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes],
        }  # fmt: skip
        offset += tensor.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    sums = {}
    try:
        with open(path, "wb", buffering=0) as stream:
            _write_all(stream.fileno(), memoryview(len(header).to_bytes(8, "little") + header))
            for name in order:
                sums[name] = _write_checked(stream.fileno(), tensor_bytes(tensors[name]) if tensors[name].numel() else memoryview(b""))
            os.fsync(stream.fileno())
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
    return 8 + len(header) + offset, sums


def _write_checked(handle: int, data: memoryview) -> int:
    found = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        chunk = data[start : start + _CHUNK_BYTES]
        found = checksum(chunk, found)  # both release the interpreter's lock: training goes on
        _write_all(handle, chunk)
    return found


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def sync_folder(path: Path) -> None:
    """Waits until the disk has the names in a folder, not only the files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
