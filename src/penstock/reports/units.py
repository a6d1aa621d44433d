"""Numbers as people read them: times, sizes, counts and money with the unit that suits them."""

from __future__ import annotations

import math

__all__ = ["format_bytes", "format_count", "format_part", "format_share", "format_time", "format_usd", "shown"]


def shown(value: object, unit: str) -> str:
    """A value of a table as text; `units.js` says the same in a browser. What is no number is told, never drawn as zero."""
    if value is None or value == "":
        return "-"
    if not isinstance(value, int | float) or isinstance(value, bool) or unit == "text":
        return str(value)
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite" if value > 0 else "-infinite"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "number":
        return f"{value:,.4g}" if abs(value) < 1000 and value != round(value) else f"{value:,.0f}"
    formats = {"time": format_time, "bytes": format_bytes, "count": format_count, "usd": format_usd}
    return formats[unit](value)


def format_time(time_s: float) -> str:
    """A duration with the unit that suits it: `850 ns`, `12.3 ms`, `1.50 s`, `2 min 05 s`, `3 h 20 min`, `2 d 04 h`."""
    if not math.isfinite(time_s) or time_s == 0:
        return f"{time_s:g} s"
    if time_s < 0:
        return "-" + format_time(-time_s)
    for unit, scale in (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0)):
        if float(f"{time_s / scale:.3g}") < (120 if unit == "s" else 1000):
            return f"{_three_digits(time_s / scale)} {unit}"
    if (seconds := round(time_s)) < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if (minutes := round(time_s / 60)) < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(time_s / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units: `512 B`, `1.5 KiB`, `4.2 GiB`."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size_bytes /= 1024
        if abs(size_bytes) < 1023.95 or unit == "PiB":
            break
    return f"{size_bytes:.1f} {unit}"


def format_count(number: float) -> str:
    """A count: in full below ten thousand, then `12.3 k`, `1.40 M`, `7.00 B`, `1.20 T`."""
    if abs(number) < 10_000 or not math.isfinite(number):
        return f"{number:,.0f}"
    for unit, scale in (("k", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)):
        if float(f"{abs(number) / scale:.3g}") < 1000 or unit == "T":
            break
    return f"{_three_digits(number / scale)} {unit}"


def format_part(part_bytes: float, whole_bytes: float) -> str:
    """A size of a larger one, with the unit once if both have the same: `63.0 of 79.6 GiB`."""
    part, whole = format_bytes(part_bytes), format_bytes(whole_bytes)
    number, _, unit = part.partition(" ")
    return f"{number if whole.endswith(f' {unit}') else part} of {whole}"


def format_share(share: float) -> str:
    """A share in per cent, as sentences have it: `0.4 %`, `2.1 %`, `47 %`."""
    return f"{share * 100:.{1 if abs(share) < 0.0995 else 0}f} %"


def format_usd(amount_usd: float) -> str:
    """Money: `$0.00123`, `$12.34`, `$1,234`."""
    if amount_usd < 0:
        return "-" + format_usd(-amount_usd)
    if 0 < amount_usd < 0.1:
        return f"${_three_digits(amount_usd)}"
    return f"${amount_usd:,.2f}" if amount_usd < 999.995 else f"${amount_usd:,.0f}"


def _three_digits(value: float) -> str:
    """Three significant digits without an exponent: `1.23`, `12.3`, `123`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"
