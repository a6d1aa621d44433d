"""The Dockerfile names files and make targets that there are; an image is built by those who have Docker."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()


def test_what_is_copied_is_there() -> None:
    copied = [name for line in LINES if line.startswith("COPY") for name in line.split()[1:-1]]
    assert copied[-1] == "." and len(copied) > 3
    assert [name for name in copied if not (ROOT / name).exists()] == []
    left_out = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv"} <= set(left_out) and not set(copied) & set(left_out)


def test_what_is_installed_first_has_its_version() -> None:
    """Packages are installed before the rest of the code is copied, and the version is read from a file of it."""
    source = re.search(r'\[tool\.hatch\.version\]\npath = "([^"]+)"', (ROOT / "pyproject.toml").read_text())
    first = next(number for number, line in enumerate(LINES) if line.startswith("RUN") and "make" in line and "apt-get" not in line)
    assert source is not None and any(line.startswith("COPY") and source[1] in line.split() for line in LINES[:first])


TARGETS = [word for line in LINES if line.startswith("RUN") for word in re.findall(r"\bmake (?!redis|-)(\S+)", line)]


@pytest.mark.parametrize("target", TARGETS)
def test_its_targets_are_the_makefiles(target: str, tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("there is no make on this machine's path")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "src").mkdir()
    found = subprocess.run(["make", "--dry-run", target], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and "pip install" in found.stdout, found.stderr


def test_the_base_is_a_choice_and_its_python_new_enough() -> None:
    assert next(line for line in LINES if line.startswith("ARG")).startswith("ARG BASE=python:3.") and "FROM ${BASE}" in LINES
    wanted = re.search(r"requires-python = \">=3\.(\d+)", (ROOT / "pyproject.toml").read_text())
    given = re.search(r"ARG BASE=python:3\.(\d+)", "\n".join(LINES))
    assert wanted is not None and given is not None and int(given[1]) >= int(wanted[1])
