"""Tables that fit: what is left out, what continues below, and that nothing is ever cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from penstock.cli.console import table


def drawn(width: int, columns: list[str], rows: list[list[object]], **options: object) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width).print(table("plans", columns, rows, **options))  # type: ignore[arg-type]
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_table_that_fits_is_one_table() -> None:
    assert drawn(40, ["plan", "time"], [["DP 8", "1.5 s"], ["PP 2", "12.5 s"]]) == [
        "plans",
        "plan    time",
        "────────────",
        "DP 8   1.5 s",
        "PP 2  12.5 s",
        "",
    ]  # fmt: skip


def test_spare_columns_are_left_out_from_the_first_that_has_no_room() -> None:
    columns, rows = ["plan", "time", "tokens/s", "pp"], [["DP 8", "1.5 s", "48.1 k", 1]]
    assert "tokens/s  pp" in drawn(40, columns, rows, more=["tokens/s", "pp"])[1]
    narrow = drawn(20, columns, rows, more=["tokens/s", "pp"])
    assert narrow[1] == "plan   time" and "tokens/s" not in "".join(narrow) and "pp" not in "".join(narrow)
    shown = drawn(20, columns, rows, more=["tokens/s", "pp"], verbose=True)
    assert [line for line in shown if line.startswith("plan ")] == ["plan   time", "plan  tokens/s  pp"]


def test_columns_without_content_are_left_out() -> None:
    assert drawn(40, ["plan", "price", "time"], [["DP 8", "-", "1 s"], ["PP 2", "-", "2 s"]])[1] == "plan  time"
    assert "price" in drawn(40, ["plan", "price"], [["DP 8", "-"], ["PP 2", "$3"]])[1]
    assert drawn(40, ["plan", "price"], [])[1] == "plan  price"


@pytest.mark.parametrize("width", [20, 28, 33, 80])
def test_every_word_is_there_at_any_width(width: int) -> None:
    text = "equal stages, one tp inside a node"
    shown = drawn(width, ["search", "space", "slower", "devices"], [["Megatron", text, "+3.1%", "0-3 | 4-7 and 12 more"]])
    assert all(len(line) <= width for line in shown) and "…" not in "".join(shown)
    words = " ".join(shown).split()
    assert {"Megatron", "stages,", "node", "+3.1%", "more"} <= set(words)


def test_a_word_longer_than_the_terminal_is_folded() -> None:
    shown = drawn(12, ["n", "name"], [[1, "abcdefghijklmnopqrstuvwxyz"]])
    assert all(len(line) <= 12 for line in shown) and "…" not in "".join(shown)
    assert "z" in "".join(shown)
