"""Profiles say which kernels they were measured with; those that are shipped were measured with today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.costs.profile import read_profile
from penstock.costs.sources import shipped_profiles
from penstock.profiling.run import Profiler
from penstock.profiling.stamp import stamp, stamp_of

SOURCE = '''"""A module."""

LARGE = 2**23
"""What is large."""


def twice(x: float) -> float:
    """Two of it."""
    return 2 * x  # not x + x
'''


def stamped(folder: Path, text: str, name: str = "one.py") -> str:
    (folder / name).write_text(text)
    return stamp_of(folder)


def test_words_and_layout_have_no_part_in_a_stamp(tmp_path: Path) -> None:
    usual = stamped(tmp_path, SOURCE)
    words = {"Two of it.": "It, doubled.", "What is large.": "Much.", "  # not x + x": "", "\n\n\n": "\n"}
    reworded = SOURCE
    for was, becomes in words.items():
        assert was in reworded
        reworded = reworded.replace(was, becomes)
    assert stamped(tmp_path, reworded) == usual
    assert stamped(tmp_path, "never timed", "trace.py") == usual


@pytest.mark.parametrize(("was", "becomes"), [("2**23", "2**22"), ("2 * x", "x * 2"), ("def twice(x", "def twice(*x")])
def test_another_kernel_is_another_stamp(was: str, becomes: str, tmp_path: Path) -> None:
    assert stamped(tmp_path, SOURCE) != stamped(tmp_path, SOURCE.replace(was, becomes))


def test_another_file_is_another_stamp(tmp_path: Path) -> None:
    assert stamped(tmp_path, SOURCE) != stamped(tmp_path, SOURCE, "two.py")


def test_a_profile_has_the_stamp_of_the_modules_it_was_measured_with(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    begun = Profiler.open(path, "cpu")
    assert begun.here.about["modules"] == stamp()
    begun.here.about["modules"] = "those of last year"
    begun.profile.write(path)
    assert Profiler.open(path, "cpu").here.about["modules"] == "several"


@pytest.mark.parametrize("name", shipped_profiles())
def test_shipped_profiles_are_of_these_kernels(name: str) -> None:
    about = read_profile(shipped_profiles()[name]).devices[name].about
    assert about["modules"] == stamp(), (
        f"src/penstock/models/modules has changed since profile {name} was measured ({about['date']}): its times are of other kernels. "
        "Measure anew on that device: python benchmarks/on_gpu.py --out on-gpu, which says what to copy where."
    )
