"""Values in this process, for planners and readers that are threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

__all__ = ["MemoryValues"]


class MemoryValues:
    """A dictionary that can be waited on; one object is shared by all threads."""

    where = "the memory of this process"
    may_forget = False

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def put(self, values: Mapping[str, bytes]) -> None:
        with self._changed:
            self._values.update(values)
            self._changed.notify_all()

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if key not in self._values]

    def wait(self, key: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, timeout_s)
            return self._values.get(key)

    def delete(self, keys: Sequence[str]) -> None:
        with self._changed:
            for key in keys:
                self._values.pop(key, None)

    def names(self, prefix: str) -> list[str]:
        with self._changed:
            return [key for key in self._values if key.startswith(prefix)]

    def connect(self) -> None:
        """Memory is always there."""

    def close(self) -> None:
        """Other threads may still use the values."""
