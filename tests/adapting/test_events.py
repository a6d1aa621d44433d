"""Events of a run that several processes write down."""

from __future__ import annotations

from pathlib import Path

from penstock.adapting.events import EVENTS, RunEvent, append_event, read_events


def test_what_a_killed_rank_has_half_written_takes_no_event_along(tmp_path: Path) -> None:
    """The launcher tells next that it was lost."""
    noticed, lost, replaced = (RunEvent(kind, 3, 1.0, "text") for kind in ("noticed", "lost", "replaced"))
    append_event(tmp_path, noticed)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event":"decided","alternatives":[{"remedy":"move"}')
    append_event(tmp_path, lost)
    append_event(tmp_path, replaced)
    assert list(read_events(tmp_path)) == [noticed, lost, replaced]
