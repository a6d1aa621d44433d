"""What the device of this machine is called, by the catalogue and by its driver."""

from __future__ import annotations

import platform
from typing import Any

import torch

from penstock.clusters import DEVICES

__all__ = ["device_facts"]


def device_facts(device: torch.device) -> tuple[str, dict[str, Any]]:
    """(catalogue name, facts for the profile's head)."""
    if device.type != "cuda":
        return "cpu", {"device": platform.processor() or platform.machine(), "num_threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "device": properties.name, "memory_bytes": properties.total_memory, "num_multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda, "driver": _driver(),
    }  # fmt: skip
    return _catalogue_name(properties.name, properties.total_memory), facts


def _driver() -> str:
    import subprocess

    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=True
        )
        return result.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _catalogue_name(name: str, memory_bytes: int) -> str:
    """The catalogue's device of this name with the nearest memory, or the driver's name made plain."""
    words = name.lower().replace("nvidia", "").replace("geforce", "").replace("tesla", "").split()
    plain = "".join(words).replace("-", "")
    fitting = [d for key, d in DEVICES.items() if plain.startswith(key.split("-")[0]) or key.split("-")[0] in plain]
    if not fitting:
        return plain or "cuda"
    return min(fitting, key=lambda d: (abs(d.memory_bytes - memory_bytes), -len(d.name))).name
