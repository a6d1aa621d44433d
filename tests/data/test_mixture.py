"""The stream of samples: each once in an epoch, or tasks by weight, and no position that depends on another."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.mixture import Mixture, Task, apportion
from penstock.errors import InputError


def tasks(sizes: list[int], weights: list[float] | None = None) -> tuple[Task, ...]:
    ends = np.cumsum(sizes).tolist()
    return tuple(
        Task(f"task-{i}", end - size, end, weights[i] if weights else None) for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(sum), seed=st.integers(0, 99), shuffle=st.booleans())
def test_without_weights_an_epoch_has_each_sample_once(sizes: list[int], seed: int, shuffle: bool) -> None:
    mixture, total = Mixture(tasks(sizes), seed, shuffle), sum(sizes)
    stream = mixture.samples(np.arange(3 * total))
    for epoch in range(3):
        assert sorted(stream[epoch * total : (epoch + 1) * total].tolist()) == list(range(total))
    if not shuffle:
        assert stream[:total].tolist() == list(range(total))


@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4), data=st.data())
def test_with_weights_tasks_have_their_shares_and_use_all_their_samples_evenly(sizes: list[int], data: st.DataObject) -> None:
    weights = [data.draw(st.floats(0.1, 5)) for _ in sizes]
    mixture, total, epochs = Mixture(tasks(sizes, weights), 5), sum(sizes), 4
    stream = mixture.samples(np.arange(epochs * total))
    for task, share, weight in zip(mixture.tasks, mixture.shares(), weights, strict=True):
        drawn = [int(sample) for sample in stream if task.start <= sample < task.stop]
        assert len(drawn) == epochs * share
        assert abs(share - total * weight / sum(weights)) < 1
        uses = Counter(drawn)
        assert max((uses[sample] for sample in range(task.start, task.stop)), default=0) - min(
            (uses[sample] for sample in range(task.start, task.stop)), default=0
        ) <= 1  # fmt: skip


@given(st.lists(st.integers(0, 5000), max_size=30))
def test_a_position_says_the_same_whatever_is_asked_beside_it(positions: list[int]) -> None:
    mixture = Mixture(tasks([30, 50, 20], [1.0, 0.5, 3.0]), 9)
    together = mixture.samples(positions)
    assert [int(mixture.samples([position])[0]) for position in positions] == together.tolist()


def test_epochs_are_in_different_orders_and_seeds_too() -> None:
    first, second = Mixture(tasks([100]), 0).samples(np.arange(200)).reshape(2, 100)
    assert (first != second).any() and (first != Mixture(tasks([100]), 1).samples(np.arange(100))).any()


def test_an_epoch_of_weighted_tasks_takes_other_places_of_each() -> None:
    """Half of two tasks of one size: lines that stand at the same place of two files do not always come together."""
    stream = Mixture(tasks([60, 60, 60], [1.0, 1.0, 4.0]), 3).samples(np.arange(180))
    first, second = ({int(one) % 60 for one in stream if start <= one < start + 60} for start in (0, 60))
    assert len(first) == len(second) == 30 and 5 < len(first & second) < 25


@given(total=st.integers(0, 10**6), weights=st.lists(st.floats(0, 1e6), min_size=1, max_size=6).filter(any))
def test_apportion_is_whole_and_fair(total: int, weights: list[float]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * (weight / sum(weights))) <= 1 and (weight or not part)


def test_what_is_left_goes_to_the_largest_remainders() -> None:
    assert apportion(3, [0.55, 0.45]) == [2, 1] and apportion(3, [0.45, 0.55]) == [1, 2]
    assert apportion(10, [1.0, 1.0, 1.0]) == [4, 3, 3] and apportion(7, [3.4, 2.0, 1.6]) == [3, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [([0], None, "no samples"), ([5, 0], [1.0, 1.0], "has weight 1.0, but no samples"), ([5], [-1.0], "must be zero or more"),
     ([5], [float("nan")], "must be zero or more"), ([5, 5], [0.0, 0.0], "all tasks have weight zero")],
)  # fmt: skip
def test_what_cannot_be_mixed(sizes: list[int], weights: list[float] | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Mixture(tasks(sizes, weights))


def test_a_weight_for_some_only() -> None:
    with pytest.raises(InputError, match="1 of 2 tasks have a weight"):
        Mixture((Task("a", 0, 1, 1.0), Task("b", 1, 2)))
