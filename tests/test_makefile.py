"""`make setup` says in a few lines what it does, and everything that a step said if that step fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STAND_IN = """#!/bin/sh
if [ "$2" = venv ]; then mkdir -p .venv/bin && cp "$0" .venv/bin/python; exit; fi
for line in $(seq 200); do echo "$line: $*"; done
case "$*" in *"${FAILS_AT:-nowhere}"*) echo 'ERROR: no such version' >&2; exit 3;; esac
"""
"""A Python that makes an environment with itself in it, and says much when anything is run in that."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine's path")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "python").write_text(STAND_IN)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def make(folder: Path, fails_at: str = "") -> subprocess.CompletedProcess[str]:
    command = ["make", "setup", f"PYTHON={folder / 'python'}"]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "FAILS_AT": fails_at}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)


def test_a_few_lines_and_all_the_rest_in_a_file(folder: Path) -> None:
    done = make(folder)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) < 8
    log = (folder / ".venv" / "setup.log").read_text()
    assert log.count("200: -m pip install") == 2 and "200: -m penstock.kernels" in log and ".venv/setup.log" in done.stdout


@pytest.mark.parametrize(("step", "what"), [("torch", "1/3"), ("editable", "2/3"), ("kernels", "3/3")])
def test_nothing_is_hidden_where_a_step_fails(folder: Path, step: str, what: str) -> None:
    done = make(folder, step)
    assert done.returncode == 2 and f"make setup failed: {what}" in done.stderr and ".venv/setup.log" in done.stderr
    assert "ERROR: no such version" in done.stderr and "\n1: " in f"\n{done.stderr}" and "\n200: " in done.stderr
    assert not (folder / ".venv" / ".compiled").exists()
    assert make(folder).returncode == 0  # goes on
