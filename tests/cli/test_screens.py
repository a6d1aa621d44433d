"""What verbs show on a real terminal: the answer first, in sentences, and nothing cut at 80 or at 120 columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pty_runs import cut_lines, on_terminal, screen_lines
from searched_once import searched_once

from penstock.cli.main import run

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"
PIPELINE, MIXED, REPLICAS = (str(EXAMPLES / name) for name in ("gpt-1.3b-pp4.json", "llama-8b-mixed.json", "bert-large-zero1.json"))
SMALL = ("--model", "gpt-350m", "--global-batch", "32", "--micro-batches", "1,2", "--max-hops", "0")
COMMANDS = {
    "search": (["search", "--cluster", "4xa100-40gb", *SMALL], "a step ±6 %"),
    "search, memory short": (["search", "--cluster", "p3.16xlarge", *SMALL, "--memory-limit", "5", "--baselines", "--proof"],
                             "a step ±6 %"),
    "search, verbose": (["search", "--cluster", "2xg5.24xlarge", *SMALL, "--verbose"], "a step ±6 %"),
    "search, lengths": (["search", "--model", "gpt-small", "--cluster", "2xa100-40gb", "--global-batch", "32", "--lengths", "lengths.csv"],
                        "micro-batches by length"),
    "explain": (["explain", PIPELINE], "a step ±6 %"),
    "explain, what if": (["explain", "small.json", "--what-if", "--verbose"], "a step ±6 %"),
    "check": (["check", MIXED], "plan is valid"),
    "check, replicas": (["check", REPLICAS], "plan is valid"),
    "simulate": (["simulate", PIPELINE], "simulated"),
    "simulate, order": (["simulate", PIPELINE, "--schedule", "zero-bubble", "--verbose"], "simulated"),
    "batch": (["batch", "--lengths", "lengths.csv", "--plan", PIPELINE, "--budget-steps", "0", "--baselines"], "a step"),
    "pareto": (["pareto", "--model", "gpt-350m", "--cluster", "1xp4d.24xlarge+2xg5.24xlarge", "--global-batch", "32",
                "--micro-batches", "1", "--steps", "100", "--dominated"], "fastest: "),
    "list models": (["list", "models"], "gpt-1.3b"),
    "list devices": (["list", "devices", "--verbose"], "a100-40gb"),
    "list clusters": (["list", "clusters"], "p4d.24xlarge"),
    "list schedules": (["list", "schedules"], "1f1b"),
    "list profiles": (["list", "profiles"], "h200-141gb"),
}  # fmt: skip
"""Each with words of its answer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screens")
    lengths = "\n".join(str(8 + number * 37 % 240) for number in range(120))
    (folder / "lengths.csv").write_text(f"length\n{lengths}\n", encoding="utf-8")
    small = ["--model", "gpt-tiny", "--cluster", "2xa10g", "--global-batch", "8", "--micro-batches", "1,2"]
    assert run(["search", *small, "--out", str(folder / "small.json")]) == 0
    return folder


@pytest.fixture(autouse=True, scope="module")
def searches() -> Iterator[None]:
    """What is found is the same on a wider screen."""
    with searched_once():
        yield


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_cut(name: str, columns: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    arguments, words = COMMANDS[name]
    status, said = on_terminal(arguments, columns)
    assert status == 0, said
    assert words in " ".join(" ".join(screen_lines(said)).split())
    assert cut_lines(said, columns) == []
