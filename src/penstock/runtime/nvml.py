"""Utilisation, clocks, power and temperature of NVIDIA devices through NVML, where its library and a driver are there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

__all__ = ["DeviceSample", "Nvml", "NvmlSampler", "open_nvml"]


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
    """Reads some devices; all of them, or those of the given UUIDs."""

    def __init__(self, library: Any, uuids: Sequence[str] = ()) -> None:
        self._library = library
        if uuids:
            handles = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        else:
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        self._handles = [(handle, _text(library.nvmlDeviceGetUUID(handle))) for handle in handles]

    def sample(self) -> list[DeviceSample]:
        """Every device now."""
        return [self._sample(handle, uuid) for handle, uuid in self._handles]

    def _sample(self, handle: Any, uuid: str) -> DeviceSample:
        library = self._library

        def ask(question: Callable[[], float], scale: float = 1.0) -> float | None:
            try:
                return question() * scale
            except library.NVMLError:  # not every device knows everything: virtual ones have no clocks, some no power
                return None

        used = ask(lambda: library.nvmlDeviceGetMemoryInfo(handle).used)
        return DeviceSample(
            time.time(),
            uuid,
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


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value  # older bindings return bytes


def open_nvml(uuids: Sequence[str] = ()) -> Nvml | None:
    """NVML, or None without `penstock[gpu]`, without a driver or without such a device.

    `uuids` as NVML writes them: `"GPU-" + str(torch.cuda.get_device_properties(device).uuid)`.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return Nvml(pynvml, uuids)
    except pynvml.NVMLError:
        pynvml.nvmlShutdown()
        return None


class NvmlSampler:
    """Hands samples to `write` at an interval, in a thread of its own."""

    def __init__(self, nvml: Nvml, write: Callable[[DeviceSample], None], interval_s: float = 1.0) -> None:
        self._nvml, self._write, self._interval_s = nvml, write, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="nvml")
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            for sample in self._nvml.sample():
                self._write(sample)

    def close(self) -> None:
        """Stops, and lets the library go."""
        self._stop.set()
        self._thread.join()
        self._nvml.close()
