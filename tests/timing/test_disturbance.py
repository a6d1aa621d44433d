"""What slows a run down, as a function of the step; files that say so, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.timing.disturbance import Disturbance, DisturbanceChange, DisturbanceStrike
from penstock.timing.disturbance_file import read_disturbance

STORY = """
- {rank: 3, factor: 1.5, from: 2}
- {rank: 3, factor: 2, shape: pulse, from: 3, steps: 1}
- {link: 2-0, factor: 4, shape: ramp, from: 1, steps: 3}
- {rank: 1, factor: 3, shape: square, from: 0, steps: 1}
- {data: true, factor: 2, from: 4}
- {kill: 1@backward, from: 7}
- {freeze: 3}
- {kill: node 1@update, from: 9}
- {kill: store, from: 11}
"""


def test_a_story(tmp_path: Path) -> None:
    (tmp_path / "story.yaml").write_text(STORY, encoding="utf-8")
    found = read_disturbance(tmp_path / "story.yaml")
    steps = range(6)
    assert [found.compute(3, step) for step in steps] == [1, 1, 1.5, 3, 1.5, 1.5]
    assert [found.compute(1, step) for step in steps] == [3, 1, 3, 1, 3, 1]
    assert [found.link(0, 2, step) for step in steps] == [found.link(2, 0, step) for step in steps] == [1, 2, 3, 4, 4, 4]
    assert [found.data(step) for step in steps] == [None] * 4 + [2, 2]
    assert {found.compute(0, step) * found.link(0, 1, step) for step in steps} == {1.0}
    *ranks, node, store = found.strikes
    assert ranks == [DisturbanceStrike("kill", 1, "backward", 7), DisturbanceStrike("freeze", 3, "forward")]
    assert (node, node.subject) == (DisturbanceStrike("kill", None, "update", 9, 1), "node 1")
    assert (store, store.subject) == (DisturbanceStrike("kill", None, "forward", 11), "the store")
    found.require_ranks(range(4))
    with pytest.raises(InputError, match="rank 3 is to be struck, but the plan has ranks 0 to 2"):
        Disturbance(strikes=found.strikes).require_ranks(range(3))
    with pytest.raises(InputError, match="rank 3 is to be slower, but the plan has ranks 0 to 2"):
        found.require_ranks(range(3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {rank: 1, factor: 0}", r": 0: rank 1 is to take 0 times as long; a number above 0"),
        ("- {link: 0-1, factor: -2}", r"link 0-1 is to take -2 times as long"),
        ("- {data: true, factor: .nan}", r"data loading is to take nan times as long"),
        ("- {rank: 0, factor: 2}\n- {rank: 1, factor: 2, shape: wave}", r": 1: rank 1: shape 'wave' is not known\. Known: pulse"),
        ("- {rank: 1, factor: 2, shape: ramp}", r"a ramp of 0 steps is none\. Give `steps`"),
        ("- {link: 1-1, factor: 2}", r"link 1-1 joins rank 1 to itself"),
        ("- {rank: 1, link: 0-1, factor: 2}", r"2 of rank, link and data are given; name one"),
        ("- {kill: 1, factor: 2}", r": 0: factor and kill do not go together"),
        ("- {kill: 1, freeze: 2}", r": 0: freeze and kill do not go together"),
        ("- {kill: one}", r"0\.kill"),
        ("- {rank: 1}", r": 0: factor is missing"),
        ("- {factor: 2}", r"0 of rank, link and data are given"),
        ("- {rnk: 1, factor: 2}", r"0\.rnk: this field does not exist\. Did you mean 'rank'"),
        ("- {rank: -1, factor: 2}", r"0\.rank: .*greater than or equal to 0"),
        ("- {link: a-b, factor: 2}", r"0\.link: .*should match pattern"),
        ("rank: 1", r"\(top level\): Input should be a valid list"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "story.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_disturbance(tmp_path / "story.yaml")


def test_changes_of_one_thing_multiply() -> None:
    twice = Disturbance((DisturbanceChange((0,), 2.0), DisturbanceChange((0,), 3.0, first=1)))
    assert [twice.compute(0, step) for step in range(2)] == [2.0, 6.0]
