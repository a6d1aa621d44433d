"""Results as lines of JSON, added one by one: what was measured before a stop is not measured again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Lines:
    """The lines of a file by their `key`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, dict[str, Any]] = {}
        if path.exists():
            self.found = {line["key"]: line for line in map(json.loads, path.read_text().splitlines())}

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self.found[key]

    def add(self, key: str, **values: Any) -> None:
        """Writes a line at once."""
        self.found[key] = {"key": key, **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(self.found[key]) + "\n")
