"""What the readers share: cells, folders and files that are wrong are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.models.shapes import Shape
from penstock.systems.tables import existing_folder, read_checked, read_rows, split_quantity


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; expected the header 'a,b'"),
        ("a,c\n1,2\n", "row 1: no column 'b'. The header is 'a,c', expected 'a,b'"),
        ("a,b\n", "has a header but no rows"),
        ("a,b\n1,2\n3\n", "row 3: 1 cell, the header has 2 columns"),
    ],
)
def test_malformed_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(InputError) as caught:
        read_rows(path, ("a", "b"))
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path / "t.csv", f"a,b\n1,{'x' * 200_000}\n"), ("a", "b"))
    assert [len(row.text("b")) for row in rows] == [200_000]


def test_cells_are_checked(tmp_path: Path) -> None:
    row = read_rows(write(tmp_path / "t.csv", "word,float,nan,negative,empty\nx,1.5,nan,-1,\n"), ("word",))[0]
    assert (row.text("word"), row.number("float"), row.choice("word", ["x"])) == ("x", 1.5, "x")
    assert row.optional_number("empty") != row.optional_number("empty")
    for ask, column, expected in (
        (row.number, "word", "expected a number, got 'x'"),
        (row.number, "nan", "expected a finite number"),
        (row.number, "negative", "0 or more, got '-1'"),
        (row.count, "float", "expected a whole number, got '1.5'"),
        (row.text, "empty", "expected text"),
    ):
        with pytest.raises(InputError, match=rf"row 2, column '{column}': .*{expected}"):
            ask(column)
    with pytest.raises(InputError, match="expected one of y, z, got 'x'"):
        row.choice("word", ["y", "z"])


def test_folders_and_json_are_checked(tmp_path: Path) -> None:
    (tmp_path / "eurosys").mkdir()
    with pytest.raises(InputError, match=r"does not exist\. Did you mean 'eurosys'"):
        existing_folder(tmp_path / "eurosis", "folder")
    file = write(tmp_path / "t.json", '{"a": {"b": "x"}}')
    with pytest.raises(InputError, match="is a file, a directory was expected"):
        existing_folder(file, "folder")
    with pytest.raises(InputError, match=r"b: .*valid integer.*got 'x'"):
        read_checked(file, "numbers", dict[str, int], "a")
    with pytest.raises(InputError, match="entry 'c' is missing"):
        read_checked(file, "numbers", dict[str, int], "c")


def test_split_quantity_separates_what_is_divided() -> None:
    both = split_quantity("one", 208.0, 108.0)
    assert [both.at(Shape(1), tp) for tp in (1, 2, 4)] == [208.0, 108.0, 58.0]
    assert split_quantity("one", 10.0, 12.0).at(Shape(1), 2) == 10.0
    assert split_quantity("one", 10.0, None).at(Shape(1), 2) == 5.0
