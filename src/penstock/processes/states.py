"""What Linux says of a process' state."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_stopped"]

_STOPPED = "T"
"""One that is traced is `t`."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as SIGSTOP does; not so one that a debugger holds, nor one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == _STOPPED
