"""Commands that people would type, a few of those that `benchmarks/everyday.py` draws at random: they end well, and agree."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmark_modules import load_benchmark

EVERYDAY = load_benchmark("everyday")


@pytest.mark.parametrize("number", range(6))
def test_what_people_would_type_ends_well(number: int, tmp_path: Path) -> None:
    case = EVERYDAY.drawn(random.Random(f"test/{number}"))
    EVERYDAY.tried(case, tmp_path)
    assert not case.wrongs
