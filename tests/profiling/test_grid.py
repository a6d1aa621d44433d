"""Which sizes are measured: denser where times bend, none beyond what fits, and errors of what was predicted beforehand."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models import resolve_model
from penstock.models.catalog import model_from_mapping
from penstock.profiling.grid import GridLimits, attention_grid, mixed_lengths, refine, spread_lengths, sweep_lengths, sweep_size


def test_times_that_follow_a_power_of_the_size_need_no_more_points() -> None:
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return 3e-6 * size**0.7

    errors = refine(256, 65536, measure, depth=3)
    assert asked == [256, 1024, 4096, 16384, 65536, 512, 2048, 8192, 32768]
    assert [size for size, _ in errors] == [512, 2048, 8192, 32768]
    assert [error for _, error in errors] == pytest.approx([0] * 4, abs=1e-9)


def test_bends_get_denser_and_their_errors_are_told() -> None:
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return max(1e-3, size * 0.5e-6)  # bends at 2000

    errors = dict(refine(64, 65536, measure, depth=2))
    assert len(asked) == len(set(asked))
    inside = [size for size in asked if 256 < size < 4096]
    outside = [size for size in asked if size > 4096]
    assert sorted(inside) == [512, 1024, 1448, 2048, 2896] and sorted(outside) == [8192, 16384, 32768, 65536]
    predicted = (measure(1024) * measure(4096)) ** 0.5
    assert errors[2048] == pytest.approx(predicted / measure(2048) - 1) and abs(errors[2048]) > 0.1
    assert errors[8192] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_an_interval_is_halved_so_often_and_no_more_however_wild_its_times(depth: int) -> None:
    times = cycle((1.0, 50.0, 7.0, 400.0, 3.0))
    errors = refine(2**8, 2**16, lambda size: next(times), depth=depth)
    assert len(errors) == 4 * (2**depth - 1) and len({size for size, _ in errors}) == len(errors)


@pytest.mark.parametrize("limit", [100, 256, 300, 5000, 100_000])
def test_nothing_larger_than_what_did_not_fit_is_tried(limit: int) -> None:
    asked: list[int] = []

    def measure(size: int) -> float | None:
        asked.append(size)
        return None if size > limit else 1.0

    errors = refine(256, 65536, measure)
    assert len([size for size in asked if size > limit]) == (1 if limit < 65536 else 0)
    assert all(size <= limit for size, _ in errors)


def test_a_midpoint_that_does_not_fit_ends_its_interval() -> None:
    assert refine(4, 16, lambda size: None if size == 8 else float(size)) == []


def test_sizes_that_cannot_be_measured_are_snapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.profiling.grid._STRAIGHT", 0.0)
    asked: list[int] = []

    def measure(size: int) -> float:
        asked.append(size)
        return 1.0 + size

    refine(256, 65536, measure, snap=lambda size: size // 384 * 384 or 256)
    assert len(asked) == len(set(asked)) and all(size % 384 == 0 or size == 256 for size in asked)


@settings(deadline=None)
@given(st.sampled_from(["gpt-tiny", "gpt-1.3b", "t5-tiny", "t5-770m", "bert-large"]), st.integers(1, 70_000))
def test_a_sweep_measures_the_size_it_says(name: str, size: int) -> None:
    model = resolve_model(name)
    whole, lengths = sweep_size(model, size), sweep_lengths(model, size)
    assert lengths.rows * lengths.length == whole and size / 2 < whole <= size
    assert 1 <= lengths.length <= min(512, model.seq_length)
    assert lengths.dec_length == (lengths.length if model.dec_length else 0)
    assert sweep_size(model, whole) == whole


def test_rows_of_an_odd_length() -> None:
    model = model_from_mapping({"base": "gpt-tiny", "seq_length": 100}, "test", "odd")
    assert [sweep_size(model, size) for size in (64, 99, 100, 250, 1024)] == [64, 64, 100, 200, 1000]
    assert sweep_lengths(resolve_model("resnet-tiny"), 7).rows == sweep_size(resolve_model("resnet-tiny"), 7) == 7


def test_attention_is_measured_over_sizes_and_lengths() -> None:
    limits = GridLimits.for_device("cuda")
    pairs = attention_grid(limits, 2048)
    assert all(length <= min(size, 2048) for size, length in pairs) and len(set(pairs)) == len(pairs)
    assert {size for size, _ in pairs} == {64, 256, 1024, 4096, 16384, 65536}
    assert {length for size, length in pairs if size == 65536} == {32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048}
    assert len(attention_grid(limits, 2048, fine=False)) < len(pairs)


@settings(deadline=None)
@given(st.sampled_from([256, 1024, 4096, 16384, 65536]), st.sampled_from([64, 128, 256, 512, 1024]))
def test_a_mixed_batch_has_the_size_and_about_the_length_asked_for(size: int, length: int) -> None:
    length = min(length, size)
    lengths = mixed_lengths(size, length, 8192)
    own = list(lengths.mixed) or [lengths.length] * lengths.rows
    assert len(own) == lengths.rows and lengths.layout == "packed" and size - length < sum(own) <= size
    assert sum(n * n for n in own) / sum(own) == pytest.approx(length, rel=0.2)


@given(st.integers(1, 20_000), st.integers(1, 4096), st.integers(1, 4096))
def test_spread_lengths_fill_a_batch_of_any_size(size: int, length: int, longest: int) -> None:
    found = spread_lengths(size, length, longest)
    assert sum(found.mixed) == size and len(found.mixed) == found.rows and 1 <= min(found.mixed) <= max(found.mixed) <= longest
    if size >= 16 * length >= 16 * 32 and 2 * length <= longest:  # as spread out as text
        assert sum(n * n for n in found.mixed) / size == pytest.approx(length, rel=0.25) and found.rows > 1.5 * size / length - 8
