"""Numbers as people read them, where rounding leads to the next unit."""

from __future__ import annotations

import pytest

from penstock.reports.units import format_bytes, format_count, format_part, format_share, format_time, format_usd


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (format_bytes(1023), "1023 B"), (format_bytes(1023.9 * 1024), "1023.9 KiB"), (format_bytes(1023.97 * 1024), "1.0 MiB"),
        (format_bytes(-1.5 * 2**30), "-1.5 GiB"), (format_bytes(5000 * 2**50), "5000.0 PiB"),
        (format_share(0.0994), "9.9 %"), (format_share(0.0997), "10 %"), (format_share(0.474), "47 %"),
        (format_usd(999.99), "$999.99"), (format_usd(999.997), "$1,000"), (format_usd(-0.00123), "-$0.00123"),
        (format_part(63 * 2**30, 79.6 * 2**30), "63.0 of 79.6 GiB"), (format_part(512 * 2**20, 2**30), "512.0 MiB of 1.0 GiB"),
        (format_time(0.9996), "1.00 s"), (format_time(119.4), "119 s"), (format_time(125), "2 min 05 s"),
        (format_time(3 * 3600 + 300), "3 h 05 min"),
        (format_count(9999.4), "9,999"), (format_count(999_600), "1.00 M"),
    ],
)  # fmt: skip
def test_by_hand(told: str, expected: str) -> None:
    assert told == expected
