"""Programs as files, and what `penstock check` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from programs.cases import random_case

from penstock.cli.main import run
from penstock.errors import InputError
from penstock.programs import instructions as i
from penstock.programs.files import holds_programs, read_program, read_programs, write_programs

CASE = random_case(3, family="gpt", groups=2, replicas=1, schedule="1f1b")


@pytest.mark.parametrize("text", [True, False])
def test_a_folder_of_programs_is_read_back(tmp_path: Path, text: bool) -> None:
    (tmp_path / "notes.md").write_text("not a program", encoding="utf-8")
    paths = write_programs(tmp_path, CASE.programs, text)
    assert sorted(read_programs(tmp_path), key=lambda p: p.rank) == list(CASE.programs)
    assert read_program(paths[0]) == CASE.programs[0]
    assert holds_programs(tmp_path) and holds_programs(paths[0]) and not holds_programs(tmp_path / "notes.md")


def test_half_an_iteration_is_not_written(tmp_path: Path) -> None:
    """A folder of some of its programs would be taken for an unsafe iteration."""
    (tmp_path / f"rank-{CASE.programs[-1].rank}.program").mkdir()
    with pytest.raises(InputError, match="it is a directory"):
        write_programs(tmp_path, CASE.programs)
    assert len(CASE.programs) > 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("text", [True, False])
def test_safe_programs(tmp_path: Path, text: bool, capsys: pytest.CaptureFixture[str]) -> None:
    write_programs(tmp_path, CASE.programs, text)
    assert run(["check", str(tmp_path)]) == 0
    assert "programs are safe" in capsys.readouterr().out
    assert run(["check", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["valid"] and told["num_programs"] == len(CASE.programs) and told["problems"] == []


def test_unsafe_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [step for step in CASE.programs[0].instructions if not isinstance(step, i.SendWait)]
    broken = msgspec.structs.replace(CASE.programs[0], instructions=tuple(steps))
    write_programs(tmp_path, [broken, *CASE.programs[1:]])
    assert run(["check", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert "is not safe" in told.err and "is under way" in told.err and "[0F" in told.out.replace("[0B", "[0F")
    assert run(["check", str(tmp_path), "--json"]) == 2
    assert not json.loads(capsys.readouterr().out)["valid"]


def test_one_rank_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = write_programs(tmp_path, CASE.programs)
    assert run(["check", str(paths[0])]) == 0
    assert "one rank of several" in " ".join(capsys.readouterr().out.split())
    frees = [step for step in CASE.programs[0].instructions if not isinstance(step, i.Free)]
    (path,) = write_programs(tmp_path / "broken", [msgspec.structs.replace(CASE.programs[0], instructions=tuple(frees))])
    assert run(["check", str(path)]) == 2
    assert "is not safe" in capsys.readouterr().err


def test_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write_programs(tmp_path, CASE.programs[:1])
    path.write_bytes(path.read_bytes()[:-3])
    assert run(["check", str(path)]) == 2
    assert "is damaged" in " ".join(capsys.readouterr().err.split())
    assert run(["check", str(path), "--json"]) == 2
    with pytest.raises(InputError, match="does not exist"):
        read_program(tmp_path / "none")
