"""Pickles as plain data: what published files hold comes back equal; whatever would run, look up or build something is refused."""

from __future__ import annotations

import builtins
import os
import pickle
import pickletools
import random
from collections import OrderedDict, defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InputError
from penstock.systems.plain_pickle import read_plain_pickle

PLAIN: dict[str, Any] = {
    "numbers": [0, 255, 65_536, -1, 2**70, 1.5, True, None], "texts": ("a", "é" * 300, b"xyz", b"x" * 300),
    "nested": {(1, "none"): {"a": [(1, 2.5, 3.5)], (16, 32): []}, "b": ()}, "defaults": {"k": defaultdict(list, {1: [2]})},
    "shared": [[1]] * 3, "long": list(range(2000)),
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", PLAIN)
def test_plain_data_comes_back(name: str, protocol: int) -> None:
    assert read_plain_pickle(pickle.dumps(PLAIN[name], protocol), "it") == PLAIN[name]


def test_numpy_becomes_plain_numbers() -> None:
    assert read_plain_pickle(pickle.dumps(np.array([1.5, 2.0])), "it") == [1.5, 2.0]
    assert read_plain_pickle(pickle.dumps(np.array([1.5, 2], object)), "it") == [1.5, 2]
    assert read_plain_pickle(pickle.dumps([np.float64(2.5), {"a": np.array([3])}]), "it") == [2.5, {"a": [3.0]}]


class Runs:
    """Would run something when unpickled."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


def test_hostile_pickles_are_refused_and_run_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    hostile = [
        Runs(os.system, f"touch {mark}"), Runs(builtins.eval, "1"), Runs(getattr, "x", "upper"), Runs(list, (1,)),
        Runs(defaultdict, os.system), [1, {"a": Runs(os.mkdir, str(mark))}], date(2020, 1, 1),
        OrderedDict(a=1), Path("x"), {1, 2}, np.zeros((2, 2)), np.array(["text"]),
        1j,
    ]  # fmt: skip
    for protocol in (0, 2, 4):
        for value in hostile:
            with pytest.raises(InputError, match="it is"):
                read_plain_pickle(pickle.dumps(value, protocol), "it")
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"garbage", b"\x80\x04.", b"\x80\x04]", b"(lp0\n", b"\x80\x04K\x01e.", b"\x80\x04}]K\x01s.", b"h\x05.", b"cbuiltins\neval\n.",
     b"\x80\x02(I1\nR.", b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7fx.", b"r\xff\xff\xff\xffK\x01.", b"P1\n.", b"\x82\x01.", b"b.", b"\x94."],
    ids=repr,
)  # fmt: skip
def test_broken_pickles_are_explained(data: bytes) -> None:
    with pytest.raises(InputError, match="it is"):
        read_plain_pickle(data, "it")


def test_changed_bytes_end_in_data_or_an_error() -> None:
    rng = random.Random(0)
    whole = pickle.dumps({(1, "none"): [1.5, defaultdict(list, {2: [3]})], "b": np.array([1.0])})
    ended = 0
    for _ in range(600):
        data = bytearray(whole)
        data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            read_plain_pickle(bytes(data), "it")
        except InputError:
            ended += 1
    assert 100 < ended < 600 and {op.name for op, _, _ in pickletools.genops(whole)} >= {"REDUCE", "BUILD"}
