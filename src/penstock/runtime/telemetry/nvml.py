"""Utilisation, clocks, power and temperature of an NVIDIA device through NVML, where its library and a driver are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.runtime.telemetry.steps import LineLog

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceLog", "DeviceSample", "Nvml", "NvmlMissing", "gpu_uuid", "open_nvml"]

_LEAVE_S = 2.0
"""A driver that hangs is not waited for longer when a run ends."""


class NvmlMissing(Exception):
    """There is nothing to read the device with; the message says why."""


class DeviceSample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One device at one moment; what it does not report is left out."""

    unix_s: float
    device: str
    """Its UUID: indices depend on who asks."""
    utilisation: float | None = None
    """Share of the last sampling period in which a kernel ran."""
    memory_used_bytes: int | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None


class Nvml:
    """Reads one device."""

    def __init__(self, library: Any, uuid: str) -> None:
        self._library, self._uuid = library, uuid
        self._handle = library.nvmlDeviceGetHandleByUUID(uuid)

    def sample(self) -> DeviceSample:
        """The device now."""
        library, handle = self._library, self._handle

        def ask(question: Callable[[], float], scale: float = 1.0) -> float | None:
            try:
                return question() * scale
            except library.NVMLError:  # not every device knows everything: virtual ones have no clocks, some no power
                return None

        used = ask(lambda: library.nvmlDeviceGetMemoryInfo(handle).used)
        return DeviceSample(
            time.time(),
            self._uuid,
            utilisation=ask(lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu, 0.01),
            memory_used_bytes=None if used is None else int(used),
            sm_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM), 1e6),
            memory_clock_hz=ask(lambda: library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_MEM), 1e6),
            power_w=ask(lambda: library.nvmlDeviceGetPowerUsage(handle), 1e-3),
            temperature_c=ask(lambda: library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU)),
        )

    def close(self) -> None:
        """Lets the library go."""
        self._library.nvmlShutdown()


def gpu_uuid(device: torch.device) -> str | None:
    """A device's UUID as NVML writes it; None for one that is no GPU."""
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def open_nvml(uuid: str) -> Nvml:
    """NVML for one device, or `NvmlMissing` without `penstock[gpu]`, without a driver or without such a device."""
    try:
        import pynvml
    except ImportError:
        raise NvmlMissing("NVML's Python package is missing; pip install 'penstock[gpu]'") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlMissing(f"NVML finds no driver ({error})") from None
    try:
        return Nvml(pynvml, uuid)
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise NvmlMissing(f"NVML does not know device {uuid} ({error})") from None


class DeviceLog:
    """Samples a device into a file of JSON lines at an interval, in a thread of its own."""

    def __init__(self, uuid: str, path: str | Path, interval_s: float = 1.0) -> None:
        self._nvml, self._interval_s = open_nvml(uuid), interval_s
        self._log = LineLog(path, anew=True)
        self.latest: DeviceSample | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nvml")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.latest = self._nvml.sample()
            self._log.write(self.latest)
            self._stop.wait(self._interval_s)

    def close(self) -> None:
        """Stops, and lets the library go."""
        self._stop.set()
        self._thread.join(_LEAVE_S)
        if not self._thread.is_alive():
            self._nvml.close()
        self._log.close()
