"""What has reached the disk when a file gets its name: calls of `os.fsync` and renames, done as asked and noted in their order."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DiskOrder"]


class DiskOrder:
    """Notes what happens from its making on, in all threads."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        """("synced", path) and ("named", path that a file or folder has from then on)."""
        real_fsync, one_at_a_time = os.fsync, threading.Lock()

        def fsync(handle: Any) -> None:
            real_fsync(handle)
            number = handle if isinstance(handle, int) else handle.fileno()
            with one_at_a_time:
                self.events.append(("synced", os.readlink(f"/proc/self/fd/{number}")))

        def noting(real: Any) -> Any:
            def rename(source: Any, target: Any) -> None:
                before = os.path.realpath(source)
                with one_at_a_time:
                    real(source, target)
                    after = os.path.realpath(target)
                    # What was synced under its old name, or inside of a folder that had it, is what has the new one.
                    self.events = [
                        (what, after + path.removeprefix(before) if _is_in(path, before) else path) for what, path in self.events
                    ]
                    self.events.append(("named", after))

            return rename

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "replace", noting(os.replace))
        patch.setattr(os, "rename", noting(os.rename))

    def is_synced_before(self, path: Path, named: Path) -> bool:
        """Whether a file or folder was on disk when something got its name."""
        order = [("synced", os.path.realpath(path)), ("named", os.path.realpath(named))]
        return all(one in self.events for one in order) and self.events.index(order[0]) < self.events.index(order[1])

    def is_synced_after(self, path: Path, named: Path) -> bool:
        """Whether a folder was brought to disk again after something in it got its name."""
        last = max((at for at, one in enumerate(self.events) if one == ("synced", os.path.realpath(path))), default=-1)
        return ("named", os.path.realpath(named)) in self.events[: max(last, 0)]


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")
