"""`data.json`: what it says of its tasks is checked when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.data.manifest import DataManifest, DataSplit, TaskRange, read_manifest, write_manifest
from penstock.errors import InputError


def written(folder: Path, samples: int, *tasks: tuple[int, int]) -> Path:
    ranges = [TaskRange(f"task{number}", start, stop) for number, (start, stop) in enumerate(tasks)]
    write_manifest(folder, DataManifest("text", ["input"], {"train": DataSplit(samples, {}, ranges)}))
    return folder


def test_tasks_that_have_every_sample(tmp_path: Path) -> None:
    found = read_manifest(written(tmp_path, 9, (0, 4), (4, 4), (4, 9)))
    assert [task.stop for task in found.splits["train"].tasks] == [4, 4, 9]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (((0, 12),), "task 'task0' has samples 0 to 12, but 0 to at most 9 was expected"),
        (((0, 4), (4, 90)), "task 'task1' has samples 4 to 90"),
        (((0, 4), (3, 9)), "task 'task1' has samples 3 to 9, but 4 to at most 9"),
        (((0, 6), (6, 5)), "task 'task1' has samples 6 to 5"),
        (((-3, 9),), "task 'task0' has samples -3 to 9"),
        (((0, 4),), "its tasks have 4 samples, the split 9"),
    ],
)
def test_ranges_that_cannot_be(tmp_path: Path, tasks: tuple[tuple[int, int], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_manifest(written(tmp_path, 9, *tasks))
