"""The Redis server of a job: on loopback, behind a password that nobody sees, over TLS if asked, gone after Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from stores.conftest import require_redis

from penstock.errors import InputError, PenstockError
from penstock.stores import Job, StoreError, open_store
from penstock.stores.addresses import read_store_file
from penstock.stores.server import RedisServer, _settings, start_redis


@pytest.fixture(autouse=True)
def redis_here(monkeypatch: pytest.MonkeyPatch) -> None:
    require_redis()
    monkeypatch.setattr("penstock.stores.redis._FIRST_CONNECT_S", 0.5)


def start_command(path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "store", "start", "--out", str(path), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_no_process_shows_the_password(shared_redis: RedisServer) -> None:
    assert shared_redis.password is not None and len(shared_redis.password) >= 32
    shown = Path(f"/proc/{shared_redis.process.pid}/cmdline").read_bytes() + Path(f"/proc/{shared_redis.process.pid}/environ").read_bytes()
    assert shared_redis.password.encode() not in shown
    assert shared_redis.password not in repr(shared_redis) + shared_redis.shown_address
    assert shared_redis.password in shared_redis.address


def test_what_a_killed_job_leaves_goes_by_itself(shared_redis: RedisServer) -> None:
    """Days later: a job that waits for its server over a weekend still finds its programs."""
    import redis

    store = open_store(shared_redis.address, Job("killed", bytes(32), 1))
    store.publish(0, {0: b"program"})
    store.fetch(0, 0)
    store.acknowledge(0, 0)
    store.publish(1, {0: b"program"})
    store.close()
    with redis.Redis.from_url(shared_redis.address) as client:
        left = [client.ttl(key) for key in client.scan_iter(match="penstock/killed/*")]
    assert len(left) >= 2 and all(2 * 24 * 3600 < seconds <= 7 * 24 * 3600 for seconds in left)


def test_programs_are_never_written_to_a_disk_nor_given_up_for_room() -> None:
    """Anybody could read the first, and ranks would wait for the second; only who asked for it is answered without a password."""
    for host, password in product(("127.0.0.1", "10.0.0.1"), ("word", None)):
        settings = _settings(host, 7, password, None, None)
        assert {f"bind {host}", "port 7", 'save ""', "appendonly no", "maxmemory-policy noeviction"} <= {*settings}
        assert ("requirepass word" in settings) == (password is not None) and ("protected-mode no" in settings) == (
            host == "10.0.0.1" and password is None
        )


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path, ending: signal.Signals) -> None:
    path = tmp_path / "store.json"
    process = start_command(path)
    try:
        assert process.stdout is not None
        said = process.stdout.readline() + process.stdout.readline()
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        content = read_store_file(str(path))
        assert f"PENSTOCK_STORE=file:{path}" in said and content.address not in said
        store = open_store(f"file:{path}", Job("job", content.key, 1), wait_s=250)
        store.publish(0, {0: b"program"})
        assert store.fetch(0, 0) == b"program"
        process.send_signal(ending)
        _, told = process.communicate(timeout=250)
        assert process.returncode == 0 and "store stopped" in told
    finally:
        process.kill()
        process.communicate()
    assert not path.exists()
    with pytest.raises(StoreError):
        open_store(content.address, replace(Job.new(1), away_s=0.1)).fetch(0, 0)


def test_a_server_that_dies_is_started_again_with_its_password(tmp_path: Path) -> None:
    process = start_command(tmp_path / "store.json", "--json")
    try:
        assert process.stdout is not None
        shown = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        store = open_store(read_store_file(shown["file"]).address, Job.new(1), wait_s=250)
        time.sleep(5.1)  # one that dies sooner is not started again
        os.kill(shown["pid"], signal.SIGKILL)
        store.publish(0, {0: b"program"})
        assert store.fetch(0, 0) == b"program"
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=250)
    assert "is started again" in told and process.returncode == 0


def test_open_only_when_asked_for(tmp_path: Path) -> None:
    process = start_command(tmp_path / "store.json", "--insecure")
    try:
        assert process.stdout is not None and "redis://127.0.0.1:" in process.stdout.readline()
    finally:
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=250)
    assert "without a password" in told


def test_a_file_that_is_no_store_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    process = start_command(path)
    _, told = process.communicate(timeout=250)
    assert process.returncode == 2 and "is not left over from a store" in told and path.read_text() == "{}"


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl on this machine's path to make a certificate with")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=localhost", "-addext"]
    subprocess.run([*make, "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert], check=True, capture_output=True)
    try:
        server = start_redis(tls_cert=cert, tls_key=key)
    except PenstockError as error:
        pytest.skip(f"this redis-server speaks no TLS: {error}")
    try:
        assert server.address.startswith("rediss://")
        store = open_store(f"{server.address}?ssl_ca_certs={cert}", Job.new(1), wait_s=250)
        store.publish(0, {0: b"program"})
        assert store.fetch(0, 0) == b"program"
        with pytest.raises(StoreError, match=r"does not answer: .*certificate"):
            open_store(server.address, Job.new(1))
    finally:
        server.stop()


def test_what_cannot_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"cannot listen on 192\.0\.2\.1:0"):
        start_redis("192.0.2.1")
    with pytest.raises(InputError, match="go together"):
        start_redis(tls_cert=tmp_path / "cert.pem")
    with pytest.raises(InputError, match=r"TLS file .* does not exist"):
        start_redis(tls_cert=tmp_path / "cert.pem", tls_key=tmp_path / "key.pem")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="no redis-server or valkey-server on the path"):
        start_redis()
