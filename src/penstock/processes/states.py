"""What Linux says of a process' state."""

from __future__ import annotations

import os
import resource
from pathlib import Path

__all__ = ["family_cpu_s", "is_stopped", "processor_of", "started_ticks", "stopped_children"]

_STOPPED = "T"
"""One that is traced is `t`."""


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as SIGSTOP does; not so one that a debugger holds, nor one that is gone."""
    return _fields(pid)[:1] == [_STOPPED]


def stopped_children(pid: int) -> list[int]:
    """The children of a process that a signal has stopped."""
    return [child for child, fields in _all().items() if fields[:2] == [_STOPPED, str(pid)]]


def started_ticks(pid: int) -> int | None:
    """When a process was started, in the kernel's ticks since the machine was; None if there is none."""
    fields = _fields(pid)
    return int(fields[19]) if fields else None


def processor_of(pid: int) -> int | None:
    """The processor that a process ran on last; None if there is none."""
    fields = _fields(pid)
    return int(fields[36]) if fields else None


def family_cpu_s() -> float:
    """Processor seconds of this process, of children that ended, and of those that live on with the children that they have seen end:
    a server that forks workers is such a child."""
    own = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    living = [fields for fields in _all().values() if fields[1:2] == [str(os.getpid())]]
    return own + sum(int(ticks) for fields in living for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def _all() -> dict[int, list[str]]:
    """The fields of every process."""
    return {int(path.name): _fields(int(path.name)) for path in Path("/proc").glob("[0-9]*")}


def _fields(pid: int) -> list[str]:
    """The fields of a process' line in /proc from its state on; then comes its parent, and 11 to 14 are its own and its children's ticks.
    None of one that is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()
