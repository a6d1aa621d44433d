"""What a search knows while it runs: the sharper of two bounds, the weakest line, and the fastest plan."""

from __future__ import annotations

import math
from typing import Any

import pytest

from penstock.search.progress import GOOD_GAP, Progress, ProofLine, unwatched, weakest


def line(by_ops_s: float, by_stages_s: float | None) -> ProofLine:
    subspace: Any = None
    return ProofLine(1, 1, subspace, by_ops_s, by_stages_s)


@pytest.mark.parametrize(
    ("by_ops_s", "by_stages_s", "expected"), [(2.0, None, 2.0), (2.0, 3.0, 3.0), (2.0, 1.0, 2.0), (2.0, math.inf, math.inf)]
)
def test_a_line_proves_what_the_sharper_of_its_bounds_does(by_ops_s: float, by_stages_s: float | None, expected: float) -> None:
    assert line(by_ops_s, by_stages_s).bound_s == expected


def test_a_proof_is_as_good_as_its_weakest_line() -> None:
    lines = [line(2.0, 5.0), line(3.0, None), line(1.0, 4.0)]
    assert (weakest(lines), weakest([])) == (3.0, math.inf)
    progress = Progress(unwatched, 0.0, known_s=10.0, lines=lines)
    assert progress.enough_s == 3.0 and Progress(unwatched, 0.0, known_s=10.0).enough_s == 10.0 / (1 + GOOD_GAP)
