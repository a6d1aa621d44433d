"""Commands that are told can be copied into a shell, whatever the names in them."""

from __future__ import annotations

import ast
import re
import shlex
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from pty_runs import on_terminal, screen_lines

from penstock.cli import demo, store
from penstock.cli.main import run
from penstock.errors import shell_words

SOURCE = Path(__file__).parents[2] / "src" / "penstock"
SEARCH = ("search", "--model", "gpt-tiny", "--cluster", "1xcpu", "--global-batch", "8", "--micro-batches", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "a b'c$(touch hacked)"
    found.mkdir()
    return found


def words_of(told: str, first: str, end: str) -> list[str]:
    """A command in what was told, as a shell reads it."""
    begin = told.index(first)
    return shlex.split(told[begin : told.index(end, begin)])


def test_words_come_back_from_a_shell() -> None:
    words = ["penstock", "check", "a b", "c'd", "$(x)", "", "日本", "e\\f", "--out=g"]
    assert shlex.split(shell_words(*words)) == words and shell_words("penstock", "check", Path("plan.json")) == "penstock check plan.json"


def test_plans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = folder / "plan.json"
    assert run([*SEARCH, "--out", str(plan)]) == 0
    told = capsys.readouterr().out
    assert words_of(told, "penstock train", "; penstock")[:4] == ["penstock", "train", str(plan), "--data"]
    assert words_of(told, "penstock explain", " says") == ["penstock", "explain", str(plan)]
    assert run(["train", str(plan)]) == 2
    assert words_of(capsys.readouterr().err, "penstock train", "\n")[2] == str(plan)
    assert run([*SEARCH, "--costs", f"profile:{folder / 'none.json'}"]) == 2
    assert words_of(capsys.readouterr().err, "penstock profile", "`")[-1] == str(folder / "none.json")
    assert run([*SEARCH, "--export", f"huggingface:{folder}"]) == 2
    assert words_of(capsys.readouterr().err, "penstock export", "\n")[-1] == f"huggingface:{folder}"


def test_plans_for_lengths(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths, plan = folder / "lengths.csv", folder / "plan.json"
    lengths.write_text("length\n" + "".join(f"{length}\n" for length in (5, 8, 12, 20) * 4), encoding="utf-8")
    assert run([*SEARCH[:-2], "--lengths", str(lengths), "--top", "1", "--out", str(plan)]) == 0
    assert words_of(capsys.readouterr().out, "penstock batch", "`") == ["penstock", "batch", "--lengths", str(lengths), "--plan", str(plan)]


def test_on_a_terminal_a_quoted_path_stays_in_its_line(folder: Path) -> None:
    plan = folder / "plan.json"
    status, said = on_terminal([*SEARCH, "--out", str(plan)], 60)
    assert status == 0 and any(shlex.quote(str(plan)) in line for line in screen_lines(said))


def test_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = folder / "texts.jsonl"
    texts.write_text('{"text": "one two three"}\n{"text": "four five"}\n' * 8, encoding="utf-8")
    assert run(["train", "--model", "gpt-tiny", "--data", str(texts), "--out", str(folder / "run"), "--steps", "1"]) == 0
    assert words_of(capsys.readouterr().out, "penstock train", "`") == ["penstock", "train", str(folder / "run" / "job.yaml")]


def test_modules(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net, path = folder / "net.py", folder / "model.json"
    net.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(2, 1), (torch.zeros(4, 2),)\n", encoding="utf-8")
    assert run(["import", f"module:{net}:make", "--out", str(path)]) == 0
    assert words_of(capsys.readouterr().out, "penstock search", "\n")[:4] == ["penstock", "search", "--model", str(path)]


def test_what_the_demo_and_a_store_say(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo._tell(folder, folder / "report.html")
    told = capsys.readouterr().out
    assert words_of(told, "penstock check", "\n")[-1] == str(folder / "plan.json")
    assert words_of(told, "penstock search", "\n")[-1] == f"profile:{folder / 'profile.json'}"
    store._tell(SimpleNamespace(shown_address="tcp://x"), folder / "store.json", insecure=False, json=False)
    assert words_of(capsys.readouterr().out, "export", "\n") == ["export", f"PENSTOCK_STORE=file:{(folder / 'store.json').resolve()}"]


def test_no_command_is_told_with_bare_values() -> None:
    """What is put into a command goes through `shell_words`; names of ours, and the runtime's numbers and addresses, need none."""
    bare = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for text, value in pairwise(parts):
                told = isinstance(text, ast.Constant) and re.search(r"penstock [a-z-]+ [^`.;]*$", str(text.value))
                put = ast.unparse(value.value) if isinstance(value, ast.FormattedValue) else "SHELL"
                if told and not put.isupper() and not put.startswith("shell_words("):
                    bare.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert [place for place in bare if not place.startswith("runtime/")] == []
