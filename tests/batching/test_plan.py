"""The planned batch as data: shares, shapes, and files that read back equal."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batching.lengths import read_lengths
from penstock.batching.plan import BatchPlan, MicroBatch, ReplicaBatch, SampleLengths, read_batch_plan
from penstock.errors import InputError
from penstock.files import write_json
from penstock.models.shapes import Shape
from penstock.schedules.orders import one_forward_one_backward

PADDED = MicroBatch((7, 3, 9), "padded", (12, 10, 5), 16, (4, 2, 1), 8, recompute=(0, 1))
PACKED = MicroBatch((1, 2, 4, 5), "packed", (100, 50, 30, 20))


def example() -> BatchPlan:
    replica = ReplicaBatch((PADDED, PACKED), one_forward_one_backward(2, 2), 1.5, (1e9, 2e9))
    return BatchPlan((replica,), 1.75, 1.25, ((4e9, 4e9),), "roofline", 100, (SampleLengths(8, 9999),), (SampleLengths(9, 4000, 2),))


def test_shapes_and_padding() -> None:
    assert PADDED.shape == Shape.padded(3, 16, 8)
    assert PACKED.shape == Shape.packed((100, 50, 30, 20))
    assert (PADDED.num_tokens, PADDED.num_positions, PACKED.num_positions) == (34, 72, 200)
    plan = example()
    assert plan.padding_share == pytest.approx(1 - 234 / 272)
    assert plan.replicas[0].warm_up == (2, 1)
    assert (plan.num_micro_batches, plan.peak_bytes) == (2, 2e9)


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    write_json(path, example().to_dict())
    assert read_batch_plan(path) == example()
    assert json.loads(path.read_text())["replicas"][0]["schedule"] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": 2}', '{"version": 1, "replicas": [{}]}', '{"version": 1, "replicas": 3}', "nonsense"]
)
def test_files_that_are_no_batch_plan_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "batch.json"
    path.write_text(text)
    with pytest.raises(InputError, match="batch"):
        read_batch_plan(path)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(1, 9), st.booleans())
def test_shares_follow_each_other_and_are_even(lengths: list[int], dp: int, packed: bool) -> None:
    ids = tuple(range(len(lengths)))
    batch = MicroBatch(ids, "packed", tuple(lengths)) if packed else MicroBatch(ids, "padded", tuple(lengths), max(lengths))
    shares = batch.shares(dp)
    assert shares[0][0] == 0 and shares[-1][1] == len(lengths) and all(a[1] == b[0] for a, b in pairwise(shares))
    assert tuple(i for index in range(dp) for i in batch.share(dp, index).samples) == ids
    if packed:
        sums = [sum(lengths[first:last]) for first, last in shares]
        assert max(sums) <= sum(lengths) / dp + max(lengths)
    else:
        sizes = [last - first for first, last in shares]
        assert max(sizes) - min(sizes) <= 1


def test_rows_of_several_samples_are_shared_whole() -> None:
    batch = MicroBatch((0, 1, 2, 3, 4), "padded", (5, 5, 9, 4, 4), 10, row_sizes=(2, 1, 2))
    assert batch.shape == Shape.padded(3, 10)
    assert [batch.share(2, index).samples for index in range(2)] == [(0, 1, 2), (3, 4)]
    assert batch.share(2, 1).row_sizes == (2,)


def test_lengths_are_read_with_and_without_ids(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("sample_id, enc_len,dec_len\n4,10,0\n2,20,3\n")
    assert read_lengths(path) == [SampleLengths(4, 10), SampleLengths(2, 20, 3)]
    path.write_text("length\n7\n8\n")
    assert read_lengths(path) == [SampleLengths(0, 7), SampleLengths(1, 8)]


@pytest.mark.parametrize(
    "text", ["", "a,b\n1,2\n", "length\n", "length\nx\n", "length\n1.5\n", "sample_id,enc_len\n1,\n", "sample_id,enc_len\n1\n"]
)
def test_lengths_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(InputError, match="lengths"):
        read_lengths(path)
