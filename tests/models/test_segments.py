"""Segments and pieces against their plain definitions."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models import Model, resolve_model
from penstock.models.segments import Segment, pieces, segments

MODELS = {name: resolve_model(name) for name in ("bert-tiny", "gpt-tiny", "llama-tiny", "resnet-tiny", "t5-tiny", "vgg-tiny")}


@st.composite
def slices(draw: st.DrawFn) -> tuple[Model, int, int, frozenset[int]]:
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    start = draw(st.integers(0, model.num_ops - 1))
    stop = draw(st.integers(start, model.num_ops))
    return model, start, stop, draw(st.frozensets(st.integers(0, stop - start - 1))) if stop > start else frozenset()


@settings(max_examples=200, deadline=None)
@given(slices())
def test_segments_group_neighbours_op_by_op(case: tuple[Model, int, int, frozenset[int]]) -> None:
    model, start, stop, flags = case
    places = model.ops[start:stop]

    def group(index: int) -> tuple[object, ...]:
        return (True, places[index].block, places[index].copy) if index in flags else (False,)

    expected, at = [], 0
    for key, found in groupby(range(len(places)), key=group):
        size = len(list(found))
        expected.append(Segment(at, at + size, bool(key[0])))
        at += size
    assert segments(places, flags) == expected


@pytest.mark.parametrize("name", sorted(MODELS))
def test_pieces_are_the_blocks_of_a_slice(name: str) -> None:
    model = MODELS[name]
    kinds: dict[object, list[object]] = {}
    for start in range(model.num_ops):
        for stop in range(start, model.num_ops + 1, 3):
            expected = [(start + part.start, start + part.stop) for part in segments(model.ops[start:stop], range(stop - start))]
            found = list(pieces(model, start, stop))
            assert [(piece.start, piece.stop) for piece in found] == expected
            for piece in found:  # likeness promises equal ops behind an equal carry
                ops = [model.carry_before(piece.start), *(place.op for place in model.ops[piece.start : piece.stop])]
                assert kinds.setdefault(piece.likeness, ops) == ops
