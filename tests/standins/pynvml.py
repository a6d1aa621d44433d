"""What NVML's Python package offers, for a machine with two devices, of which the second reports neither clocks nor power."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
UUIDS = ("GPU-a", "GPU-b")


class NVMLError(Exception):
    """NVML's error."""


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    if uuid not in UUIDS:
        raise NVMLError("Not Found")
    return UUIDS.index(uuid)


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return SimpleNamespace(used=10**9)


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=75)


def _only_first(value: float) -> Callable[..., float]:
    def ask(handle: int, *_: Any) -> float:
        if handle:
            raise NVMLError("Not Supported")
        return value

    return ask


nvmlDeviceGetPowerUsage, nvmlDeviceGetTemperature = map(_only_first, (412_500, 61))


def nvmlDeviceGetClockInfo(handle: int, kind: int) -> float:
    return _only_first({NVML_CLOCK_SM: 1980, NVML_CLOCK_MEM: 3201}[kind])(handle)
