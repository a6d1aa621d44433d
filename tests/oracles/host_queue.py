"""The plain twin of `timing.pass_times.waited_s`: a host that issues work and a device that does it, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


def waiting_s(device_s: Sequence[float], host_s: Sequence[float]) -> float:
    """How long the device is idle before its pieces, in all."""
    now_host = now_device = idle = 0.0
    for work, issue in zip(device_s, host_s, strict=True):
        now_host += issue
        start = max(now_device, now_host)
        idle += start - now_device
        now_device = start + work
    return idle
