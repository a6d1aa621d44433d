"""Megatron-LM's `.bin`/`.idx` pair: byte for byte as its format says, read back whole, and refused when damaged."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from disk_order import DiskOrder
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from penstock.errors import InputError

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def megatron_index(code: int, item_bytes: int, lengths: list[int], documents: list[int]) -> bytes:
    """The index as Megatron-LM lays it out, one field after the other."""
    places = [item_bytes * sum(lengths[:i]) for i in range(len(lengths))]
    head = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", len(lengths), len(documents))
    body = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    return head + body + struct.pack(f"<{len(documents)}q", *documents)


@given(st.lists(st.lists(st.integers(0, 255), max_size=9), max_size=9), st.sampled_from(["uint8", "int32", "uint16", "int64"]))
def test_files_are_those_of_megatron_and_read_back(sequences: list[list[int]], dtype: str) -> None:
    values = [[token % 128 for token in tokens] for tokens in sequences]
    with tempfile.TemporaryDirectory() as folder:
        with IndexedWriter(f"{folder}/part", dtype) as writer:
            for tokens in values:
                writer.add(tokens)
        item = np.dtype(dtype).itemsize
        lengths = [len(tokens) for tokens in values]
        assert Path(f"{folder}/part.idx").read_bytes() == megatron_index(CODES[dtype], item, lengths, list(range(len(values) + 1)))
        assert Path(f"{folder}/part.bin").read_bytes() == b"".join(np.array(tokens, dtype).tobytes() for tokens in values)
        assert sorted(file.name for file in Path(folder).iterdir()) == ["part.bin", "part.idx"]
        found = IndexedTokens.open(f"{folder}/part")
        assert [found[i].tolist() for i in range(len(found))] == values
        assert found.lengths.tolist() == lengths and found.num_tokens == sum(lengths)


def test_tokens_and_index_are_on_disk_before_they_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskOrder(monkeypatch)
    with IndexedWriter(tmp_path / "part", "uint16") as writer:
        writer.add([1, 2, 3])
    assert all(disk.is_synced_before(tmp_path / name, tmp_path / name) for name in ("part.bin", "part.idx"))


@pytest.mark.parametrize("dtype", CODES)
def test_files_written_by_megatron_are_read(tmp_path: Path, dtype: str) -> None:
    tokens = np.arange(10).astype(dtype)
    (tmp_path / "text.bin").write_bytes(tokens.tobytes())
    (tmp_path / "text.idx").write_bytes(megatron_index(CODES[dtype], tokens.itemsize, [3, 0, 5, 2], [0, 2, 4]))
    found = IndexedTokens.open(tmp_path / "text")
    assert [found[i].tolist() for i in range(4)] == [[0, 1, 2], [], [3, 4, 5, 6, 7], [8, 9]]
    assert found.documents.tolist() == [0, 2, 4] and found.dtype == dtype


def test_an_index_with_modes_of_multimodal_data_is_read(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(b"abc")
    (tmp_path / "text.idx").write_bytes(megatron_index(1, 1, [1, 2], [0, 1, 2]) + b"\x00\x01")
    assert IndexedTokens.open(tmp_path / "text")[1].tolist() == [98, 99]


def test_the_dtype_is_the_one_megatron_would_choose() -> None:
    assert [str(token_dtype(size)) for size in (2, 65499, 65500)] == ["uint16", "uint16", "int32"]


def damaged(change: str, index: bytes, tokens: bytes) -> tuple[bytes, bytes]:
    return {
        "magic": (b"MMIDIDY" + index[7:], tokens), "version": (index[:9] + b"\x02" + index[10:], tokens),
        "dtype": (index[:17] + b"\x09" + index[18:], tokens), "cut index": (index[:-3], tokens), "no index": (b"", tokens),
        "cut tokens": (index, tokens[:-1]),
        "huge count": (index[:18] + b"\xff" * 8 + index[26:], tokens), "head only": (index[:20], tokens),
    }[change]  # fmt: skip


@pytest.mark.parametrize("change", ["magic", "version", "dtype", "cut index", "no index", "cut tokens", "huge count", "head only"])
def test_damaged_files_are_refused_when_opened(tmp_path: Path, change: str) -> None:
    index, tokens = damaged(change, megatron_index(4, 4, [2, 3], [0, 1, 2]), np.arange(5, dtype="<i4").tobytes())
    (tmp_path / "text.idx").write_bytes(index)
    (tmp_path / "text.bin").write_bytes(tokens)
    with pytest.raises(InputError, match=r"text\.(idx|bin)'"):
        IndexedTokens.open(tmp_path / "text")


def test_places_outside_of_the_tokens_are_refused_when_used(tmp_path: Path) -> None:
    index = bytearray(megatron_index(1, 1, [1, 1, 1], [0]))
    index[34 + 12 + 7] = 0x7F  # the first place, made enormous
    (tmp_path / "text.idx").write_bytes(index)
    (tmp_path / "text.bin").write_bytes(b"abc")
    with pytest.raises(InputError, match="sequence 0 would lie outside"):
        IndexedTokens.open(tmp_path / "text")[0]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"index '.*none\.idx' does not exist"):
        IndexedTokens.open(tmp_path / "none")


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "part", "int32") as writer:
        writer.add([1, 2])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InputError, match="complex128"):
        IndexedWriter(tmp_path / "part", np.complex128)
    with IndexedWriter(tmp_path / "part", "int32") as writer, pytest.raises(ValueError, match="lengths sum to 3"):
        writer.add_many(np.arange(2), np.array([3]))


def test_a_sequence_outside_of_its_file_is_found_by_a_check(tmp_path: Path) -> None:
    index = megatron_index(4, 4, [2, 3, 1], [0, 1, 2, 3])
    (tmp_path / "text.bin").write_bytes(np.arange(6, dtype="<i4").tobytes())
    (tmp_path / "text.idx").write_bytes(index)
    IndexedTokens.open(tmp_path / "text").check()
    for place, value in ((34 + 4, 99), (34 + 4, -1), (34 + 12 + 8, 7), (34 + 12 + 8, -8)):  # the second length, the second place
        (tmp_path / "text.idx").write_bytes(index[:place] + value.to_bytes(4, "little", signed=True) + index[place + 4 :])
        with pytest.raises(InputError, match="is damaged: sequence 1 would lie outside"):
            IndexedTokens.open(tmp_path / "text").check()
