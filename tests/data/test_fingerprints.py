"""Data sets told apart by where their files begin and end, and by nothing between."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.data.dataset import DataSet
from penstock.data.fingerprints import fingerprint
from penstock.data.manifest import DataManifest, DataSplit

SIZE = 3 << 20


def prints(folder: Path, **changes: int) -> str:
    """Of a folder of one file with some bytes that are not 0, at these places."""
    content = bytearray(SIZE + changes.pop("more", 0))
    for place in changes.values():
        content[place] = 1
    (folder / "train_input.bin").write_bytes(content)
    return fingerprint(DataSet(folder, "train", DataManifest("text", ["input"], {"train": DataSplit(0, {}, [])}), {}, {}))


@pytest.mark.parametrize("changes", [{"first": 0}, {"early": (1 << 20) - 1}, {"late": SIZE - (1 << 20)}, {"last": SIZE - 1}, {"more": 1}])
def test_another_begin_end_or_size_is_other_data(tmp_path: Path, changes: dict[str, int]) -> None:
    assert prints(tmp_path, **changes) != prints(tmp_path)


def test_what_lies_between_is_not_read(tmp_path: Path) -> None:
    """A terabyte of tokens would be read for hours, on every node and at every start."""
    assert prints(tmp_path, middle=SIZE // 2) == prints(tmp_path)


@pytest.mark.parametrize(
    ("name", "counts"), [("train_images.npy", True), ("train_input.idx", True), ("validation_input.bin", False), ("train_notes.txt", False)]
)
def test_all_that_a_split_is_made_of_counts_and_nothing_else(tmp_path: Path, name: str, counts: bool) -> None:
    before = prints(tmp_path)
    (tmp_path / name).write_bytes(b"something")
    assert (prints(tmp_path) != before) == counts
