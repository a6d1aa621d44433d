"""The report of a run that goes on, served to this machine alone: the same page, told when there is news.

    GET /TOKEN/           the page
    GET /TOKEN/data       its data, as the folder has it now
    GET /TOKEN/events?V   server-sent events: `changed` when the folder is no longer that of version V, which the page has shown

Whoever does not know the token, or asks for another host than this machine (a page elsewhere whose name was pointed at it), gets nothing.
The run is never touched: only its files are read, and only as often as a small share of a core allows.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock
from typing import Any

import penstock
from penstock.errors import InputError, PenstockError
from penstock.reports.blocks import Subject, Text, View
from penstock.reports.document import VIEWER, document, page_data
from penstock.reports.run_views import RunMemo, read_run_facts, run_subject

__all__ = ["HOST", "LivePage", "serve"]

HOST = "127.0.0.1"
_POLL_S = 0.5
_MOST_STATS = 32
"""Files that are looked at each time: of a thousand ranks that train together, a few say when there is news."""
_LEAST_S, _SHARE = 1.0, 0.05
"""Seconds between two readings of a run, at least; and the share of a core that reading may take on average."""


@dataclass
class LivePage:
    """A run as it is now; read anew only when its files have changed and the last reading is long enough ago."""

    folder: Path
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    _lock: Lock = field(default_factory=Lock)
    _memo: RunMemo = field(default_factory=RunMemo)
    _read: tuple[tuple[Any, ...], Subject] | None = None
    _next_s: float = 0.0
    _listed: tuple[int, list[str]] = (-1, [])
    """When the folder was changed last, and the files of it to look at."""

    def stamp(self) -> tuple[Any, ...]:
        """Changes when the run writes: sizes and times of its files, and of the folder, which tells of new ones."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
            if changed != self._listed[0]:
                self._listed = changed, _watched(os.listdir(self.folder))
            stats = [os.stat(self.folder / name) for name in self._listed[1]]
        except OSError:  # replaced just now; the next look sees what came instead
            return (-1,)
        return changed, *((one.st_size, one.st_mtime_ns) for one in stats)

    def news(self, seen: str) -> str | None:
        """The version of the run, if it is another than somebody has seen and may be read now."""
        with self._lock:  # a reading that goes on may have begun before the news
            version = _version(self.stamp())
            return version if version != seen and time.monotonic() >= self._next_s else None

    def subject(self) -> Subject:
        """The run's views, or what keeps it from being shown."""
        return self._shown()[0]

    def _shown(self) -> tuple[Subject, str]:
        """The same, and of which version of the run it is."""
        with self._lock:
            stamp = self.stamp()
            if self._read is not None and (self._read[0] == stamp or time.monotonic() < self._next_s):
                return self._read[1], _version(self._read[0])
            begun = time.process_time()
            try:
                subject = run_subject(read_run_facts(self.folder, self._memo.files), memo=self._memo)
            except PenstockError as error:
                subject = Subject("run", self.folder.name, (View("glance", "Glance", [Text(str(error), note=True)]),))
            self._next_s = time.monotonic() + max(_LEAST_S, (time.process_time() - begun) / _SHARE)
            self._read = stamp, subject
            return subject, _version(stamp)

    def html(self) -> str:
        """The page."""
        subject, version = self._shown()
        return document(self.folder.name, [subject], [], live=f"/{self.token}", seen=version)

    def data(self) -> str:
        """The data that the page asks for when it was told of news."""
        data, texts = page_data([self.subject()], [])
        told = {**data, "title": self.folder.name, "version": penstock.__version__, "live": f"/{self.token}", "viewer": VIEWER}
        return json.dumps({"data": told, "texts": texts}, allow_nan=False)


def _version(stamp: tuple[Any, ...]) -> str:
    """A stamp as addresses may have it."""
    return hashlib.sha256(repr(stamp).encode()).hexdigest()[:16]


def _watched(names: list[str]) -> list[str]:
    """Lines and plans of a run, and the spans of its first ranks."""
    spans = sorted(name for name in names if name.endswith(".spans"))
    return [*sorted(name for name in names if name.endswith((".json", ".jsonl")))[:_MOST_STATS], *spans[:_MOST_STATS]]


def serve(page: LivePage, port: int, told: Callable[[str], None], stop: Event | None = None) -> None:
    """Serves until interrupted, or until `stop` is set; `told` gets the address."""
    try:
        server = _Server((HOST, port), _Handler)
    except OSError as error:
        raise InputError(
            f"port {port} of {HOST} cannot be served: {error.strerror}. Choose another with --port, or 0 for a free one."
        ) from None
    server.page, server.stop = page, stop or Event()
    told(f"http://{HOST}:{server.server_port}/{page.token}/")
    server.timeout = _POLL_S
    with server:
        try:
            while not server.stop.is_set():
                server.handle_request()
        finally:
            server.stop.set()


class _Server(ThreadingHTTPServer):
    """Serves one page, a thread for each connection."""

    daemon_threads = True
    page: LivePage
    stop: Event


class _Handler(BaseHTTPRequestHandler):
    """One connection: the page, its parts, and news as they come."""

    server: _Server
    server_version = "penstock"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        """Answers those who know the token, and came by this machine's own name."""
        page, port = self.server.page, self.server.server_port
        path, _, query = self.path.partition("?")
        prefix, slash, rest = path.removeprefix("/").partition("/")
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(403, "another host was asked for")
        elif not secrets.compare_digest(prefix.encode(), page.token.encode()) or not slash:
            self.send_error(404)
        elif rest == "":
            self._answer(page.html(), "text/html")
        elif rest == "data":
            self._answer(page.data(), "application/json")
        elif rest == "events":
            self._tell_news(query)
        else:
            self.send_error(404)

    def _begin(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        headers = {"Content-Type": f"{kind}; charset=utf-8", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
                   "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}  # fmt: skip
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def _answer(self, text: str, kind: str) -> None:
        body = text.encode()
        self._begin(kind, len(body))
        self.wfile.write(body)

    def _tell_news(self, seen: str) -> None:
        """One event whenever the folder has grown beyond the version `seen`; a line of comment now and then shows whether anybody still
        listens."""
        self._begin("text/event-stream")
        quiet = 0
        try:
            while not self.server.stop.wait(_POLL_S):
                if (version := self.server.page.news(seen)) is not None:
                    seen, quiet = version, 0
                    self.wfile.write(b"event: changed\ndata: \n\n")
                elif (quiet := quiet + 1) % 20 == 0:
                    self.wfile.write(b": still here\n\n")
                self.wfile.flush()
        except (ConnectionError, TimeoutError):  # the reader has left
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a log of one's own clicks, and addresses hold the token."""
