"""Who leads a job, agreed in the run's folder: the node that holds its lock. When it is lost, the first other to get the lock leads.

    leader.json   {"node": 0, "host": "10.0.0.1", "port": 29500, "term": 0, …}      written by whoever leads, before others are met
    lock          held by the supervisor that leads; the system lets go of it when that ends, however it ends
                  its last line counts seconds: where it stands still, so does the supervisor, and the lock is taken away from it
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from penstock.errors import InputError, PenstockError
from penstock.files import readable_bytes
from penstock.runtime.run_lock import RunLock, lock_word, run_lock, take_away
from penstock.stores.sealing import write_private

__all__ = ["LeaderLostError", "LedBy", "beating", "forget_led", "read_led", "succeed", "write_led"]

_FILE = "leader.json"
_SUCCESSION_S, _LOOK_S = 30.0, 0.1
_BEAT_S, _STILL_S = 1.0, 5.0
"""A supervisor that leads shows life so often; one that has not for so long stands still."""
_TURN_S = 0.5
"""Nodes try one after the other, so that the first of them leads, whose ranks come first."""


class LeaderLostError(PenstockError):
    """The node that led the job is not there any more."""

    def __init__(self, message: str, *, has_left: bool = False) -> None:
        super().__init__(message)
        self.has_left = has_left
        """Whether it said so before, as one does whose machine is taken away."""


class LedBy(msgspec.Struct, frozen=True):
    """The node that leads a run, and its address."""

    node: int
    host: str
    port: int
    term: int
    """How often the lead has changed."""
    nodes: tuple[int, ...] = ()
    """Those that are there."""
    num_nodes: int = 0
    """Those of the plan."""
    command: tuple[str, ...] = ()
    """The words after `penstock` with which the first node was started."""
    folder: str = ""
    """Where it was."""


def write_led(folder: str | Path, led: LedBy) -> None:
    """Tells all of this user's who look who leads: the words of a command may hold a password, as a store's address does."""
    write_private(Path(folder) / _FILE, msgspec.json.encode(led).decode() + "\n")


def read_led(folder: str | Path) -> LedBy | None:
    """Reads which node leads a run; None: nobody, or it is on one machine."""
    path = Path(folder) / _FILE
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(readable_bytes(path, "leader"), type=LedBy)
    except msgspec.DecodeError as error:
        raise InputError(f"leader '{path}': {error}.") from None


def forget_led(folder: str | Path) -> None:
    """The run has ended."""
    (Path(folder) / _FILE).unlink(missing_ok=True)


@contextmanager
def beating(lock: RunLock) -> Iterator[None]:
    """Shows life in the run's folder while entered, for those who cannot hear it."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(_BEAT_S):
            with suppress(OSError):  # a file system that is away for a moment: others wait for longer
                lock.beat()

    thread = threading.Thread(target=beat, name="lock beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def succeed(folder: str | Path, own: int, term: int, why: str) -> LedBy | tuple[ExitStack, RunLock]:
    """Decides who leads after the leader of `term` was lost: another node, or this one, which then holds the run's lock until it closes
    the stack. A leader that merely stands still loses the lock. A node that was merely cut off has to end: whoever led goes on without it,
    or has done so."""
    end = time.monotonic() + _SUCCESSION_S
    word, still_s = b"", 0.0
    time.sleep(_TURN_S * own)
    while time.monotonic() < end:
        led = read_led(folder)
        if led is not None and led.term > term:
            return led
        stack = ExitStack()
        try:
            lock = stack.enter_context(run_lock(Path(folder)))
        except InputError:
            time.sleep(_LOOK_S)
            # Counted in looks: time in which this process did not run itself is none in which the other stood still.
            word, still_s = (word, still_s + _LOOK_S) if (now := lock_word(Path(folder))) == word else (now, 0.0)
            if still_s >= _STILL_S:
                if not Path(folder).is_dir():
                    raise LeaderLostError(f"{why} The folder of the run, '{folder}', is gone.") from None
                take_away(Path(folder), word)
            continue
        led = read_led(folder)  # again: it may have changed before the lock was free
        if led is not None and led.term > term:
            stack.close()
            return led
        if led is None or own not in led.nodes:
            stack.close()
            raise LeaderLostError(f"{why} The run has {'ended' if led is None else 'gone on without this node'}.")
        return stack, lock
    raise LeaderLostError(f"{why} It still holds '{folder}', so that it goes on without this node.")
