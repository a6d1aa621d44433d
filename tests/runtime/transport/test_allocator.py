"""What a processor's pass frees stays with its process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_HELD = """
import ctypes
from penstock.runtime.transport.allocator import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
def held_mib():
    before = resident_mib()
    blocks = [libc.malloc(2**20) for _ in range(300)]
    for block in blocks:
        libc.memset(block, 1, 2**20)
    for block in blocks:
        libc.free(block)
    return resident_mib() - before
given_back = held_mib(), held_mib()  # the first time each block is mapped alone, then they come from the heap
keep_freed_memory()
print(*given_back, held_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_that_was_freed_is_there_for_the_next_pass() -> None:
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True, timeout=300)
    *given_back, kept = map(float, done.stdout.split())
    assert kept > 250 > 100 > max(given_back), "MiB of 300 MiB that were freed"
