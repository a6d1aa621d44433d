"""Boxes that cover a tensor exactly once, and manifests that lie."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.runtime.checkpoints.manifest import (
    Box,
    CheckpointManifest,
    RankPart,
    StoredPiece,
    StoredTensor,
    cover_problem,
    decode_manifest,
    intersection,
    merge_parts,
    outside,
    volume,
    whole_box,
)

ranges = st.tuples(st.integers(0, 4), st.integers(0, 5)).map(lambda pair: (pair[0], max(pair)))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in box)))


@given(st.lists(st.tuples(ranges, ranges), min_size=2, max_size=2))
def test_intersection_is_that_of_the_elements(pair: list[Any]) -> None:
    one, other = pair
    shared = intersection(one, other)
    assert (elements(shared) if shared else set()) == elements(one) & elements(other)
    assert volume(one) == len(elements(one))


@given(st.tuples(ranges, ranges), st.lists(st.tuples(ranges, ranges), max_size=4))
def test_what_is_outside_is_there_once(box: Any, others: list[Any]) -> None:
    counted = sorted(element for part in outside([box], others) for element in elements(part))
    assert counted == sorted(elements(box).difference(*map(elements, others)))


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.tuples(ranges, ranges), max_size=6))
def test_cover_is_what_counting_says(rows: int, columns: int, boxes: list[Any]) -> None:
    counted = [element for box in boxes for element in elements(box)]
    exact = sorted(counted) == sorted(elements(whole_box((rows, columns)))) and all(elements(box) for box in boxes)
    assert (cover_problem((rows, columns), boxes) == "") == exact


@given(st.data())
def test_random_divisions_cover(data: st.DataObject) -> None:
    """Cut again and again, in any dimension; one box less, one moved or one twice is found out."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [whole_box(shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        start, stop = box[dim]
        at = data.draw(st.integers(start, stop))
        boxes += [part for part in (_with(box, dim, (start, at)), _with(box, dim, (at, stop))) if volume(part)]
    assert cover_problem(shape, boxes) == ""
    lost = data.draw(st.integers(0, len(boxes) - 1))
    assert "are in no piece" in cover_problem(shape, boxes[:lost] + boxes[lost + 1 :])
    assert "overlap" in cover_problem(shape, [*boxes, boxes[lost]])


def _with(box: Box, dim: int, bounds: tuple[int, int]) -> Box:
    return (*box[:dim], bounds, *box[dim + 1 :])


def test_covers_of_scalars_and_of_nothing() -> None:
    assert cover_problem((), [()]) == "" and cover_problem((0, 3), []) == ""
    assert cover_problem((), []) and cover_problem((), [(), ()])
    assert "not inside" in cover_problem((2,), [((0, 3),)]) and "not inside" in cover_problem((2, 2), [((0, 2),)])


def stored(rank: int, rows: tuple[int, int], dtype: str = "F32", shape: tuple[int, ...] = (4,)) -> RankPart:
    piece = StoredPiece(f"rank-{rank}.safetensors", "w", (rows,), 7)
    return RankPart(rank, 3, piece.file, 100 + rank, [("weights/w", StoredTensor(dtype, shape, (piece,)))])


def test_what_several_ranks_wrote_is_taken_once() -> None:
    found = merge_parts(3, {}, [stored(2, (2, 4)), stored(1, (0, 2)), stored(0, (0, 2))])
    assert [piece.file for piece in found.tensors["weights/w"].pieces] == ["rank-0.safetensors", "rank-2.safetensors"]
    assert found.files == {"rank-0.safetensors": 100, "rank-1.safetensors": 101, "rank-2.safetensors": 102}


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([stored(0, (0, 2))], "2 of its 4 elements are in no piece"),
        ([stored(0, (0, 3)), stored(1, (2, 4))], r"pieces \[0:3\] and \[2:4\] overlap"),
        ([stored(0, (0, 2)), stored(1, (2, 4), "BF16")], r"is F32 \[4\] on one rank and BF16 \[4\] on rank 1"),
        ([stored(0, (0, 2)), stored(1, (2, 4), shape=(5,))], r"F32 \[5\] on rank 1"),
    ],
)
def test_parts_that_do_not_fit(parts: list[RankPart], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        merge_parts(3, {}, parts)


GOOD = msgspec.to_builtins(merge_parts(3, {"seed": 5}, [stored(0, (0, 2)), stored(1, (2, 4))]))


def damaged(*path: Any, value: Any) -> bytes:
    data = json.loads(json.dumps(GOOD))
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data).encode()


def test_a_good_one_is_read_back() -> None:
    found = decode_manifest(json.dumps(GOOD).encode(), "it")
    assert isinstance(found, CheckpointManifest) and msgspec.to_builtins(found) == GOOD


TENSOR = ("tensors", "weights/w")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "cannot be read"),
        (b"{}", "missing required field"),
        (b"[" * 100_000, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (damaged("version", value=2), "version 2"),
        (damaged("format", value="other"), "'other'"),
        (damaged("step", value="3"), "step"),
        (damaged("files", value={"../x.safetensors": 3}), "of its own folder was expected"),
        (damaged("files", value={"x.pt": 3}), "of its own folder was expected"),
        (damaged("files", value={"other.safetensors": 3}), "is not among its files"),
        (damaged(*TENSOR, "shape", value=[5]), "1 of its 5 elements are in no piece"),
        (damaged(*TENSOR, "shape", value=[-4]), "below 0"),
        (damaged(*TENSOR, "shape", value=[2, 2]), "is not inside of it"),
        (damaged(*TENSOR, "pieces", 0, "box", value=[[0, 3]]), "overlap"),
        (damaged(*TENSOR, "pieces", 0, "box", value=[[-2, 0]]), "is not inside of it"),
        (damaged(*TENSOR, "pieces", value=[]), "4 of its 4 elements"),
    ],
)
def test_lies_are_found_out(data: bytes, told: str) -> None:
    with pytest.raises(InputError, match=told):
        decode_manifest(data, "checkpoint 'x'")
