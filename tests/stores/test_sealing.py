"""Seals that only the key's holder makes, and files that only their owner reads."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.stores import Job, StoreError
from penstock.stores.addresses import ADDRESS_VARIABLE, JOB_VARIABLE, StoreFile, job_from_environment, read_store_file, write_store_file
from penstock.stores.sealing import KEY_FILE_VARIABLE, KEY_VARIABLE, job_key, open_seal, seal, write_private

KEY = bytes(range(32))


@given(name=st.text(max_size=20), payload=st.binary(max_size=50), data=st.data())
def test_a_seal_opens_for_its_name_and_key_and_for_no_change(name: str, payload: bytes, data: st.DataObject) -> None:
    sealed = seal(KEY, name, payload)
    assert open_seal(KEY, name, sealed) == payload
    at = data.draw(st.integers(0, len(sealed) - 1))
    flipped = sealed[:at] + bytes([sealed[at] ^ data.draw(st.integers(1, 255))]) + sealed[at + 1 :]
    for key, label, value in ((KEY, name, flipped), (KEY, name, sealed[:at]), (KEY, name + "1", sealed), (KEY[::-1], name, sealed)):
        with pytest.raises(StoreError, match="is refused"):
            open_seal(key, label, value)


@given(name=st.text(min_size=1, max_size=10), payload=st.binary(max_size=10))
def test_a_name_cannot_borrow_from_its_payload(name: str, payload: bytes) -> None:
    sealed = seal(KEY, name, payload)
    moved = sealed[:36] + name[-1].encode() + payload
    with pytest.raises(StoreError):
        open_seal(KEY, name[:-1], moved)


def test_the_key_comes_from_the_environment_or_a_private_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    assert job_key() is None
    path = tmp_path / "key"
    write_private(path, KEY.hex() + "\n")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(path))
    assert job_key() == KEY
    path.chmod(0o640)
    with pytest.raises(InputError, match=r"may be read by others \(mode 0640\)"):
        job_key()
    monkeypatch.setenv(KEY_VARIABLE, "ff" * 32)
    assert job_key() == b"\xff" * 32
    monkeypatch.setenv(KEY_VARIABLE, "not hex")
    with pytest.raises(InputError, match="PENSTOCK_STORE_KEY is not hexadecimal") as refused:
        job_key()
    assert "not hex'" not in str(refused.value)


def test_a_private_file_replaces_an_open_one_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "key"
    before = os.umask(0)
    try:
        write_private(path, "old")
        path.chmod(0o666)
        write_private(path, "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and path.read_text() == "new"
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


def test_store_files(tmp_path: Path) -> None:
    path = str(tmp_path / "store.json")
    write_store_file(path, StoreFile("redis://:word@127.0.0.1:1/0", KEY))
    assert read_store_file(path) == StoreFile("redis://:word@127.0.0.1:1/0", KEY)
    assert "word" not in repr(read_store_file(path))
    for text in ("", "[]", "{}", '{"address": "tcp://a:1", "key": "xy"}', '{"address": "file:b", "key": "00"}'):
        write_private(path, text)
        with pytest.raises(InputError, match="store file"):
            read_store_file(path)


def test_a_job_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ADDRESS_VARIABLE, JOB_VARIABLE, KEY_VARIABLE, KEY_FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="set PENSTOCK_STORE and PENSTOCK_JOB"):
        job_from_environment(2)
    monkeypatch.setenv(ADDRESS_VARIABLE, "tcp://127.0.0.1:1")
    monkeypatch.setenv(JOB_VARIABLE, "night-run")
    with pytest.raises(InputError, match="job 'night-run' has no key"):
        job_from_environment(2)
    path = str(tmp_path / "store.json")
    write_store_file(path, StoreFile("tcp://127.0.0.1:1", KEY))
    monkeypatch.setenv(ADDRESS_VARIABLE, f"file:{path}")
    assert job_from_environment(2, first=7) == (f"file:{path}", Job("night-run", KEY, 2, first=7))
    monkeypatch.setenv(KEY_VARIABLE, "ab" * 32)
    assert job_from_environment(2)[1].key == b"\xab" * 32
