"""Whether bad input ends well: every verb with every horror of `tests/horrors.py`, of which `tests/cli/test_hostile.py` tries a few.

  python benchmarks/hostile.py [--verb search] [--jobs 2] [--limit 30]

Each command runs in a process of its own, forked from one that has imported everything. It must end within `--limit` seconds with status 2
(3 where no plan fits), one error message without traceback and raw control characters, and nothing left on disk. Prints tried and right for
each verb, then the wrong ones; ends with status 1 if there are any.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from horrors import Case, all_cases, lay_out, traces, wrongs

from penstock.cli.main import VERBS, run


def ended(case: Case, limit_s: float) -> tuple[int | None, str, str, set[str], float]:
    """Status (None: it had to be killed), what it said, what it left, and how long it took."""
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name) / "work", [Path(name) / stream for stream in ("out", "err")]
        lay_out(folder)
        before, begin = traces(folder), time.monotonic()
        process = os.fork()
        if not process:
            _child(case, folder, said)
        status = _waited(process, begin + limit_s)
        took_s = time.monotonic() - begin
        texts = [path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else "" for path in said]
        return status, texts[0], texts[1], traces(folder) - before, took_s


def _child(case: Case, folder: Path, said: list[Path]) -> None:
    """Runs the command in a session of its own, so that whatever it starts ends with it."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in enumerate(said, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
        status = run(case.arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _waited(process: int, deadline: float) -> int | None:
    """The exit status of a child, None if it had to be killed; a signal that ended it is a negative number."""
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verb", help="this one alone")
    parser.add_argument("--slot", help="this option alone")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=30.0, help="seconds that a command may take")
    given = parser.parse_args()
    for verb in VERBS:
        import_module(f"penstock.cli.{verb.module}")
    for heavy in ("torch", "numba", "pydantic", "penstock.runtime.trainer", "penstock.search"):
        import_module(heavy)
    with tempfile.TemporaryDirectory() as name:
        lay_out(Path(name) / "work")
        cases = all_cases(Path(name) / "work")
    cases = [case for case in cases if given.verb in (None, case.verb) and given.slot in (None, case.slot)]
    tried, right, slowest = Counter[str](), Counter[str](), (0.0, "")
    with ThreadPoolExecutor(given.jobs) as pool:
        for case, (*end, took_s) in zip(cases, pool.map(lambda case: ended(case, given.limit), cases), strict=True):
            found = wrongs(case, *end)
            tried[case.verb] += 1
            right[case.verb] += not found
            slowest = max(slowest, (took_s, case.name))
            if found:
                told = next((line for line in end[2].splitlines() if line.startswith("error")), end[2][-100:])
                print(f"wrong: {case.name!a}: {'; '.join(found)} [{told[:160]!a}]", flush=True)
    for verb in tried:
        print(f"{verb or '(none)':14} {tried[verb]:5} tried {right[verb]:5} right")
    print(f"{'all':14} {tried.total():5} tried {right.total():5} right; the slowest took {slowest[0]:.1f} s: {slowest[1]!a}")
    return int(right.total() < tried.total())


if __name__ == "__main__":
    sys.exit(main())
