"""Compiled tests on disk before several processes read them: from a new checkout each would compile all of them, beside the others."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest
from _pytest.assertion import rewrite  # its files alone are read in place of a test's source

__all__ = ["compile_tests"]


def compile_tests(config: pytest.Config, folder: Path) -> None:
    """Leaves what pytest makes of each test file where it looks for it, unless that is there already."""
    if sys.dont_write_bytecode:
        return
    state = config.stash[rewrite.assertstate_key]
    for path in sorted(folder.rglob("test_*.py")):
        compiled = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if not _is_of(compiled, path):
            rewrite.try_makedirs(compiled.parent)
            status, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, status, compiled)


def _is_of(compiled: Path, path: Path) -> bool:
    """Whether it was made of the file as it is, by the time and the size that its head names."""
    try:
        with open(compiled, "rb") as stream:
            head = stream.read(16)
    except OSError:
        return False
    status = path.stat()
    return head[8:] == struct.pack("<LL", int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)
