"""Texts and models that the tests of jobs share; what jobs keep goes into a folder of the tests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rivers", "run", "under", "old", "stone", "bridges")


@pytest.fixture(scope="session", autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache of all tests: nothing is prepared, measured or searched twice."""
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("kept")
    patch.setenv("PENSTOCK_CACHE", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL of short and long texts."""
    path, drawn = tmp_path_factory.mktemp("raw") / "chats.jsonl", random.Random(0)
    lines = [{"text": " ".join(drawn.choice(WORDS) for _ in range(drawn.choice((5, 8, 12, 20, 60))))} for _ in range(120)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def rows() -> list[dict[str, Any]]:
    """Samples as a tokenizer of transformers leaves them."""
    drawn = random.Random(1)
    return [{"input_ids": [drawn.randrange(300) for _ in range(drawn.choice((6, 9, 20, 60)))]} for _ in range(96)]
