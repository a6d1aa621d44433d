"""The roofline promises no more of well-known settings than was ever reached; `benchmarks/plausible.py` has all of them."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_modules import load_benchmark

PLAUSIBLE = load_benchmark("plausible")


@pytest.mark.parametrize("setting", PLAUSIBLE.SHORT, ids=lambda setting: f"{setting.model} on {setting.cluster}")
def test_a_published_run_is_not_outdone(setting: Any) -> None:
    mfu = PLAUSIBLE.predicted_mfu(setting)
    assert PLAUSIBLE.verdict(setting, mfu) == "plausible", f"{mfu:.1%}, published {setting.published:.1%}"


def test_verdicts_and_sources() -> None:
    first = PLAUSIBLE.SETTINGS[0]
    told = [PLAUSIBLE.verdict(first, share * first.published) for share in (0.4, 0.9, 1.1)]
    assert told == ["too slow", "plausible", "too fast"]
    assert {setting.source for setting in PLAUSIBLE.SETTINGS} == set(PLAUSIBLE.SOURCES)
    assert {"a100-80gb", "h100"} == {setting.cluster.partition("x")[2] for setting in PLAUSIBLE.SETTINGS}
