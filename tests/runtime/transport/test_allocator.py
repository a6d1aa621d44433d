"""Allocator settings: by a call that torch supports, and never over what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("given", "wanted"), [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "")])
def test_allocator_settings_come_without_warnings_and_leave_those_given(given: dict[str, str], wanted: str) -> None:
    script = (
        "import torch\n"
        "from penstock.runtime.transport.allocator import use_expandable_segments\n"
        "before = torch._C._accelerator_getAllocatorSettings()\n"
        "use_expandable_segments()\n"
        "print(torch._C._accelerator_getAllocatorSettings().removeprefix(before))\n"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **given}
    done = subprocess.run([sys.executable, "-W", "error::FutureWarning", "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == wanted
