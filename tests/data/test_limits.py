"""What stays of samples that are too long, as lengths and as tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.filled import sample_limits
from penstock.data.forms import SampleForm
from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.samples import Samples

LENGTH = st.integers(0, 60)


@pytest.mark.parametrize(
    ("lengths", "kept"),
    [
        ((4, 6), [4, 6]),  # fits, though the target is longer than half
        ((9, 1), [9, 1]),
        ((30, 3), [7, 3]),  # the longer side is cut
        ((3, 30), [3, 7]),
        ((30, 20), [5, 5]),  # both are longer than half
        ((30, 5), [5, 5]),
        ((10, 0), [10, 0]),
        ((11, 0), [10, 0]),
    ],
)
def test_the_longer_side_is_cut_first(lengths: tuple[int, int], kept: list[int]) -> None:
    assert [int(side) for side in Limits(together=10).kept(lengths)] == kept


@given(inputs=st.lists(LENGTH, min_size=5, max_size=5), targets=st.lists(LENGTH, min_size=5, max_size=5), limit=st.integers(2, 50))
def test_a_pair_keeps_all_that_fits(inputs: list[int], targets: list[int], limit: int) -> None:
    found = Limits(together=limit).kept([np.array(inputs, np.int32), np.array(targets, np.int32)])
    for own, its, kept, kept_too in zip(inputs, targets, *map(np.ndarray.tolist, found), strict=True):
        assert kept + kept_too == min(own + its, limit) and 0 <= kept <= own and 0 <= kept_too <= its
        cut, other = ((own, kept), (its, kept_too)) if own >= its else ((its, kept_too), (own, kept))
        if other[1] < other[0]:  # the shorter side is only cut where the longer one has no more than half
            assert cut[1] <= (limit + 1) // 2


def test_limits_of_sides_hold_besides() -> None:
    assert [int(side) for side in Limits((4, None), together=10).kept([30, 9])] == [4, 6]
    assert [int(side) for side in NO_LIMITS.kept([30, 9])] == [30, 9]
    assert (Limits((4, 5)).most(2), Limits((4, 9), 10).most(2), Limits((4,)).most(2)) == (9, 10, np.inf)


@dataclass
class Pairs:
    """A data set of one pair, whose tokens are numbered: those of the target from 1000 on."""

    input_length: int
    target_length: int

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
        return {"input": np.arange(self.input_length), "target": 1000 + np.arange(self.target_length)}


@given(own=st.integers(0, 60), its=st.integers(2, 60), longest=st.integers(1, 50))
def test_tokens_are_those_that_the_lengths_say(own: int, its: int, longest: int) -> None:
    form = SampleForm("decoder")
    limits = sample_limits(form, longest, 0)
    kept = np.stack(limits.kept([np.array([own]), np.array([its])]), axis=1)
    [positions], _ = form.positions(kept)
    assert positions == min(own + its - 1, longest)
    sample = Samples(Pairs(own, its), form, limits).sample(0, 0, int(positions), 0)  # type: ignore[arg-type]
    tokens = np.concatenate([sample.inputs, sample.labels[-1:]])
    assert tokens.tolist() == [*range(kept[0, 0]), *range(1000, 1000 + kept[0, 1])]
    assert sample.counted is not None and sample.counted.sum() == form.counted(int(kept[0, 0]), int(positions), 0)
    assert (sample.labels[sample.counted] >= 1000).all() and sample.counted.sum() == kept[0, 1] - (kept[0, 0] == 0)
