"""Global batches against a plain loop over the stream: budgets, truncation, resumption, and draws in any order."""

from __future__ import annotations

from itertools import count, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data.batches import GlobalBatches
from penstock.data.limits import Limits
from penstock.data.mixture import Mixture, Task
from penstock.errors import InputError

lengths_of_sides = st.integers(1, 60).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 50), min_size=size, max_size=size), min_size=1, max_size=2)
)


def make(lengths: list[list[int]], seed: int = 0, **options: object) -> GlobalBatches:
    sides = [np.array(side, np.int32) for side in lengths]
    return GlobalBatches(sides, Mixture((Task("all", 0, len(lengths[0])),), seed), **options)  # type: ignore[arg-type]


def plain(batches: GlobalBatches, num_steps: int, budget: int, limits: tuple[int, ...]) -> list[list[int]]:
    """A batch ends before the sample that would exceed the budget."""
    steps: list[list[int]] = []
    batch: list[int] = []
    spent = 0
    for position in count():
        if position % 100 == 0:
            stream = batches.mixture.samples(np.arange(position, position + 100)).tolist()
        sample = stream[position % 100]
        tokens = sum(min(int(side[sample]), limit) for side, limit in zip(batches.lengths, limits, strict=True))
        if spent + tokens > budget:
            steps.append(batch)
            batch, spent = [], 0
            if len(steps) == num_steps:
                return steps
        batch.append(sample)
        spent += tokens
    raise AssertionError


@given(lengths=lengths_of_sides.filter(lambda sides: any(map(sum, sides))), data=st.data())
@settings(max_examples=60)
def test_token_budgets_equal_a_plain_loop(lengths: list[list[int]], data: st.DataObject) -> None:
    limits = tuple(data.draw(st.integers(1, 50)) for _ in lengths)
    budget = data.draw(st.integers(sum(limits), 300))
    batches = make(lengths, data.draw(st.integers(0, 9)), tokens_per_batch=budget, limits=Limits(limits))
    expected = plain(batches, 6, budget, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.data.batches._CHUNK", 64)  # some epochs of so few samples, not thousands, and many chunks
        found = {step: batches[step] for step in data.draw(st.permutations(range(6)))}
    for step, batch in found.items():
        assert batch.samples.tolist() == expected[step] and batch.num_tokens <= budget
        assert batch.lengths.tolist() == [[min(side[s], limit) for side, limit in zip(lengths, limits, strict=True)] for s in batch.samples]


@given(lengths=lengths_of_sides, size=st.integers(1, 100), steps=st.lists(st.integers(0, 1000), max_size=5))
def test_sample_counts_are_slices_of_the_stream(lengths: list[list[int]], size: int, steps: list[int]) -> None:
    batches = make(lengths, samples_per_batch=size)
    for step in steps:
        assert batches[step].samples.tolist() == batches.mixture.samples(np.arange(step * size, (step + 1) * size)).tolist()
        assert batches[step].epoch == step * size // len(lengths[0])


@pytest.mark.parametrize("options", [{"samples_per_batch": 7}, {"tokens_per_batch": 60}])
def test_a_run_resumes_exactly_from_a_state_or_from_a_step(options: dict[str, int]) -> None:
    lengths = [np.random.default_rng(0).integers(1, 50, 300).tolist()]
    whole = [batch.samples.tolist() for batch in islice(make(lengths, **options), 120)]
    stopped = make(lengths, **options)
    state = stopped.state(77)
    resumed = make(lengths, **options)
    resumed.restore(state)
    assert state["position"] == sum(map(len, whole[:77]))
    assert [batch.samples.tolist() for batch in map(resumed.__getitem__, range(77, 120))] == whole[77:]
    assert [batch.samples.tolist() for batch in map(make(lengths, **options).__getitem__, range(77, 120))] == whole[77:]
    assert resumed[3].samples.tolist() == whole[3]


def test_a_restored_run_does_not_look_at_earlier_lengths() -> None:
    lengths = [np.full(1000, 10, np.int32)]
    batches = make([side.tolist() for side in lengths], tokens_per_batch=100)
    batches.restore({"step": 10**9, "position": 10**10, "seed": 0, "epoch_size": 1000})
    assert len(batches[10**9].samples) == 10


def test_a_state_of_other_data_is_refused() -> None:
    state = make([[1, 2, 3]], samples_per_batch=1).state(5)
    with pytest.raises(InputError, match="had epoch_size 3, this one has 2"):
        make([[1, 2]], samples_per_batch=1).restore(state)
    with pytest.raises(InputError, match="had seed 0, this one has 1"):
        make([[1, 2, 3]], 1, samples_per_batch=1).restore(state)


def test_batches_of_more_samples_than_a_chunk() -> None:
    batches = make([[1] * 100], tokens_per_batch=20_000)
    assert [len(batches[step].samples) for step in range(3)] == [20_000] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "give one of the two"), ({"samples_per_batch": 1, "tokens_per_batch": 1}, "give one of the two"),
     ({"samples_per_batch": 0}, "0 samples holds nothing"), ({"tokens_per_batch": 8}, "sample 1 has 9 tokens, more than a batch of 8"),
     ({"samples_per_batch": 1, "limits": Limits((1, 1))}, "1 side;"), ({"samples_per_batch": 1, "limits": Limits((0,))}, "at least 1"),
     ({"samples_per_batch": 1, "limits": Limits(together=9)}, "1 side;")],
)  # fmt: skip
def test_what_cannot_be_batched(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make([[3, 9, 4]], **options)


def test_a_sample_that_no_batch_can_hold_has_its_number_in_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.data.batches._SWEEP", 4)  # lengths are looked through so many at a time
    with pytest.raises(InputError, match="sample 10 has 9 tokens"):
        make([[1] * 10 + [9, 1]], tokens_per_batch=8)


def test_steps_before_the_first() -> None:
    with pytest.raises(IndexError):
        make([[1]], samples_per_batch=1)[-1]


def test_samples_without_tokens_never_fill_a_budget() -> None:
    with pytest.raises(InputError, match="no sample has any tokens"):
        make([[0, 0, 0]], tokens_per_batch=5)[0]


def test_a_sample_may_fill_a_batch_but_not_exceed_it() -> None:
    """Whatever its limits would allow: what is refused is what there is."""
    full = make([[3, 8, 2]], tokens_per_batch=8)
    assert max(full[step].num_tokens for step in range(3)) == 8
    with pytest.raises(InputError, match="sample 1 has 9 tokens, more than a batch of 8"):
        make([[3, 9, 2]], tokens_per_batch=8, limits=Limits((12,)))
    cut = make([[3, 9, 2]], tokens_per_batch=8, limits=Limits((8,)))
    assert max(cut[step].num_tokens for step in range(3)) == 8
