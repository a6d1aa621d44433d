"""Images: CIFAR-10's binary files and folders by class, into arrays that are mapped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.cli.main import run
from penstock.data import open_data
from penstock.data.images import prepare_images
from penstock.errors import InputError

ALL = (1.0, 0.0, 0.0)


def write_cifar(path: Path, count: int, seed: int) -> np.ndarray:
    records = np.random.default_rng(seed).integers(0, 256, (count, 3073)).astype(np.uint8)
    records[:, 0] %= 10
    path.write_bytes(records.tobytes())
    return records


def rows(data: object, count: int) -> set[bytes]:
    return {bytes([int(data[i]["labels"])]) + data[i]["images"].tobytes() for i in range(count)}  # type: ignore[index]


def test_cifar_10(tmp_path: Path) -> None:
    (tmp_path / "cifar").mkdir()
    train = [write_cifar(tmp_path / "cifar" / f"data_batch_{i}.bin", 20, i) for i in range(3)]
    test = write_cifar(tmp_path / "cifar" / "test_batch.bin", 10, 9)
    assert run(["prepare-data", str(tmp_path / "cifar"), "--split", "9,1", "--out", str(tmp_path / "out"), "--json"]) == 0
    sets = {split: open_data(tmp_path / "out", split) for split in ("train", "validation", "test")}
    assert {split: len(data) for split, data in sets.items()} == {"train": 54, "validation": 6, "test": 10}
    assert rows(sets["test"], 10) == {record.tobytes() for record in test}
    assert rows(sets["train"], 54) | rows(sets["validation"], 6) == {record.tobytes() for part in train for record in part}
    assert sets["train"][0]["images"].shape == (3, 32, 32) and sets["train"].manifest.classes[3] == "cat"
    batch = sets["train"].batches(16, seed=1)[0]
    assert len(set(batch.samples.tolist())) == 16 and batch.lengths.tolist() == [[1]] * 16


def test_files_called_test_are_all_of_the_test_split(tmp_path: Path) -> None:
    """Whatever share of the others was asked for it: what is tested on is what others test on."""
    train, test = write_cifar(tmp_path / "data_batch_1.bin", 60, 1), write_cifar(tmp_path / "test_batch.bin", 10, 9)
    prepare_images([tmp_path / "data_batch_1.bin", tmp_path / "test_batch.bin"], tmp_path / "out", (4.0, 1.0, 1.0))
    found = [open_data(tmp_path / "out", split) for split in ("train", "validation", "test")]
    assert list(map(len, found)) == [48, 12, 10] and len(train) == 60
    assert rows(found[2], 10) == {record.tobytes() for record in test}


@pytest.mark.parametrize(("content", "message"), [(b"", "0 bytes"), (bytes(3072), "3,072 bytes"), (b"\x0b" + bytes(3072), "label 11")])
def test_what_is_no_cifar_10(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare_images([tmp_path / "data_batch_1.bin"], tmp_path / "out", ALL)
    assert not (tmp_path / "out").exists()


def test_folders_of_images(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image", reason="the Python package 'pillow' is not installed")
    for name, colour in (("green", (0, 200, 0)), ("red", (200, 0, 0))):
        (tmp_path / "in" / name).mkdir(parents=True)
        for i in range(5):
            mode = "RGBA" if i == 0 else "RGB"
            images.new("RGB", (20 + 10 * i, 30), colour).convert(mode).save(tmp_path / "in" / name / f"{i}.png")
    (tmp_path / "in" / "red" / "notes.txt").write_text("not an image")
    prepare_images([tmp_path / "in"], tmp_path / "out", (8.0, 2.0, 0.0), 16)
    train, validation = open_data(tmp_path / "out"), open_data(tmp_path / "out", "validation")
    assert (len(train), len(validation)) == (8, 2) and train.manifest.classes == ["green", "red"]
    for data in (train, validation):
        for i in range(len(data)):
            sample = data[i]
            expected = ((0, 200, 0), (200, 0, 0))[int(sample["labels"])]
            assert sample["images"].shape == (3, 16, 16) and np.array_equal(sample["images"].reshape(3, -1).T, np.tile(expected, (256, 1)))
    with pytest.raises(InputError, match="--image-size"):
        prepare_images([tmp_path / "in"], tmp_path / "other", ALL)
    (tmp_path / "in" / "red" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"image '.*0\.png' cannot be read"):
        prepare_images([tmp_path / "in"], tmp_path / "other", ALL, 16)
    assert not (tmp_path / "other").exists()


def test_folders_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nor one folder with a sub-folder per class"):
        prepare_images([tmp_path], tmp_path / "out", ALL, 16)
