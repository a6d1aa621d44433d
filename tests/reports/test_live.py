"""The page of a run that goes on: who is served and who is not, news when the folder grows, and a browser that draws them."""

from __future__ import annotations

import http.client
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from chromium import browsing

from penstock.plans.build import uniform_plan
from penstock.plans.plan import MicroBatching
from penstock.plans.schema import write_plan
from penstock.reports import live
from penstock.reports.live import LivePage, serve
from penstock.runtime.telemetry.spans import COMPUTE, FORMAT, ITERATION, KINDS, RECORD, VERSION


def span_file() -> bytes:
    """One step of rank 0 with one forward pass of two microseconds."""
    records = np.array([(ITERATION, 0, 0, 0, 5000, 5000), (KINDS["Forward"], COMPUTE, 0, 0, 5000, 7000)], RECORD)
    header = {"format": FORMAT, "version": VERSION, "rank": 0, "pid": 1, "kinds": KINDS, "clock": ""}
    return json.dumps(header).encode() + b"\n" + records.tobytes()


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    plan = uniform_plan("gpt-tiny", "4xcpu", global_batch=8, micro_batch=4, layout="packed", pp=2)
    write_plan(folder / "plan.json", replace(plan, micro_batching=MicroBatching("packed", "dynamic")))
    return folder


def add_step(folder: Path, step: int) -> None:
    with (folder / "steps.jsonl").open("a", encoding="utf-8") as log:
        log.write(json.dumps({"step": step, "loss": 5.0 - step, "time_s": 0.5, "tokens": 100, "tokens_per_s": 200.0}) + "\n")


@pytest.fixture
def served(a_run: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LivePage, str]]:
    """A page that is read anew at every change, and its address."""
    monkeypatch.setattr(live, "_LEAST_S", 0.0)
    monkeypatch.setattr(live, "_SHARE", 1e9)
    page, stop, begun, address = LivePage(a_run), Event(), Event(), []

    def told(text: str) -> None:
        address.append(text)
        begun.set()

    thread = Thread(target=serve, args=(page, 0, told, stop), daemon=True)
    thread.start()
    assert begun.wait(60)
    yield page, address[0]
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


def asked(address: str, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str]:
    where = address.split("/")[2]
    connection = http.client.HTTPConnection(where, timeout=60)
    connection.request(method, path, headers={"Host": host or where})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_strangers_get_nothing(served: tuple[LivePage, str]) -> None:
    page, address = served
    assert address.startswith("http://127.0.0.1:") and address.endswith(f"/{page.token}/") and len(page.token) > 20
    for path in ("/", "/data", f"/{page.token}", f"/{page.token}x/", f"/{page.token}/other", f"/x/../{page.token}/"):
        assert asked(address, path)[0] == 404, path
    assert asked(address, f"/{page.token}/", host="evil.example:80")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert asked(address, f"/{page.token}/", method)[0] == 501
    status, text = asked(address, f"/{page.token}/")
    assert status == 200 and "holds no step yet" in text and "connect-src 'self'" in text


def test_the_data_are_those_of_now(served: tuple[LivePage, str], a_run: Path) -> None:
    page, address = served
    for count in (1, 2):
        add_step(a_run, count)
        told = json.loads(asked(address, f"/{page.token}/data")[1])
        [glance, *_] = told["data"]["subjects"][0]["views"]
        assert f"A run of {count} step" in glance["blocks"][0]["text"]
    shutil.rmtree(a_run)  # whatever happens to the run, the server stays
    assert "is not the folder of a run" in asked(address, f"/{page.token}/data")[1]


def test_a_served_page_hands_its_trace_to_perfetto(served: tuple[LivePage, str], a_run: Path) -> None:
    """To a stand-in that answers as Perfetto does; a page from disk has no such button."""
    add_step(a_run, 0)
    (a_run / "rank-00000.spans").write_bytes(span_file())
    answer = """<script>addEventListener("message", (event) => {
        if (event.data === "PING") event.source.postMessage("PONG", event.origin);
        else document.title = new TextDecoder().decode(event.data.perfetto.buffer);
    });</script>"""
    with browsing(served[1]) as found:
        found.page.context.route("https://ui.perfetto.dev/**", lambda route: route.fulfill(body=answer, content_type="text/html"))
        with found.page.context.expect_page() as other:
            found.page.click("button:has-text('open in Perfetto')")
        other.value.wait_for_function("() => document.title.startsWith('{')")
        events = json.loads(other.value.title())["traceEvents"]
        assert [(one["name"], one["ts"], one["dur"]) for one in events if one["ph"] == "X"] == [("F0", 0.0, 2.0)]


def test_news_between_the_page_and_its_first_question_are_told(served: tuple[LivePage, str], a_run: Path) -> None:
    """A page that was shown before the run's last step asks for news after it."""
    page, address = served
    seen = re.search(r'"seen":"([0-9a-f]{16})"', asked(address, f"/{page.token}/")[1].replace(" ", ""))
    assert seen is not None
    add_step(a_run, 0)
    connection = http.client.HTTPConnection(address.split("/")[2], timeout=250)
    with closing(connection):
        connection.request("GET", f"/{page.token}/events?{seen[1]}")
        assert connection.getresponse().readline() == b"event: changed\n"
    assert page.news(seen[1]) is not None and page.news(str(page.news(seen[1]))) is None


def test_a_browser_follows_the_run(served: tuple[LivePage, str], a_run: Path) -> None:
    _, address = served
    with browsing(address) as found:
        assert "holds no step yet" in found.page.inner_text("#glance")
        add_step(a_run, 0)
        found.page.wait_for_selector("body[data-updates]", state="attached", timeout=60_000)
        found.page.wait_for_selector("#glance p:has-text('A run of 1 step,')", timeout=60_000)
        assert found.messages == [] and all(url.startswith(address) for url in found.requests)
