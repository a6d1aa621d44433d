"""What `python -m penstock.kernels` compiles is what commands call: nobody waits for a compiler while a plan is searched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from small_tables import aceso_tables, fasop_tables

# In a process of its own: other tests call kernels with arrays as they please.
USED = """
import json, sys
from importlib import import_module
from numba.core.dispatcher import Dispatcher
from penstock.cli.main import run
from penstock.kernels import KERNEL_MODULES

modules = [import_module(name) for name in KERNEL_MODULES]
kernels = [kernel for module in modules for kernel in vars(module).values() if isinstance(kernel, Dispatcher)]
for module in modules:
    module.warm()
compiled = [set(kernel.signatures) for kernel in kernels]
for command in json.loads(sys.argv[1]):
    assert run(command) == 0, command
    for kernel, known in zip(kernels, compiled):
        assert set(kernel.signatures) <= known, f"{command} compiles {kernel.__qualname__} for {set(kernel.signatures) - known}"
"""


def test_commands_compile_nothing(tmp_path: Path) -> None:
    lengths, pairs, plan = tmp_path / "lengths.csv", tmp_path / "pairs.csv", str(tmp_path / "plan.json")
    lengths.write_text("length\n" + "\n".join(str(16 + 37 * n % 900) for n in range(16)))
    pairs.write_text("enc_len,dec_len\n" + "\n".join(f"{16 + 37 * n % 400},{4 + 11 * n % 100}" for n in range(16)))
    aceso, fasop = aceso_tables(tmp_path / "aceso", ["gpt_350M"], (1, 2), (1, 2)), fasop_tables(tmp_path / "fasop")
    commands = [
        "search --model bert-large --cluster 2xa100-40gb+2xv100-16gb --global-batch 32 --micro-batches 2",
        "search --model vgg16 --cluster 4xt4 --global-batch 16",
        "search --model gpt-13b --cluster 8xa100-80gb --global-batch 16 --schedules interleaved --micro-batches 1",
        f"search --model gpt-350m --cluster 2xa100-40gb --global-batch 16 --lengths {lengths} --out {plan}",
        f"batch --lengths {lengths} --plan {plan}",
        f"simulate {plan} --lengths {lengths}",
        f"search --model t5-small --cluster 1xa100-40gb --global-batch 8 --lengths {pairs} --out {plan}",
        f"batch --lengths {pairs} --plan {plan}",
        f"search --costs aceso:{aceso} --model gpt_350M --cluster 1x4 --global-batch 16 --micro-batches 1,2 --memory-limit 28",
        f"search --costs fasop:{fasop} --model gpt2XL-het",
    ]
    used = [sys.executable, "-c", USED, json.dumps([command.split() for command in commands])]
    done = subprocess.run(used, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
