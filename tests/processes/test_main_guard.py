"""A script that trains from its top level is told to ask for its own name, before it starts anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CALL = """
from penstock.errors import InputError
from penstock.processes.main_guard import require_guarded_main

def train():
    try:
        require_guarded_main()
        print("trains")
    except InputError as error:
        print("refused", error)
"""


@pytest.mark.parametrize(
    ("rest", "said"),
    [("train()\n", "refused script"), ("if __name__ == '__main__':\n    train()\n", "trains")],
    ids=["unguarded", "guarded"],
)
def test_a_script_asks_for_its_name(rest: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CALL + rest)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.stdout.startswith(said), done.stderr
