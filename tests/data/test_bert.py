"""BERT's HDF5 shards, padded or ragged, into token files without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data import open_data
from penstock.data.bert import prepare_bert
from penstock.errors import InputError

h5py = pytest.importorskip("h5py", reason="the Python package 'h5py' is not installed")

Sample = tuple[list[int], list[int], list[int], list[int], int]


def samples(count: int, seed: int = 0) -> list[Sample]:
    rng, made = np.random.default_rng(seed), []
    for _ in range(count):
        length = int(rng.integers(4, 30))
        positions = np.sort(rng.choice(np.arange(1, length), int(rng.integers(0, 4)), replace=False))
        parts = rng.integers(0, 1000, length), rng.integers(0, 2, length), positions, rng.integers(0, 1000, len(positions))
        made.append((*(part.tolist() for part in parts), int(rng.integers(0, 2))))
    return made  # type: ignore[return-value]


def padded(rows: list[list[int]], width: int) -> np.ndarray:
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)


def write_shard(path: Path, made: list[Sample], **changes: Any) -> Path:
    ids, segments, positions, masked, labels = zip(*made, strict=True)
    parts = {
        "input_ids": padded(ids, 32), "input_mask": padded([[1] * len(row) for row in ids], 32), "segment_ids": padded(segments, 32),
        "masked_lm_positions": padded(positions, 5), "masked_lm_ids": padded(masked, 5), "next_sentence_labels": np.array(labels, np.int8),
        **changes,
    }  # fmt: skip
    with h5py.File(path, "w") as file:
        for name, part in parts.items():
            if part is not None:
                file.create_dataset(name, data=part, compression="gzip")
    return path


def test_padded_shards(tmp_path: Path) -> None:
    made = [samples(40, 1), samples(25, 2)]
    paths = [write_shard(tmp_path / f"{i}.hdf5", part) for i, part in enumerate(made)]
    manifest = prepare_bert(paths, tmp_path / "out", (9.0, 1.0, 0.0), 1000)
    assert {name: split.samples for name, split in manifest.splits.items()} == {"train": 59, "validation": 6}
    found = []
    for split in manifest.splits:
        data = open_data(tmp_path / "out", split)
        names = ("input", "segments", "masked_positions", "masked_ids")
        found += [(*(tuple(data[i][name].tolist()) for name in names), int(data[i]["labels"])) for i in range(len(data))]
        assert data.lengths[0].sum() == manifest.splits[split].tokens["input"]
    assert sorted(found) == sorted((tuple(a), tuple(b), tuple(c), tuple(d), e) for part in made for a, b, c, d, e in part)


def test_ragged_shards(tmp_path: Path) -> None:
    made = samples(10)
    kind = h5py.vlen_dtype(np.dtype("int32"))
    with h5py.File(tmp_path / "ragged.hdf5", "w") as file:
        for name, column in zip(
            ("input_ids", "segment_ids", "masked_lm_positions", "masked_lm_ids"), zip(*made, strict=True), strict=False
        ):
            file.create_dataset(name, (10,), kind)
            for i, row in enumerate(column):
                file[name][i] = np.array(row, np.int32)  # type: ignore[arg-type]
        file.create_dataset("next_sentence_labels", data=[sample[4] for sample in made])
    prepare_bert([tmp_path / "ragged.hdf5"], tmp_path / "out", (1.0, 0.0, 0.0), 1000)
    data = open_data(tmp_path / "out")
    assert [data[i]["input"].tolist() for i in range(10)] == [sample[0] for sample in made]
    assert [data[i]["masked_ids"].tolist() for i in range(10)] == [sample[3] for sample in made]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"segment_ids": None}, "has no 'segment_ids'"), ({"input_ids": np.zeros((3, 32))}, "parts of different sizes: input_ids 3"),
     ({"masked_lm_positions": np.full((5, 5), 31)}, "sample 0: the lengths"), ({"input_ids": np.full((5, 32), 2000)}, "token 2000")],
)  # fmt: skip
def test_shards_that_do_not_agree(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_shard(tmp_path / "a.hdf5", samples(5), **changes)
    with pytest.raises(InputError, match=message):
        prepare_bert([path], tmp_path / "out", (1.0, 0.0, 0.0), 1000)
    assert not (tmp_path / "out").exists()


def test_what_is_at_the_edge_and_what_is_beyond_it(tmp_path: Path) -> None:
    length = 300  # places beyond what a byte counts
    whole = {
        "input_ids": [[*range(700, 999), 999]], "input_mask": [[1] * length], "segment_ids": [[0] * length],
        "masked_lm_positions": [[1, 256, 299]], "masked_lm_ids": [[5, 6, 999]],
    }  # fmt: skip

    def prepare(name: str, vocab_size: int = 1000, **changes: Any) -> Path:
        path = write_shard(tmp_path / f"{name}.hdf5", samples(1), **{**whole, **changes})
        prepare_bert([path], tmp_path / name, (1.0, 0.0, 0.0), vocab_size)
        return tmp_path / name

    found = open_data(prepare("whole"))[0]
    assert found["masked_positions"].tolist() == [1, 256, 299] and found["input"].tolist() == whole["input_ids"][0]
    with pytest.raises(InputError, match="sample 0: the lengths"):
        prepare("after the last token", masked_lm_positions=[[1, 2, length]])
    with pytest.raises(InputError, match="token 999 is outside"):
        prepare("of one word less", 999)


def test_a_file_that_is_no_shard(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"no")
    with pytest.raises(InputError, match=r"shard '.*a\.hdf5' cannot be read"):
        prepare_bert([tmp_path / "a.hdf5"], tmp_path / "out", (1.0, 0.0, 0.0), 1000)
