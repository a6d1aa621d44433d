"""Texts and samples that the tests of jobs share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "rivers", "run", "under", "old", "stone", "bridges")


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
