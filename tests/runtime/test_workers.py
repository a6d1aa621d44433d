"""Worker processes: results in order, one clear message when one fails or dies, nothing hangs, nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from runtime_cases import make_case
from worker_jobs import fail_in_program, fail_on, hang_on, identify, kill_in_program, kill_in_word, sleep, tell_and_die

from penstock.errors import InputError
from penstock.runtime.workers import BeginAnew, WorkerError, WorkerPool, launch

CHOICE = {"family": "gpt", "pp": 2, "tp": 1, "dp": 1, "replicas": 1, "schedule": "1f1b", "layout": "packed", "recompute": "none",
          "cuts": "even", "degrees": "equal", "zero": 0, "sequence_parallel": False}  # fmt: skip


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def await_end(pids: list[int]) -> None:
    """Returns when none of the processes is left; the test's time-out ends a wait in vain."""
    while any(map(is_running, pids)):
        time.sleep(0.05)


def test_results_come_in_the_order_of_ranks_and_workers_stay() -> None:
    with WorkerPool(3) as pool:
        pids = pool.pids()
        assert pool.run(identify, "a") == [(0, 3, pids[0], "a"), (1, 3, pids[1], "a"), (2, 3, pids[2], "a")]
        assert [answer[3] for answer in pool.run_each(identify, [("x",), ("y",), ("z",)])] == ["x", "y", "z"]
    await_end(pids)


def test_an_exception_names_the_rank_and_ends_the_others() -> None:
    pool = WorkerPool(3)
    pids = pool.pids()
    with pytest.raises(WorkerError, match="rank 1 failed: ValueError: no luck"):
        pool.run(fail_on, 1)
    await_end(pids)
    with pytest.raises(WorkerError, match="earlier failure"):
        pool.run(identify, "a")


def test_a_failing_instruction_is_named() -> None:
    case = make_case(CHOICE, 0)
    pool = WorkerPool(2)
    with pytest.raises(WorkerError, match=r"rank 1 failed in iteration 1 at forward of stage 1, micro-batch 1 \(instruction \d+ of \d+\): "
                                          "MemoryError: as if out of memory"):  # fmt: skip
        pool.run(fail_in_program, case.plan, case.programs(), 1)


def test_a_killed_rank_is_named_with_where_it_was() -> None:
    case = make_case(CHOICE, 0)
    pool = WorkerPool(2)
    pids = pool.pids()
    with pytest.raises(
        WorkerError, match=r"rank 1 was killed by signal 9 \(SIGKILL\) at Forward of stage 1, micro-batch 1 \(iteration 1, instruction"
    ):
        pool.run(kill_in_program, case.plan, case.programs(), 1)
    await_end(pids)


def test_a_kill_from_outside_ends_the_job() -> None:
    pool = WorkerPool(2)
    pids = pool.pids()
    threading.Timer(0.5, os.kill, (pids[0], signal.SIGKILL)).start()
    with pytest.raises(WorkerError, match="rank 0 was killed by signal 9"):
        pool.run(sleep, 1000.0)
    await_end(pids)


def test_a_rank_that_dies_between_two_jobs_or_within_a_word_is_named() -> None:
    """Whether it can still be told its job, or has told half of something, its death is what counts: others may take its place."""
    pool = WorkerPool(2)
    pids = pool.pids()
    os.kill(pids[0], signal.SIGKILL)
    await_end(pids[:1])
    for job, rank in ((identify, 0), (kill_in_word, 1)):
        with pytest.raises(WorkerError, match=rf"rank {rank} was killed by signal 9 \(SIGKILL\)") as found:
            pool.run(job, rank)
        assert found.value.is_lost
        pool.revive((0, 1), threads=1)
    pool.close()


def test_what_was_told_before_a_death_is_heard_though_the_launcher_was_busy() -> None:
    """Others go on from steps that were done by then, and nobody would tell of those again."""
    pool = WorkerPool(2)
    pids, heard = pool.pids(), list[int]()

    def listen(rank: int, word: int) -> None:
        heard.append(word)
        await_end(pids[1:])
        if anew and not pool.has_failed:
            raise BeginAnew

    for anew in (False, True):
        with pytest.raises(BeginAnew if anew else WorkerError, match=None if anew else "rank 1 was killed by signal 9"):
            pool.run(tell_and_die, 5, listen=listen)
        assert heard == list(range(5))
        pool.revive((0, 1), threads=1)
        pids, heard = pool.pids(), []
    pool.close()


def test_a_rank_that_hangs_is_told_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it is as soon as the other has answered, however long that takes."""
    pool, passed_s = WorkerPool(2), [0.0]
    answer, later = pool._answer, SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed_s))
    monkeypatch.setattr(pool, "_answer", lambda rank: (answer(rank), passed_s.append(300.0))[0])
    monkeypatch.setattr("penstock.runtime.workers.time", later)
    with pytest.raises(WorkerError, match=r"(?s)1 of 2 ranks did not finish in time.*rank 1 is before its first program"):
        pool.run(hang_on, 1, timeout_s=250.0)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Names of sockets have room for a hundred letters, which folders of tests with theirs do not leave."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_workers_go_with_their_launcher(tmp_path: Path, short_path: Path) -> None:
    """And leave nothing: where each of them was, and copies of what it had learned, are in memory that has no name."""
    script = tmp_path / "launcher.py"
    script.write_text(
        "import sys, time\n"
        "from penstock.runtime.recovering.copies import Copies\n"
        "from penstock.runtime.workers import WorkerPool\n"
        "from worker_jobs import sleep_named\n"
        "if __name__ == '__main__':\n"
        "    pool = WorkerPool(2, copies=Copies(2))\n"
        "    print(*pool.pids(), flush=True)\n"
        "    pool.run(sleep_named, sys.argv[1])\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(short_path)}
    launcher = subprocess.Popen([sys.executable, str(script), str(short_path)], stdout=subprocess.PIPE, text=True, env=environment)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_running, pids))
    while len(list(short_path.glob("*.process.json"))) < 2:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    await_end(pids)
    assert not list(short_path.iterdir())


_UNHEARD = """
from multiprocessing import Pipe
from types import SimpleNamespace
from penstock.runtime import worker
mine, its = Pipe()
mine.close()
worker._follow = lambda: None
worker.serve_jobs(SimpleNamespace(rank=0), its)
"""


def test_a_worker_whose_launcher_has_died_fails_without_a_word() -> None:
    """It may find that a peer is gone before it is ended itself."""
    done = subprocess.run([sys.executable, "-c", _UNHEARD], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (1, "")


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="0 workers were asked for"):
        launch(identify, 0, "a")
