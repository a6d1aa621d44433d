"""The compact form of a program: a mark, a version, a checksum, then msgpack; what does not match is refused."""

from __future__ import annotations

import struct
import zlib

import msgspec

from penstock.errors import InputError
from penstock.programs.instructions import Program

__all__ = ["MARK", "VERSION", "decode", "encode"]

MARK = b"PENSTOCK"
VERSION = 1
_HEADER = struct.Struct(">8sHI")
"""Mark, version, checksum of all that follows."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Program)


def encode(program: Program) -> bytes:
    """The program as bytes."""
    body = _ENCODER.encode(program)
    return _HEADER.pack(MARK, VERSION, zlib.crc32(body)) + body


def decode(data: bytes, where: str = "the program") -> Program:
    """The program that `encode` wrote; `where` names it in the error."""
    if data[: len(MARK)] != MARK or len(data) < _HEADER.size:
        raise InputError(f"{where} is not a program: it does not begin with {MARK.decode()}. Give a file that Penstock wrote.")
    _, version, checksum = _HEADER.unpack_from(data)
    if not 1 <= version <= VERSION:
        raise InputError(f"{where} has version {version}, but this Penstock reads versions up to {VERSION}. Update Penstock.")
    body = memoryview(data)[_HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise InputError(f"{where} is damaged: {len(body)} bytes whose checksum does not match. Write it again.")
    try:
        return _DECODER.decode(body)
    except msgspec.MsgspecError as error:
        raise InputError(f"{where} is not a valid program: {error}.") from None
