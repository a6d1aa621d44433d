"""The files of an iteration: written only where the setting says so, and complete."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from programs.cases import random_case

from penstock.programs.dump import VARIABLE, dump_iteration
from penstock.programs.files import read_programs

CASE = random_case(11, family="t5", groups=2, replicas=2, schedule="1f1b")


def test_nothing_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert dump_iteration(CASE.programs) is None


def test_everything_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    folder = dump_iteration(CASE.programs, {(0, 0): (10.4, 20.0), (1, 0): (11.0, 20.0)}, {"traceEvents": []})
    assert folder == tmp_path / "iteration-000011"
    rows = list(csv.DictReader((folder / "lengths.csv").open(encoding="utf-8")))
    micro_batches = [(replica, micro) for replica, work in enumerate(CASE.work) for micro in work.micro_batches]
    assert sorted(int(row["sample"]) for row in rows) == sorted(s for _, micro in micro_batches for s in micro.samples)
    assert sum(int(row["counted"]) for row in rows) == CASE.programs[0].loss_tokens
    shapes = list(csv.DictReader((folder / "shapes.csv").open(encoding="utf-8")))
    assert [(int(row["replica"]), int(row["micro_batch"])) for row in shapes] == [
        (replica, micro.index) for replica, micro in micro_batches
    ]
    assert [int(row["positions"]) for row in shapes] == [len(micro.samples) * micro.row_length for _, micro in micro_batches]
    assert [int(row["tokens"]) for row in shapes] == [sum(micro.lengths) for _, micro in micro_batches]
    assert [int(row["dec_tokens"]) for row in shapes] == [sum(micro.dec_lengths) for _, micro in micro_batches]
    assert shapes[0]["recompute"] == "/".join(map(str, CASE.work[0].patterns[0]))
    assert (folder / "memory.csv").read_text(encoding="utf-8").splitlines()[1:] == ["0,0,10,20", "1,0,11,20"]
    assert json.loads((folder / "trace.json").read_text(encoding="utf-8")) == {"traceEvents": []}
    assert (folder / "schedule.txt").read_text(encoding="utf-8").startswith("rank 0: 0F0 ")
    assert sorted(read_programs(folder), key=lambda program: program.rank) == list(CASE.programs)


def test_patterns_are_in_the_order_of_stages(tmp_path: Path) -> None:
    case = random_case(11, family="t5", groups=2, replicas=2, schedule="1f1b")
    last_first = sorted(case.programs, key=lambda program: -program.rank)
    for programs, name in ((case.programs, "a"), (last_first, "b")):
        assert dump_iteration(programs, folder=tmp_path / name) is not None
    one, other = (next((tmp_path / name).rglob("shapes.csv")).read_text(encoding="utf-8") for name in "ab")
    assert one == other and any(len(set(pattern)) > 1 for work in case.work for pattern in work.patterns)


def test_what_is_not_given_is_not_written(tmp_path: Path) -> None:
    folder = dump_iteration(CASE.programs, folder=tmp_path)
    assert folder is not None and not (folder / "memory.csv").exists() and not (folder / "trace.json").exists()
