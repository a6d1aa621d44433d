"""The folder of a run's checkpoints: names, which is the latest, how a finished one appears and old ones go.

    checkpoints/
      latest                        name of the newest one, for people and scripts; written last
      best                          name of the one with the lowest held-out loss, and that loss, likewise; it is never pruned
      abandoned                     numbers of the first and the last that the run has left, by going back to one before them
      save-000007-step-1400/        whole: it has been given this name after everything in it was on disk
        manifest.json  rank-00000.safetensors  rank-00001.safetensors …
      .partial-1600-TOKEN/          being written
      .trash-save-000006-…/         being deleted

Checkpoints are numbered in the order of writing, so that going back to an earlier step never meets a name that exists. Those that were
abandoned count as older than all others: which is the latest is in the folder, for whoever goes on with the run next.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.files import write_text
from penstock.runtime.checkpoints.files import sync_folder
from penstock.runtime.checkpoints.manifest import MANIFEST

__all__ = [
    "BEST", "BEST_LOSS", "LATEST", "abandon_newer", "best_checkpoint", "commit", "drop_leftovers", "find_checkpoint", "latest_checkpoint",
    "mark_best", "partial_folder", "prune", "step_of", "whole_checkpoints",
]  # fmt: skip

LATEST, BEST, _ABANDONED = "latest", "best", "abandoned"
BEST_LOSS = "best_loss"
"""In the state of a checkpoint whose held-out loss was the lowest so far: that loss."""
_NAME = re.compile(r"save-(\d{6,18})-step-(\d{1,18})")
_PARTIAL, _TRASH = ".partial-", ".trash-"


def whole_checkpoints(folder: str | Path) -> list[Path]:
    """Every whole checkpoint: those that were abandoned, and then the others, each in the order of writing."""
    return [path for *_, path in _whole(Path(folder))]


def _whole(folder: Path) -> list[tuple[bool, int, Path]]:
    """(whether it was not abandoned, number, path) of each."""
    abandoned = _abandoned(folder)
    return sorted((number not in abandoned, number, path) for number, path in _numbered(folder) if (path / MANIFEST).is_file())


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            yield int(match[1]), path


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The whole checkpoint written last, whether or not its run lived to say so in `latest`; None if there is none but abandoned ones."""
    is_current, _, path = next(reversed(_whole(Path(folder))), (False, 0, None))
    return path if is_current else None


def abandon_newer(folder: Path, checkpoint: Path) -> None:
    """A run goes on from `checkpoint`, and leaves those that were written after it; if that is in another folder, all that are here."""
    numbers = {path.resolve(): number for number, path in _numbered(folder)}
    own, latest = numbers.get(checkpoint.resolve(), 0), latest_checkpoint(folder)
    if not numbers or (latest is not None and numbers[latest.resolve()] == own):
        return
    write_text(folder / _ABANDONED, f"{own + 1} {max(numbers.values())}\n")
    if own:
        write_text(folder / LATEST, checkpoint.name + "\n")


def _abandoned(folder: Path) -> range:
    """Numbers of checkpoints whose steps a run has gone back behind; none if it never did."""
    try:
        first, last = map(int, (folder / _ABANDONED).read_text(encoding="utf-8").split())
    except (OSError, ValueError):  # not there, or not ours
        return range(0)
    return range(first, last + 1)


def step_of(checkpoint: Path) -> int:
    """The steps that a checkpoint of a folder of them has behind it, by its name."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match is not None
    return int(match[2])


def best_checkpoint(folder: str | Path) -> tuple[Path, float] | None:
    """The whole checkpoint with the lowest held-out loss, whether or not its run lived to say so in `best`, and that loss; None if nothing
    was evaluated."""
    found = [(path, loss) for path in whole_checkpoints(folder) if (loss := _evaluated(path)) is not None]
    return min(found, key=lambda one: one[1], default=None)


class _State(msgspec.Struct):
    best_loss: float | None = None


class _Evaluated(msgspec.Struct):
    """The evaluation in a checkpoint's manifest: all else in it, which may be much, is passed over."""

    state: _State


def _evaluated(checkpoint: Path) -> float | None:
    try:
        return msgspec.json.decode((checkpoint / MANIFEST).read_bytes(), type=_Evaluated).state.best_loss
    except (OSError, msgspec.DecodeError):  # not ours: as if nothing had been evaluated
        return None


def mark_best(folder: Path) -> Path | None:
    """Says in `best` which checkpoint that is; returns it."""
    if (best := best_checkpoint(folder)) is None:
        return None
    write_text(folder / BEST, f"{best[0].name} {best[1]!r}\n")
    return best[0]


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint at `path`: itself, or the latest of a folder of them, or of a run's folder."""
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = whole_checkpoints(path) or whole_checkpoints(path / "checkpoints")
    if not found:
        raise InputError(f"'{path}' holds no checkpoint: neither {MANIFEST} nor folders save-NUMBER-step-STEP that have one.")
    return found[-1]


def partial_folder(folder: Path, step: int, token: str) -> Path:
    """The folder in which the ranks of one run write the checkpoint of one step, until it is whole."""
    return folder / f"{_PARTIAL}{step}-{token}"


def commit(folder: Path, partial: Path, step: int) -> None:
    """Makes a partial checkpoint, all on disk, a whole one, and then the latest."""
    sync_folder(partial)
    number = max(1, _abandoned(folder).stop, *(number + 1 for number, _ in _numbered(folder)))
    whole = folder / f"save-{number:06}-step-{step}"
    os.rename(partial, whole)
    sync_folder(folder)
    write_text(folder / LATEST, whole.name + "\n")
    sync_folder(folder)


def prune(folder: Path, keep: int, best: Path | None) -> None:
    """Deletes all but the best and the last `keep` checkpoints."""
    for path in whole_checkpoints(folder)[:-keep]:
        if path != best:
            _delete(folder, path)


def _delete(folder: Path, path: Path) -> None:
    """Renamed first, so that a half deleted checkpoint is never taken for a whole one."""
    trash = folder / f"{_TRASH}{path.name.lstrip('.')}"
    os.rename(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def drop_leftovers(folder: Path, token: str) -> None:
    """Deletes what killed runs left behind; the parts that the ranks of this run (`token`) write stay."""
    for path in folder.iterdir():
        if path.name.startswith(_TRASH):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(_PARTIAL) and not path.name.endswith(f"-{token}"):
            _delete(folder, path)
        elif path.name.startswith((f".{LATEST}.", f".{BEST}.", f".{_ABANDONED}.")) and path.is_file():
            path.unlink(missing_ok=True)
