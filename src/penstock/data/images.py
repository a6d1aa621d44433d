"""Images into two mapped arrays: CIFAR-10's binary files, or folders with one sub-folder for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.data.manifest import DataManifest, DataSplit, TaskRange, write_manifest
from penstock.data.mixture import apportion
from penstock.data.permutation import shuffled
from penstock.data.text.cleaning import SPLITS
from penstock.data.workers import Report, new_folder
from penstock.errors import InputError, plural

__all__ = ["is_cifar10", "is_image_folder", "prepare_images"]

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
_CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")

Array = npt.NDArray[Any]
Place = tuple[Path, int]
"""Where an image lies: a file of CIFAR-10 and a row in it, or an image file and its label."""


def is_cifar10(path: Path) -> bool:
    """Whether a path is one of CIFAR-10's binary files, or a folder of them."""
    return path.suffix == ".bin" if os.path.isfile(path) else os.path.isdir(path) and bool(_cifar_files(path))


def is_image_folder(path: Path) -> bool:
    """Whether a folder has sub-folders with images in them."""
    return os.path.isdir(path) and any(
        file.suffix.lower() in _SUFFIXES for folder in path.iterdir() if folder.is_dir() for file in folder.iterdir()
    )


def _cifar_files(path: Path) -> list[Path]:
    return sorted(path.glob("*_batch*.bin")) if os.path.isdir(path) else [path]


def prepare_images(
    inputs: Sequence[Path],
    out: Path,
    split: Sequence[float],
    image_size: int = 0,
    report: Report = lambda *_: None,
) -> DataManifest:
    """Writes `images` (samples, channels, height, width) and `labels` of each split.

    Of CIFAR-10 the files called test* are the test split, and `split` divides the others. Images of folders are scaled and cut to
    squares of `image_size`.
    """
    if all(is_cifar10(path) for path in inputs):
        return _prepare_cifar10([file for path in inputs for file in _cifar_files(path)], out, split, report)
    if len(inputs) == 1 and is_image_folder(inputs[0]):
        return _prepare_folder(inputs[0], out, split, image_size, report)
    raise InputError(f"{', '.join(map(str, inputs))}: neither CIFAR-10's binary files nor one folder with a sub-folder per class.")


def _prepare_cifar10(files: list[Path], out: Path, split: Sequence[float], report: Report) -> DataManifest:
    rows = {file: _cifar_rows(file) for file in files}
    test = [file for file in files if file.name.startswith("test")]
    others = [(file, row) for file in files if file not in test for row in range(len(rows[file]))]
    parts = [*split[:2], 0.0] if test else list(split)
    chosen = _divide(others, parts) if others else [[], [], []]
    chosen[2] += [(file, row) for file in test for row in range(len(rows[file]))]

    def read(place: Place) -> tuple[Array, int]:
        record = rows[place[0]][place[1]]
        return record[1:].reshape(_CIFAR_SHAPE), int(record[0])

    return _write(chosen, read, out, _CIFAR_SHAPE, _CIFAR_CLASSES, report)


def _cifar_rows(file: Path) -> Array:
    size = file.stat().st_size
    if not size or size % _CIFAR_RECORD_BYTES:
        raise InputError(f"'{file}' has {plural(size, 'byte')}, not a multiple of {_CIFAR_RECORD_BYTES}: it is no binary file of CIFAR-10.")
    rows: Array = np.memmap(file, np.uint8, "r").reshape(-1, _CIFAR_RECORD_BYTES)
    if rows[:, 0].max() >= len(_CIFAR_CLASSES):
        raise InputError(f"'{file}' has label {rows[:, 0].max()}; CIFAR-10 has {len(_CIFAR_CLASSES)} classes. Is it CIFAR-100?")
    return rows


def _prepare_folder(folder: Path, out: Path, split: Sequence[float], image_size: int, report: Report) -> DataManifest:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise InputError("folders of images need the Python package 'pillow'. Install it with: pip install 'penstock[data]'") from None
    if image_size < 1:
        raise InputError("folders of images need one size for all of them, as in --image-size 224.")
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).iterdir())
        if file.suffix.lower() in _SUFFIXES
    ]

    def read(place: Place) -> tuple[Array, int]:
        try:
            with Image.open(place[0]) as image:
                square = ImageOps.fit(image.convert("RGB"), (image_size, image_size))
        except (UnidentifiedImageError, OSError, Image.DecompressionBombError) as error:
            raise InputError(f"image '{place[0]}' cannot be read: {error}.") from None
        return np.asarray(square, np.uint8).transpose(2, 0, 1), place[1]

    return _write(_divide(files, split), read, out, (3, image_size, image_size), classes, report)


def _divide(places: list[Place], parts: Sequence[float]) -> list[list[Place]]:
    """Shuffled shares, the same each time."""
    order = shuffled(np.arange(len(places)), len(places), 0)
    ends = np.cumsum(apportion(len(places), parts))[:-1]
    return [[places[index] for index in part] for part in np.split(order, ends)]


def _write(
    chosen: list[list[Place]], read: Callable[[Place], tuple[Array, int]], out: Path, shape: tuple[int, int, int],
    classes: list[str], report: Report,
) -> DataManifest:  # fmt: skip
    total, done = sum(map(len, chosen)), 0
    if not total:
        raise InputError("there are no images to prepare.")
    splits = {}
    with new_folder(out) as folder:
        for name, places in zip(SPLITS, chosen, strict=True):
            if not places:
                continue
            images = np.lib.format.open_memmap(folder / f"{name}_images.npy", "w+", np.uint8, (len(places), *shape))
            labels = np.zeros(len(places), np.int64)
            for row, place in enumerate(places):
                images[row], labels[row] = read(place)
                done += 1
                if done % 256 == 0 or done == total:
                    report("reading images", done, total)
            images.flush()
            np.save(folder / f"{name}_labels.npy", labels, allow_pickle=False)
            splits[name] = DataSplit(len(places), {}, [TaskRange("images", 0, len(places))])
        manifest = DataManifest("images", [], splits, image_shape=shape, classes=classes, counts={"read": total, "kept": total})
        write_manifest(folder, manifest)
    return manifest
