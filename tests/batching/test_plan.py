"""The planned batch as data: shares, shapes, and files that read back equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.batching.lengths import read_lengths
from penstock.batching.plan import BatchPlan, ReplicaBatch, SampleLengths, read_batch_plan
from penstock.errors import InputError
from penstock.files import write_json
from penstock.models.micro_batch import MicroBatch
from penstock.models.shapes import Shape
from penstock.schedules.orders import one_forward_one_backward

PADDED = MicroBatch(0, (7, 3, 9), "padded", (12, 10, 5), (4, 2, 1), 16, 8, recompute=(0, 1))
PACKED = MicroBatch(1, (1, 2, 4, 5), "packed", (100, 50, 30, 20))


def example() -> BatchPlan:
    replica = ReplicaBatch((PADDED, PACKED), one_forward_one_backward(2, 2), 1.5, (1e9, 2e9))
    return BatchPlan((replica,), 1.75, 1.25, ((4e9, 4e9),), "roofline", 100, (SampleLengths(8, 9999),), (SampleLengths(9, 4000, 2),))


def test_shapes_and_padding() -> None:
    assert PADDED.shape() == Shape.padded(3, 16, 8)
    assert PACKED.shape() == Shape.packed((100, 50, 30, 20))
    assert (PADDED.num_tokens, PADDED.num_positions, PACKED.num_positions) == (34, 72, 200)
    plan = example()
    assert plan.padding_share == pytest.approx(1 - 234 / 272)
    assert plan.replicas[0].warm_up == (2, 1)
    assert (plan.num_micro_batches, plan.peak_bytes) == (2, 2e9)


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    write_json(path, example().to_dict())
    assert read_batch_plan(path) == example()
    (written,) = json.loads(path.read_text())["replicas"]
    assert written["schedule"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert written["micro_batches"][0] == {
        "samples": [7, 3, 9], "layout": "padded", "lengths": [12, 10, 5], "row_length": 16, "dec_lengths": [4, 2, 1], "dec_row_length": 8,
        "recompute": [0, 1], "row_sizes": [],
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": 2}', '{"version": 1, "replicas": [{}]}', '{"version": 1, "replicas": 3}', "nonsense"]
)
def test_files_that_are_no_batch_plan_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batch.json"
    path.write_text(text)
    with pytest.raises(InputError, match="batch"):
        read_batch_plan(path)


def test_lengths_are_read_with_and_without_ids(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("sample_id, enc_len,dec_len\n4,10,0\n2,20,3\n")
    assert read_lengths(path) == [SampleLengths(4, 10), SampleLengths(2, 20, 3)]
    path.write_text("length\n7\n8\n")
    assert read_lengths(path) == [SampleLengths(0, 7), SampleLengths(1, 8)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "length\n",
        "length\n0\n",
        "length\n-5\n",
        f"length\n{'9' * 30}\n",
        "enc_len,dec_len\n5,-1\n",
        "length\nx\n",
        "length\n1.5\n",
        "sample_id,enc_len\n1,\n",
        "sample_id,enc_len\n1\n",
    ],
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="lengths"):
        read_lengths(path)
