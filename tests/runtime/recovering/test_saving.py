"""After which steps a run saves what, its checkpoints and copies being lists here."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.plans.build import uniform_plan
from penstock.runtime.checkpoints.folder import BEST_LOSS
from penstock.runtime.checkpoints.going_on import RUN
from penstock.runtime.checkpoints.intervals import SaveInterval
from penstock.runtime.recovering.saving import RunSaves
from penstock.runtime.request import EvalRecord, TrainRequest


class _Lists:
    """Stands for a checkpoint writer and for copies: what was saved, with the loss by which it is the best, and what was copied."""

    busy = False

    def __init__(self) -> None:
        self.saved: list[tuple[int, float | None]] = []
        self.copied: list[int] = []
        self.states: list[Mapping[str, Any]] = []
        """What was saved beside tensors."""
        self.options: dict[str, Any] = {}
        """With which the writer was made."""

    def made(self, *given: Any, **options: Any) -> _Lists:
        """As a writer of checkpoints."""
        self.options = options
        return self

    def save(self, *given: Any, keep: int = -1) -> None:
        state: Mapping[str, Any] = given[-1]
        self.states.append(state)
        if len(given) == 3:
            self.saved.append((given[0], state.get(BEST_LOSS)))
        else:
            self.copied.append(given[1])

    def wait(self) -> None:
        """Nothing is under way."""


def saves_of(lists: _Lists, out: Path, monkeypatch: pytest.MonkeyPatch, saved: int = 0, **options: int) -> RunSaves:
    """Of a rank of which nothing but its place is known."""
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=16, micro_batch=4)
    request = TrainRequest(plan, "", 20, str(out), **options)  # type: ignore[arg-type]
    groups = SimpleNamespace(generation=SimpleNamespace(number=0))
    rank: Any = SimpleNamespace(world=SimpleNamespace(rank=1, place=1, ranks=(0, 1), groups=groups))
    monkeypatch.setattr("penstock.runtime.recovering.saving.rank_pieces", lambda rank: ())
    monkeypatch.setattr("penstock.runtime.recovering.saving.rank_state", lambda rank: {})
    monkeypatch.setattr("penstock.runtime.recovering.saving.CheckpointWriter", lists.made)
    batches: Any = SimpleNamespace(state=lambda done: {"step": done})
    faults: Any = SimpleNamespace(within=lambda phase, pieces: pieces)
    found = RunSaves(request, rank, batches, copies=lists, faults=faults, token="a", saved=saved)  # type: ignore[arg-type]
    found.take_place()
    return found


def test_checkpoints_by_steps_time_and_evaluation_and_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = _Lists()
    saves = saves_of(lists, tmp_path, monkeypatch, checkpoint_every=4, copies=3, keep=7)
    assert lists.options == {"rank": 1, "world_size": 2, "token": "a", "keep": 7}
    evaluated = {2: 5.0, 6: 5.5, 8: 4.5}
    for done in range(1, 10):
        loss, saves.safe_copy = evaluated.get(done), -1.0 if done < 8 else 3.0  # until then, what is copied is here alone
        saves.after(done, None if loss is None else EvalRecord(done, loss, 0.0), is_due=done in (4, 7))
    assert lists.saved == [(2, 5.0), (4, None), (7, None), (8, 4.5)] and lists.copied == [3, 9]
    saves.finish(9)
    saves.finish(9)  # once is enough
    assert lists.saved[4:] == [(9, None)]
    saves.copy(20)  # nobody goes on after the last step
    assert lists.copied == [3, 9]


def test_no_copy_is_newer_than_a_best_checkpoint_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A death would lose it, and who goes on from the copy does not evaluate that step again. Of other checkpoints nothing is lost."""
    lists = _Lists()
    saves = saves_of(lists, tmp_path, monkeypatch, checkpoint_every=9, copies=4)
    evaluated, saving, saves.safe_copy = {4: 5.0, 12: 5.5}, (5, 10, 11, 12), math.inf
    for done in range(1, 13):
        loss = evaluated.get(done)
        saves.after(done, None if loss is None else EvalRecord(done, loss, 0.0), is_due=False, is_saving=done in saving)
    assert lists.saved == [(4, 5.0), (9, None)] and lists.copied == [6, 8, 12]


def test_a_node_leaves_once_its_parting_copies_are_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = _Lists()
    saves = saves_of(lists, tmp_path, monkeypatch, checkpoint_every=0, copies=5)
    left = []
    for done in range(4, 10):
        saves.safe_copy = {4: 0.0, 5: 0.0, 6: 0.0, 7: 5.0, 8: 5.0, 9: 7.0}[done]
        saves.after(done, None, is_due=False, leaves=done >= 6)  # at 6 those of step 5 are not elsewhere yet
        left.append(saves.may_leave)
    assert lists.copied == [5, 7] and left == [False] * 5 + [True]


def test_a_run_from_copies_saves_even_if_it_does_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for saved, expected in ((5, []), (-1, [(5, None)])):
        lists = _Lists()
        saves_of(lists, tmp_path, monkeypatch, saved).finish(5)
        assert lists.saved == expected


@pytest.mark.parametrize("every", [0, 500])
def test_time_alone_asks_for_none_where_none_are_wanted(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = saves_of(_Lists(), tmp_path, monkeypatch, checkpoint_every=every)
    assert not saves.is_late and not saves.is_saving
    saves._interval = SaveInterval(_last_s=time.monotonic() - 601.0)
    assert saves.is_late == bool(every)


def test_every_rank_with_work_leaves_copies_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one too; for who has none nobody has to wait."""
    for rank, copied, elsewhere in ((0, [3], 7.0), (1, [3], 7.0), (-1, [], math.inf)):
        lists = _Lists()
        lists.safe_step = lambda rank: 7  # type: ignore[attr-defined]
        saves = saves_of(lists, tmp_path, monkeypatch, copies=3)
        saves._rank.world.rank = rank
        saves.copy(3)
        saves.copy(20)  # the last step: nobody goes on from it
        assert (lists.copied, saves.copied) == (copied, elsewhere)


@pytest.mark.parametrize("place", [0, 1])
def test_what_is_saved_says_of_which_run_it_is_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """By the first rank, once; and steps are on disk before a copy has them behind it."""
    lists, flushed = _Lists(), list[list[int]]()
    saves = saves_of(lists, tmp_path, monkeypatch, copies=3)
    monkeypatch.setattr("penstock.runtime.recovering.saving.run_facts", lambda model, data, **facts: facts)
    saves._rank.world.place, saves._rank.model = place, None  # type: ignore[assignment]
    saves.before_copy = lambda: flushed.append([*lists.copied])
    saves.copy(3)
    saves.finish(4)
    facts = {} if place else {"seed": 0, "global_batch": 16}
    assert lists.states == [{"data": {"step": step}, RUN: facts} for step in (3, 4)] and flushed == [[]] and lists.copied == [3]


def test_a_run_that_goes_on_knows_how_good_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its first evaluation is taken for the best of all."""
    monkeypatch.setattr("penstock.runtime.recovering.saving.best_checkpoint", lambda folder: (folder / "save-000001-step-2", 5.0))
    lists = _Lists()
    saves = saves_of(lists, tmp_path, monkeypatch, saved=2, checkpoint_every=0)
    for done, loss in ((3, 6.0), (4, 4.0)):
        saves.after(done, EvalRecord(done, loss, 0.0), is_due=False)
    assert lists.saved == [(4, 4.0)]
