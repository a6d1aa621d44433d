"""Plants one bug after the other and runs the tests that should catch it; a bug that survives names a test that is missing.

    python benchmarks/mutants.py                  every bug of `planted_bugs.py`
    python benchmarks/mutants.py --room runtime   those of one room
    python benchmarks/mutants.py --only NAME      one of them
    python benchmarks/mutants.py --quick          the first of each room

Sources and tests are copied to a temporary folder first, so that nothing here is touched. Status 1 if any bug survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from planted_bugs import PLANTED, PlantedBug

ROOT = Path(__file__).parents[1]
LIMIT_S = 300.0
"""For the tests of one bug; a bug that makes them hang is caught."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--room", help="only bugs of this room, such as runtime")
    parser.add_argument("--only", help="only the bug of this name")
    parser.add_argument("--quick", action="store_true", help="only the first bug of each room")
    given = parser.parse_args()
    bugs = chosen(given.room, given.only, given.quick)
    if not bugs:
        print(f"no planted bug is called '{given.only or given.room}'; see benchmarks/planted_bugs.py", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_sources(Path(folder))
        caught = [try_bug(bug, Path(folder)) for bug in bugs]
    return told(bugs, caught)


def copy_sources(folder: Path) -> None:
    """All that tests need, with times of files, by which compiled kernels are known."""
    for name in ("src", "tests", "examples", "docs", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "CONTRIBUTING.md", "README.md"):
        shutil.copy2(ROOT / name, folder / name)


def chosen(room: str | None, name: str | None, quick: bool) -> list[PlantedBug]:
    bugs = [bug for bug in PLANTED if room in (None, bug.room) and name in (None, bug.name)]
    first: dict[str, PlantedBug] = {}
    for bug in bugs:
        first.setdefault(bug.room, bug)
    return list(first.values()) if quick else bugs


def try_bug(bug: PlantedBug, copy: Path) -> bool:
    """Whether the bug's tests fail with it; `copy` is as before afterwards."""
    file = copy / "src" / "penstock" / bug.file
    text, times = file.read_text(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_text(bug.planted_in(text))
    begin = time.monotonic()
    try:
        status = run_tests(bug, copy)
    finally:
        file.write_text(text)
        os.utime(file, ns=times)
    if status not in (0, 1, None):
        raise SystemExit(f"{bug.name}: pytest ended with status {status}; do {' '.join(bug.tests)} exist?")
    verdict = "SURVIVED" if status == 0 else "caught" if status else "caught (hung)"
    print(f"{bug.room:>10}  {bug.name:<44} {verdict} in {time.monotonic() - begin:.0f} s", flush=True)
    return status != 0


def run_tests(bug: PlantedBug, copy: Path) -> int | None:
    """pytest's status; None if it did not end in time."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.tests, *(("-k", bug.pick) if bug.pick else ())]
    tables = os.environ.get("PENSTOCK_DATA", str(ROOT.parent / "shared" / "data"))  # tests look for them beside their own folder
    environment = {**os.environ, "PENSTOCK_DATA": tables, "PYTHONPATH": str(copy / "src"), "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def told(bugs: Sequence[PlantedBug], caught: Sequence[bool]) -> int:
    """Prints planted and caught of each room, and what survived; the status."""
    planted, found = Counter(bug.room for bug in bugs), Counter(bug.room for bug, one in zip(bugs, caught, strict=True) if one)
    print(f"\n{'room':>10}  planted  caught")
    for room, count in planted.items():
        print(f"{room:>10}  {count:7}  {found[room]:6}")
    print(f"{'all':>10}  {len(bugs):7}  {sum(caught):6}")
    for bug, one in zip(bugs, caught, strict=True):
        if not one:
            print(f"survived: {bug.name} ({bug.file}): {bug.why}")
    return 0 if all(caught) else 1


if __name__ == "__main__":
    sys.exit(main())
