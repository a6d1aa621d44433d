"""A checkout of another planner: which interpreter runs it, where it may write, and what becomes of it when it fails or hangs."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InputError, PenstockError, near_misses

__all__ = ["PROGRAMS", "Peer", "PeerError", "PeerRun", "peers_of"]

PROGRAMS = {"aceso": "search/aceso_search.py", "fasop": "FASOP/FASOP.py", "dynapipe": "dynapipe/schedule_opt/execution_planner.py"}
"""The file by which a checkout of each peer is known."""
_MOST_SAID = 300


class PeerError(PenstockError):
    """A peer that ended without an answer; figures then show what was published and say so."""


@dataclass(frozen=True)
class PeerRun:
    """What a peer's program printed, and the processor time of it and all its children."""

    text: str
    cpu_s: float


@dataclass(frozen=True)
class Peer:
    """One planner's checkout. It runs with its own `.venv` where it has one, otherwise with the interpreter of this process."""

    name: str
    checkout: Path

    @property
    def python(self) -> str:
        """The interpreter that has what the peer needs."""
        own = self.checkout / ".venv" / "bin" / "python"
        return str(own.absolute()) if own.exists() else sys.executable

    def run(self, arguments: Sequence[str | Path], scratch: Path, timeout_s: float, *, within: str = ".", given: str = "") -> PeerRun:
        """Runs Python with these arguments in a folder of the checkout; `given` is its standard input.

        Its home is the scratch folder: FASOP empties a folder `tmp` of whoever starts it.
        """
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        process = subprocess.Popen(
            [self.python, *map(str, arguments)], cwd=self.checkout / within, env=self._environment(scratch), text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            text, complaints = process.communicate(given, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerError(f"{self.name} had not answered after {timeout_s:g} s.") from None
        finally:
            _end(process)
        if process.returncode:
            said = (complaints.strip() or text.strip() or "nothing").splitlines()[-1][:_MOST_SAID]
            raise PeerError(f"{self.name} ended with status {process.returncode}: {said}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return PeerRun(text, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def _environment(self, scratch: Path) -> dict[str, str]:
        path = f"{self.checkout.absolute() / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        here = str(scratch.absolute())
        return {"PATH": path, "HOME": here, "PWD": here, "TMPDIR": here, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a peer, children included."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.communicate()


def peers_of(given: Sequence[str]) -> Mapping[str, Peer]:
    """The checkouts that `--peer NAME=CHECKOUT` names."""
    found = {}
    for one in given:
        name, _, folder = one.partition("=")
        if name not in PROGRAMS or not folder:
            raise InputError(f"--peer is '{one}'; it takes NAME=CHECKOUT. {near_misses(name, PROGRAMS)}")
        if not (Path(folder) / PROGRAMS[name]).is_file():
            raise InputError(f"'{folder}' is no checkout of {name}: it has no {PROGRAMS[name]}. Give the folder that has it.")
        found[name] = Peer(name, Path(folder))
    return found
