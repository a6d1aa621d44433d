"""The system's Chromium, with the network cut: pages are opened from disk, and every message, error and request is noted."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = ["NO_CHROMIUM", "Opened", "axe_script", "browser_path", "browsing", "opened"]

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_READY_MS = 60_000
NO_CHROMIUM = "there is no Chromium on this machine's path"


@dataclass
class Opened:
    """A page, and what it said and asked for."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def silent(self) -> bool:
        """Whether it said nothing, failed nowhere, and asked nobody for anything."""
        assert (self.messages, self.requests) == ([], [])
        return True


def browser_path() -> str | None:
    """The Chromium on this machine's path."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


def axe_script() -> str | None:
    """axe-core, where AXE_CORE names its file or the package `axe_core_python` is installed."""
    if named := os.environ.get("AXE_CORE"):
        return Path(named).read_text(encoding="utf-8")
    found = importlib.util.find_spec("axe_core_python")
    return None if found is None or found.origin is None else Path(found.origin).with_name("axe.min.js").read_text(encoding="utf-8")


@contextmanager
def opened(path: Path, **context: Any) -> Iterator[Opened]:
    """A page from disk with the network cut, once it has drawn itself."""
    with browsing(path.absolute().as_uri(), offline=True, **context) as found:
        yield found


@contextmanager
def browsing(address: str, **context: Any) -> Iterator[Opened]:
    """A page from anywhere, once it has drawn itself."""
    path = browser_path()
    if path is None:
        pytest.skip(NO_CHROMIUM)
    sync_api = pytest.importorskip("playwright.sync_api", reason="the Python package 'playwright' is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}).new_page()
            found = Opened(page)
            page.on("console", lambda message: found.messages.append(message.text))
            page.on("pageerror", lambda error: found.messages.append(str(error)))
            own = ("file:", "blob:")
            page.on("request", lambda request: None if request.url.startswith(own) else found.requests.append(request.url))
            page.goto(address)
            page.wait_for_selector("body[data-ready]", state="attached", timeout=_READY_MS)
            yield found
        finally:
            browser.close()
