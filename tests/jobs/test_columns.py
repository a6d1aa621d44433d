"""Parquet files and folders of Hugging Face datasets: the same samples as a CSV, and clear words where pyarrow is absent."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from penstock.data.dataset import open_data
from penstock.errors import InputError
from penstock.jobs.columns import column_files, column_rows, is_columns
from penstock.jobs.raw_data import prepare_raw
from penstock.models.catalog import resolve_model

ROWS = [{"input": "one two", "target": "three", "id": 1}, {"input": "four", "target": None, "id": 2}]
TEXTS = [{"input": "one two", "target": "three"}, {"input": "four", "target": ""}]


def saved(folder: Path, names: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    return folder


def test_without_pyarrow_its_name_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="needs the Python package 'pyarrow'"):
        prepare_raw([str(tmp_path / "a.parquet")], resolve_model("gpt-tiny"), "gpt-tiny", keeps_weights=False)


def test_files_of_a_folder(tmp_path: Path) -> None:
    one = saved(tmp_path / "one", ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"])
    assert [file.name for file in column_files(one)] == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"] and is_columns(one)
    train = saved(tmp_path / "splits" / "train", ["data.arrow"])
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "train"]}))
    assert column_files(tmp_path / "splits") == [train / "data.arrow"]
    (tmp_path / "splits" / "dataset_dict.json").write_text(json.dumps({"splits": ["test"]}))
    with pytest.raises(InputError, match=r"has the splits test\. Give the folder"):
        column_files(tmp_path / "splits")
    for number, names in enumerate(([], ["../../etc/passwd"], [3])):
        with pytest.raises(InputError, match="names no files"):
            column_files(saved(tmp_path / f"odd-{number}", names))  # type: ignore[arg-type]
    assert not is_columns(tmp_path) and not is_columns(tmp_path / "a.csv")


def test_columns_are_read_in_every_format(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the Python package 'pyarrow' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the Python package 'pyarrow' is not installed")
    table, folder = arrow.Table.from_pylist(ROWS), saved(tmp_path / "dataset", ["a.arrow", "b.arrow"])
    parquet.write_table(table, tmp_path / "a.parquet")
    for name, make in (("a.arrow", arrow.ipc.new_stream), ("b.arrow", arrow.ipc.new_file)):
        with make(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    assert list(column_rows(tmp_path / "a.parquet", ())) == TEXTS and list(column_rows(folder, ())) == TEXTS * 2
    assert list(column_rows(tmp_path / "a.parquet", ("input",))) == [{"input": "one two"}, {"input": "four"}]
    prepared = prepare_raw([str(folder)], resolve_model("t5-tiny"), "t5-tiny", keeps_weights=False, split="1,0,0")
    assert {side: len(part) for side, part in open_data(prepared.folder).ragged.items()} == {"input": 1, "target": 1}, (
        "as in JSONL, what comes twice or has no target is left out"
    )
    for fields, message in ((("body",), "`body` were expected"), (("id",), "column 'id': texts were expected, it holds int")):
        with pytest.raises(InputError, match=message):
            list(column_rows(tmp_path / "a.parquet", fields))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(InputError, match="cannot be read as columns"):
        list(column_rows(tmp_path / "b.parquet", ()))
