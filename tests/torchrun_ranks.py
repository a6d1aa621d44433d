"""Processes as torchrun starts them, told who they are by their environment, but forked from the warm server: none imports anything."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from free_ports import free_port
from shared_server import stay_with_server

from penstock.processes.fork_server import FORKED, warm_up

__all__ = ["Ended", "run_ranks"]

_LIMIT_S = 250.0


@dataclass(frozen=True)
class Ended:
    """What a process left."""

    status: int | None
    out: str
    err: str


def run_ranks(arguments: Sequence[str], ranks: Sequence[Mapping[str, str]], folder: Path) -> list[Ended]:
    """`penstock` with these arguments, or the script that the first names with the others, in a process for each of `ranks`, given as
    variables beside those that all of a job have."""
    job = {"WORLD_SIZE": str(len(ranks)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    texts = [(folder / f"rank-{number}.out", folder / f"rank-{number}.err") for number in range(len(ranks))]
    warm_up()
    processes = [
        FORKED.Process(target=_run, args=({**os.environ, **job, "RANK": str(number), **own}, list(arguments), *texts[number]))
        for number, own in enumerate(ranks)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(_LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [Ended(process.exitcode, *(path.read_text() for path in own)) for process, own in zip(processes, texts, strict=True)]


def _run(environment: Mapping[str, str], arguments: list[str], out: Path, err: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    stay_with_server()
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
    status = 1
    try:
        status = _run_script(arguments) if arguments[0].endswith(".py") else _run_verb(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_verb(arguments: list[str]) -> int:
    from penstock.cli import main

    return main.run(arguments)


def _run_script(arguments: list[str]) -> int:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    return 0
