"""Files in and out: what is refused before it is read, written whole or not at all, links kept, devices never replaced."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from disk_order import DiskOrder
from full_disk import small_files

from penstock.errors import InputError
from penstock.files import (
    check_writable,
    csv_text,
    describe_validation_error,
    outputs_apart,
    parsed_yaml,
    read_json,
    read_text,
    read_yaml,
    reserve_output,
    write_text,
    written_together,
    yaml_text,
)


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["link", "real"]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join(250)
    assert got == ["text"] and pipe.is_fifo()


def test_a_full_device_is_told() -> None:
    with pytest.raises(InputError, match="No space left"):
        write_text("/dev/full", "text")
    assert Path("/dev/full").is_char_device()


def test_targets_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="is a directory"):
        write_text(tmp_path, "text")
    with pytest.raises(InputError, match="file' is not a directory"):
        write_text(tmp_path / "file" / "deeper" / "plan.json", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


def test_a_device_is_not_read() -> None:
    with pytest.raises(InputError, match="plan '/dev/zero' is a device"):
        read_text("/dev/zero", "plan")


def test_what_is_no_file_is_told_without_waiting_for_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in [
        (tmp_path / "pipe", "is a named pipe"), (tmp_path, "is a directory"), (tmp_path / "none", "does not exist"),
        (tmp_path / ("n" * 300), "File name too long"), ("a\0b", "null"),
    ]:  # fmt: skip
        with pytest.raises(InputError, match=message):
            read_text(path, "plan")


def test_the_mark_of_spreadsheets_is_not_part_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert read_json(tmp_path / "a.json", "plan") == {"a": 1}
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "a.yaml", "job") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 50_000 + "]" * 50_000, "nested too deep"), ('{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given twice"),
     ("{", "line 1"), (r'{"a": ["\ud83d\ude00", "\uDC00"]}', r"'\\udc00' is half of a character")],
)  # fmt: skip
def test_json_that_means_nothing_or_two_things(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "a.json", "plan")


def test_a_pair_of_surrogates_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(r'{"a": "\ud83d\ude00", "b": NaN}')
    assert read_json(tmp_path / "a.json", "plan")["a"] == "\U0001f600"


@pytest.mark.parametrize(
    ("text", "message"),
    [("[" * 50_000 + "]" * 50_000, "nested too deep"), ("a: 1\nb:\n  c: 1\n  c: 2\n", "line 4, column 3: the key 'c' is given twice"),
     ("a: [", "line 1"), ("? [1, 2]\n: 3\n", "unhashable"), ("a: !!bool maybe", "not of the type that its tag names"),
     ("a: !!timestamp soon", "not of the type"), ("a: " + "9" * 5000, "digits")],
)  # fmt: skip
def test_yaml_that_means_nothing_or_two_things(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        read_yaml(tmp_path / "a.yaml", "job")


def test_yaml_merges_keys_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: &base {x: 1, y: 2}\nown:\n  <<: *base\n  y: 3\n")
    assert read_yaml(tmp_path / "a.yaml", "job")["own"] == {"x": 1, "y": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True), ("False", False), ("off", "off"), ("no", "no"), ("yes", "yes"), ("On", "On"), ("~", None), ("", None),
        ("1e-5", 1e-5), ("1e6", 1e6), ("4e1", 40.0), ("-2.5E+3", -2500.0), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf), ("007", 7),
        ("0777", 777), ("-12", -12), ("0x1f", 31), ("0o17", 15), ("1:30", "1:30"), ("1_000", "1_000"), ("2024-13-45", "2024-13-45"),
        ("2024-01-05", "2024-01-05"), ("e5", "e5"), ("=", "="), ("'1e5'", "1e5"),
    ],
)  # fmt: skip
def test_yaml_means_what_its_newer_version_says(text: str, value: Any) -> None:
    found = parsed_yaml(f"a: {text}", "a.yaml", "job")["a"]
    assert (found, type(found)) == (value, type(value))
    assert math.isnan(parsed_yaml(".nan", "a.yaml", "job"))


@pytest.mark.parametrize("value", ["1e5", "off", "true", "0o17", "1:30", "2024-01-05", "~", "", "<<", 1e-5, 7, None, True, "a " * 9000])
def test_what_is_written_as_yaml_comes_back_in_either_version(value: Any) -> None:
    text = yaml_text({"a": [value]})
    assert text.count("\n") == 1 and parsed_yaml(text, "a.yaml", "job") == yaml.safe_load(text) == {"a": [value]}


def test_many_keys_are_compared_in_no_time() -> None:
    text = "".join(f"k{number}: 0\n" for number in range(20_000))

    def took_s(read: Callable[[], dict[str, int]]) -> float:
        begin = time.process_time()
        assert len(read()) == 20_000
        return time.process_time() - begin

    def is_as_quick() -> bool:
        return took_s(lambda: parsed_yaml(text, "a.yaml", "job")) < 2 * took_s(lambda: yaml.safe_load(text))

    assert any(is_as_quick() for _ in range(5))  # a burst of other work may slow one of the two


@pytest.mark.parametrize("name", ["", ".", "n" * 300, "file/plan.json", "file/deep/plan.json"])
def test_names_that_no_file_can_have_are_told_before_the_work(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(name)
    check_writable(tmp_path / "new" / "deep" / "plan.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_is_to_be_written_is_neither_read_nor_written_twice(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link").symlink_to("file")
    with outputs_apart():
        assert read_text(tmp_path / "link", "plan") == "kept"
        reserve_output(tmp_path / "link")
        with pytest.raises(InputError, match=r"plan '.*file' would be overwritten"):
            read_text(tmp_path / "file", "plan")
        with pytest.raises(InputError, match="writes something else"):
            reserve_output(tmp_path / "folder" / ".." / "file")
        for _ in range(2):
            reserve_output("/dev/null")
    reserve_output(tmp_path / "file")
    assert read_text(tmp_path / "file", "plan") == "kept"


def test_a_million_problems_are_told_in_a_few_lines() -> None:
    from pydantic import TypeAdapter, ValidationError

    with pytest.raises(ValidationError) as wrong:
        TypeAdapter(list[int]).validate_python(["x"] * 1000)
    lines = describe_validation_error(wrong.value, "lengths").splitlines()
    assert len(lines) == 22 and lines[-1].strip() == "… and 980 more"


def test_files_written_together_appear_all_or_none(tmp_path: Path) -> None:
    (tmp_path / "first").write_text("old")
    with pytest.raises(InputError, match=r"second' cannot be written"), written_together():
        write_text(tmp_path / "first", "new")
        write_text(tmp_path / "made" / "for" / "this", "new")
        assert (tmp_path / "first").read_text() == "old"
        write_text(tmp_path / "first" / "second", "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["first"] and (tmp_path / "first").read_text() == "old"
    with written_together():
        write_text(tmp_path / "first", "new")
        with written_together():
            write_text(tmp_path / "made" / "second", "new")
        assert not (tmp_path / "made" / "second").exists()
    assert [path.read_text() for path in (tmp_path / "first", tmp_path / "made" / "second")] == ["new", "new"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["first", "made", "second"]


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o640])
def test_a_replaced_file_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(mode)
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / "file").stat().st_mode & 0o7777 == mode
    (tmp_path / "plain").write_text("new")
    write_text(tmp_path / "other", "new")
    assert (tmp_path / "other").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_full_disk_leaves_no_folder_either(tmp_path: Path) -> None:
    with small_files(100), pytest.raises(InputError, match=r"file' cannot be written: File too large"):
        write_text(tmp_path / "made" / "file", "x" * 200)
    assert not list(tmp_path.iterdir())


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut there is the old text or the new, not a name without content."""
    disk = DiskOrder(monkeypatch)
    with written_together():
        write_text(tmp_path / "first", "new")
        write_text(tmp_path / "second", "new")
    assert all(disk.is_synced_before(tmp_path / name, tmp_path / name) for name in ("first", "second"))


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_others_may_read_what_is_written_as_far_as_the_umask_lets_them(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "plan.json", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == mode


def test_csv_text_starts_no_formula() -> None:
    text = csv_text(["name", "value"], [["=1+1", -2.5], ["@x", "-"], ["plain, quoted", None]])
    assert text.splitlines() == ["name,value", "'=1+1,-2.5", "'@x,'-", '"plain, quoted",']
    assert csv_text([" =a"], [["\t+1"], ["  plain"]]).splitlines() == ["' =a", "'\t+1", "  plain"]  # spreadsheets pass over blanks
