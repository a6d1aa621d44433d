"""Moments of the processor, and of a GPU's stream."""

from __future__ import annotations

import pytest
import torch

from penstock.runtime.telemetry.moments import moment, seconds


def test_moments_of_the_processor() -> None:
    device = torch.device("cpu")
    start, end = moment(device), moment(device)
    assert seconds(start, end) >= 0 and seconds(start, start + 0.5) == pytest.approx(0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_moments_of_a_stream_are_when_the_work_is_done() -> None:
    device = torch.device("cuda")
    square = torch.ones(4096, 4096, device=device)
    square @ square  # kernels are loaded
    first, short = moment(device), moment(device)
    for _ in range(50):
        square @ square
    long = moment(device)  # long before the device is there
    long.synchronize()
    assert 0 <= seconds(first, short) < seconds(short, long)
