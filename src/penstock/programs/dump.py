"""What was planned for an iteration, as files to read: one folder each, written where `PENSTOCK_DUMP` says, if it says anything.

iteration-000007/
    lengths.csv      every sample: its lengths, its replica and micro-batch, the positions that count in the loss
    shapes.csv       every micro-batch: layout, rows, token positions with and without padding, recomputation
    memory.csv       predicted peak of each stage in each replica, and the limit
    schedule.txt     the passes of each rank in order
    trace.json       the simulated timeline, for a trace viewer
    rank-0.txt …     the programs
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.files import write_json, write_text
from penstock.models.micro_batch import MicroBatch
from penstock.programs.files import write_programs
from penstock.programs.instructions import Forward, Program
from penstock.programs.problems import passes

__all__ = ["VARIABLE", "dump_iteration"]

VARIABLE = "PENSTOCK_DUMP"
"""The setting: a folder. Empty or missing: nothing is written."""


def dump_iteration(
    programs: Sequence[Program], memory_bytes: Mapping[tuple[int, int], tuple[float, float]] | None = None, trace: Any = None,
    folder: str | Path | None = None,
) -> Path | None:  # fmt: skip
    """Writes the files of one iteration and returns their folder; None where the setting is off.

    `memory_bytes` has (peak, limit) for each (replica, stage), `trace` is a JSON value; each is left out where it is not given.
    `folder` is used in place of the setting.
    """
    root = folder or os.environ.get(VARIABLE)
    if not root or not programs:
        return None
    target = Path(root) / f"iteration-{programs[0].iteration:06d}"
    tables = {program.replica: program.micro_batches for program in programs}
    write_text(target / "lengths.csv", _csv(_LENGTHS, _length_rows(tables)))
    write_text(target / "shapes.csv", _csv(_SHAPES, _shape_rows(tables, _patterns(programs))))
    if memory_bytes is not None:
        rows = ((replica, stage, round(peak), round(limit)) for (replica, stage), (peak, limit) in sorted(memory_bytes.items()))
        write_text(target / "memory.csv", _csv(("replica", "stage", "peak_bytes", "limit_bytes"), rows))
    if trace is not None:
        write_json(target / "trace.json", trace)
    lines = (f"rank {program.rank}: {' '.join(text for _, text in passes(program))}" for program in programs)
    write_text(target / "schedule.txt", "\n".join(lines) + "\n")
    write_programs(target, programs, text=True)
    return target


_LENGTHS = ("sample", "length", "dec_length", "counted", "replica", "micro_batch")
_SHAPES = ("replica", "micro_batch", "layout", "samples", "tokens", "positions", "dec_tokens", "dec_positions", "row_length", "recompute")


def _csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join([",".join(head), *(",".join(map(str, row)) for row in rows)]) + "\n"


def _length_rows(tables: Mapping[int, Sequence[MicroBatch]]) -> Iterable[tuple[object, ...]]:
    for replica, micro_batches in sorted(tables.items()):
        for micro in micro_batches:
            for place, sample in enumerate(micro.samples):
                length = micro.lengths[place] if micro.lengths else 0
                dec_length = micro.dec_lengths[place] if micro.dec_lengths else 0
                yield sample, length, dec_length, micro.loss_tokens(place, place + 1), replica, micro.index


def _patterns(programs: Sequence[Program]) -> dict[tuple[int, int], dict[int, int]]:
    """For each replica and micro-batch the recomputation pattern on each stage."""
    found: dict[tuple[int, int], dict[int, int]] = {}
    for program in programs:
        for step in program.instructions:
            if isinstance(step, Forward):
                found.setdefault((program.replica, step.micro_batch), {})[step.stage] = step.pattern
    return found


def _shape_rows(
    tables: Mapping[int, Sequence[MicroBatch]], patterns: Mapping[tuple[int, int], Mapping[int, int]]
) -> Iterable[tuple[object, ...]]:
    for replica, micro_batches in sorted(tables.items()):
        for micro in micro_batches:
            shape, chosen = micro.shape(), patterns.get((replica, micro.index), {})
            recompute = "/".join(str(pattern) for _, pattern in sorted(chosen.items()))
            yield (
                replica, micro.index, micro.layout, len(micro.samples), sum(micro.lengths), shape.tokens, sum(micro.dec_lengths),
                shape.dec_tokens, micro.row_length, recompute,
            )  # fmt: skip
