"""Kills processes that write checkpoints, at random moments, and looks at what they leave: run as a script, in a process of its own.

A fresh process per kill would spend its time importing; this one imports once, stays without threads, and forks the writers.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from penstock.runtime.checkpoints.layout import TensorPiece
from penstock.runtime.checkpoints.reader import Checkpoint
from penstock.runtime.checkpoints.writer import CheckpointWriter

SHAPE = (6, 8)


def pieces(step: int, rank: int, world_size: int) -> list[TensorPiece]:
    """Rows of a few tensors, every element telling the step."""
    rows = SHAPE[0] // world_size
    box = ((rank * rows, (rank + 1) * rows), (0, SHAPE[1]))
    return [TensorPiece(f"weights/op{i}.weight", SHAPE, box, torch.full((rows, SHAPE[1]), float(step + i))) for i in range(4)]


def write_for_ever(folder: Path, rank: int, world_size: int, token: str, first: int, told: int) -> None:
    """Saves step after step; each one that is whole for sure is told through the pipe."""
    writer = CheckpointWriter(folder, rank=rank, world_size=world_size, token=token, keep=2)
    for step in range(first, first + 10**6):
        writer.save(step, pieces(step, rank, world_size), {"step": step})
        writer.wait()
        if rank == 0:
            os.write(told, step.to_bytes(8, "little"))


def fork(*args: object) -> int:
    child = os.fork()
    if child == 0:
        try:
            write_for_ever(*args)  # type: ignore[arg-type]
        finally:
            os._exit(1)
    return child


def check(folder: Path, promised: int) -> int:
    """The step of the checkpoint that a restart would take: whole, of one step, and not older than what was promised."""
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    step = checkpoint.step
    assert step >= promised and checkpoint.state == {"step": step}, (step, promised)
    for i in range(4):
        assert torch.equal(checkpoint.read(f"weights/op{i}.weight"), torch.full(SHAPE, float(step + i))), (step, i)
    return step


def main(folder: Path, num_kills: int, world_size: int, seed: int) -> None:
    draw = random.Random(seed)
    first, promised, found, usual_s = 1, 0, 0, 0.0
    for attempt in range(num_kills):
        reader, writer = os.pipe()
        ranks = [fork(folder, rank, world_size, f"start{attempt}", first, writer) for rank in range(world_size)]
        os.close(writer)
        if not found:  # the first one must be there before anything can be lost
            os.read(reader, 8)
            begin = time.monotonic()
            promised = found = int.from_bytes(os.read(reader, 8), "little")
            usual_s = time.monotonic() - begin
        time.sleep(draw.random() * 2 * usual_s)
        draw.shuffle(ranks)
        for child in ranks:
            os.kill(child, signal.SIGKILL)
        for child in ranks:
            os.waitpid(child, 0)
        while told := os.read(reader, 8):
            promised = int.from_bytes(told, "little")
        os.close(reader)
        found = check(folder, promised)
        first = found + 1
    for token in ("undisturbed", "again"):
        writer = CheckpointWriter(folder, token=token, keep=2)
        writer.save(first, pieces(first, 0, 1), {"step": first})
        writer.wait()
    left = sorted(path.name[:5] for path in folder.iterdir())
    assert left == ["lates", "save-", "save-"], left
    print(f"{num_kills} kills of {world_size} writers, last whole step {found}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
