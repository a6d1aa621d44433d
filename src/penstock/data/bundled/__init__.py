"""A small multi-task text set that comes with Penstock, so that everything runs offline; `tests/bundled_texts.py` wrote it."""

from __future__ import annotations

from pathlib import Path

__all__ = ["bundled_files"]


def bundled_files() -> list[Path]:
    """The JSONL files, one for each task."""
    return sorted(Path(__file__).parent.glob("*.jsonl"))
