"""The compact form decodes to the same program; newer versions and damage are refused."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs.strategies import programs

from penstock.errors import InputError
from penstock.programs import instructions as i
from penstock.programs.binary import MARK, VERSION, decode, encode

PROGRAM = i.Program(0, 0, 0, 1, 1, 5, 1, (i.Place(0, 0, 3, 0, 1, 1, 1, 1),), (i.MicroBatch(0, (4,), "packed", (5,)),), (i.Step(),))


@given(programs)
def test_programs_decode_to_themselves(program: i.Program) -> None:
    assert decode(encode(program)) == program


def test_a_newer_version_is_refused() -> None:
    data = encode(PROGRAM)
    newer = data[:8] + struct.pack(">H", VERSION + 1) + data[10:]
    with pytest.raises(InputError, match=f"version {VERSION + 1}, but this Penstock reads versions up to {VERSION}"):
        decode(newer, "file.bin")


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at: int, change: int) -> None:
    data = bytearray(encode(PROGRAM))
    data[at % len(data)] ^= change
    with pytest.raises(InputError):
        decode(bytes(data))


@given(st.integers(0, 200))
def test_a_cut_file_is_refused(length: int) -> None:
    data = encode(PROGRAM)
    with pytest.raises(InputError):
        decode(data[: min(length, len(data) - 1)])


def sealed(value: object) -> bytes:
    """Any value with a proper mark, version and checksum."""
    body = msgspec.msgpack.encode(value)
    return MARK + struct.pack(">HI", VERSION, zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields[:3],
        lambda fields: [-1, *fields[1:]],
        lambda fields: ["0", *fields[1:]],
        lambda fields: [*fields[:9], [[99, 0]], True],
        lambda fields: [*fields[:9], [[7, "rumour", 0, 0, 1]], True],
        lambda fields: {"rank": 0},
    ],
)  # fmt: skip
def test_fields_are_validated(change: object) -> None:
    fields = msgspec.to_builtins(PROGRAM)
    assert decode(sealed(fields)) == PROGRAM
    with pytest.raises(InputError, match="not a valid program"):
        decode(sealed(change(fields)))  # type: ignore[operator]


def test_programs_from_before_a_field_was_added_are_read() -> None:
    fields = msgspec.to_builtins(PROGRAM)
    fields[8] = [micro[:10] for micro in fields[8]]  # micro-batches without `recompute`
    assert decode(sealed(fields)) == PROGRAM


@given(st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(InputError):
        decode(data)
