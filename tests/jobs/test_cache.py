"""What is made once: named by all of its content, and made by one process at a time."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from penstock.jobs.cache import digest_of_files, made_once


def test_files_that_read_alike_end_to_end_have_other_names(tmp_path: Path) -> None:
    """A line that moved from one file to the next is another task's."""
    names = []
    for number, contents in enumerate(
        (("one\ntwo\n", "three\n"), ("one\n", "two\nthree\n"), ("one\ntwo\n", "three\n"), ("one\ntwo\nthree\n",))
    ):
        files = [tmp_path / f"{number}-{place}.txt" for place in range(len(contents))]
        for file, content in zip(files, contents, strict=True):
            file.write_text(content)
        names.append(digest_of_files(files))
    assert names[0] == names[2] and len(set(names)) == 3


def test_others_wait_while_one_makes_it(tmp_path: Path) -> None:
    """The ranks of a job ask for the same things at the same moment."""
    path = tmp_path / "kept" / "profile"

    def make(made: Path) -> None:
        with (made.parent / f".{made.name}.lock").open("a") as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.touch()

    assert not made_once(path, make) and made_once(path, make)
    with (path.parent / f".{path.name}.lock").open("a") as another:
        fcntl.flock(another, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody keeps it
