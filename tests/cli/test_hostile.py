"""Every verb with a few of the horrors of `tests/horrors.py`; `benchmarks/hostile.py` tries them all, each in a process of its own."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from horrors import Case, all_cases, lay_out, traces, wrongs

from penstock.cli import console
from penstock.cli.main import VERBS, run

_OF_EACH_SLOT = 3
_LIMIT_S = 60
"""A command that waits for a pipe would wait forever; none of these takes more than moments of work."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where commands run, with all files that they name; both consoles are made anew for what pytest captures."""
    folder = tmp_path / "work"
    lay_out(folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    console.err.cache_clear()
    yield folder
    console.err.cache_clear()


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _chosen(cases: list[Case]) -> list[Case]:
    """Some horrors of every slot, others for each slot, so that together they are all of them."""
    slots: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in cases:
        slots[case.verb, case.slot].append(case)
    found = []
    for number, own in enumerate(slots.values()):
        step = max(1, len(own) // _OF_EACH_SLOT)
        found += own[number % step :: step][:_OF_EACH_SLOT]
    return found


@pytest.mark.parametrize("verb", ["", *(verb.name for verb in VERBS)])
def test_horrors_are_refused_in_one_message_and_leave_nothing(verb: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [case for case in _chosen(all_cases(folder)) if case.verb == verb]
    before, found = traces(folder), []
    assert cases
    for case in cases:
        with _limited(_LIMIT_S):
            status = run(case.arguments)
        told = capsys.readouterr()
        found += [f"{case.name!r}: {wrong}" for wrong in wrongs(case, status, told.out, told.err, traces(folder) - before)]
    assert found == []


def test_a_bad_end_is_seen() -> None:
    case = Case("search", "--out", "dot", ("search",), (2,))
    assert wrongs(case, 2, "", "error: wrong.\n", set()) == []
    for status, out, err, left in (
        (None, "", "", set()), (0, "", "", set()), (2, "", "", set()), (2, "", "error: a\nerror: b\n", set()),
        (2, "\x1b[2J", "error: a\n", set()), (2, "", "error: a\n", {"x"}), (2, "", "Traceback\nerror: a\n", set()),
    ):  # fmt: skip
        assert wrongs(case, status, out, err, left)
