"""The frame of the command line: speed, help, what every kind of error becomes, and what verbs say things with."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest

import penstock
from penstock.cli import console
from penstock.cli import main as frame
from penstock.cli.console import format_bytes, format_count, format_time, format_usd, out, print_json, progress, table
from penstock.cli.main import VERBS, Verb, run
from penstock.errors import InfeasibleError, InputError

HELP_THEN_LOOK = """
import sys
from counted_work import counted_calls
def show_help():
    from penstock.cli.main import run
    run(["--help"])
calls = counted_calls(show_help)
heavy = set(sys.argv[1:]) & set(sys.modules)
assert not heavy, heavy
print(calls, file=sys.stderr)
"""
HEAVY = ("torch", "numba", "pydantic", "matplotlib", "transformers", "scipy")
Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Adds a verb to the table whose module holds the given function."""

    def add(name: str, function: object, module: str = "") -> None:
        module = module or name
        fake = ModuleType(f"penstock.cli.{module}")
        setattr(fake, module, function)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.setattr(frame, "VERBS", (*frame.VERBS, Verb(name, module, f"help of {name}")))

    monkeypatch.delenv("PENSTOCK_TRACEBACK", raising=False)
    return add


def test_help_imports_nothing_heavy_and_answers_at_once() -> None:
    """Twice the calls of functions with which it takes an eighth of a second; one heavy module alone would be many times as many."""
    done = subprocess.run([sys.executable, "-c", HELP_THEN_LOOK, *HEAVY], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr) < 500_000


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_explains_itself(verb: Verb, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb.name, "--help"]) == 0
    assert f"penstock {verb.name}" in capsys.readouterr().out


def test_every_verb_is_documented() -> None:
    reference = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert [verb.name for verb in VERBS if f"`penstock {verb.name}" not in reference] == []


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_verbs_without_importing_them(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frame, "VERBS", (Verb("shine", "no_such_module", "Makes things shine."),))
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "shine" in shown and "Makes things shine." in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"penstock {penstock.__version__}\n"


def test_verb_gets_its_arguments(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    def import_(path: str, top: int = 3) -> None:
        """Read a plan."""
        print(path, top)

    register("import", import_, module="import_")
    assert run(["import", "plan.json", "--top", "5"]) == 0
    assert capsys.readouterr().out == "plan.json 5\n"
    assert run(["import", "-h"]) == 0
    shown = capsys.readouterr().out
    assert "penstock import" in shown and "Read a plan." in shown


def test_unknown_verb_names_near_ones(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    register("search", lambda: None)
    assert run(["serach"]) == 2
    assert "there is no command 'serach'. Did you mean 'search'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--nothing"], ["search"], ["search", "x", "--nothing"]])
def test_usage_error_exits_2(arguments: list[str], register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    def search(count: int) -> None: ...

    register("search", search)
    assert run(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("the plan [red] is wrong."), 2, "error: the plan [red] is wrong."),
        (InfeasibleError("no plan fits."), 3, "error: no plan fits."),
        (KeyboardInterrupt(), 130, "error: interrupted."),
        (ValueError("boom"), 1, "error: ValueError: boom"),
        (BrokenPipeError(32, "Broken pipe"), 1, "error: ConnectionError: a connection was closed"),
    ],
)
def test_error_becomes_message_and_status(
    error: BaseException, status: int, message: str, register: Register, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    register("fails", fails)
    assert run(["fails"]) == status
    told = capsys.readouterr()
    assert message in told.err and told.out == ""
    assert "Traceback" not in told.err
    assert ("PENSTOCK_TRACEBACK=1" in told.err) == (status == 1)


@pytest.mark.parametrize("way", ["variable", "option"])
def test_traceback_on_request(way: str, register: Register, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise ValueError("boom")

    register("fails", fails)
    monkeypatch.setenv("PENSTOCK_TRACEBACK", "1" if way == "variable" else "0")
    assert run([*(["--debug"] if way == "option" else []), "fails"]) == 1
    assert "Traceback" in capsys.readouterr().err


PRINT_MUCH = """
import sys, types
from penstock.cli import main as frame
def much() -> None:
    for number in range(100_000):
        print(number)
sys.modules["penstock.cli.much"] = types.SimpleNamespace(much=much)
frame.VERBS = (frame.Verb("much", "much", "Prints much."),)
frame.main()
"""


@pytest.mark.parametrize(
    "python", [["-m", "penstock", "--help"], ["-m", "penstock", "--version"], ["-c", PRINT_MUCH, "much"]]
)
def test_closed_pipe_is_quiet(python: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run([sys.executable, *python], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=250)
    finally:
        os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 1


ENDED = """
import os, signal, sys
from penstock.cli import main as frame
from penstock.processes import fork_server
fork_server.PRELOADED.clear()
def asked(arguments):
    fork_server.warm_up()
    os.kill(os.getpid(), signal.SIGTERM)
frame.run = asked
frame.main()
"""


def test_sigterm_leaves_nothing_behind() -> None:
    """Also before a run has begun that listens to it: the fork server's socket is there by then."""
    with tempfile.TemporaryDirectory() as folder:  # not a test's own: names of sockets are short
        environment = {**os.environ, "TMPDIR": folder}
        done = subprocess.run([sys.executable, "-c", ENDED], env=environment, capture_output=True, text=True, timeout=250)
        assert (done.returncode, done.stderr, os.listdir(folder)) == (128 + signal.SIGTERM, "", [])


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command, with the words that lead to it."""
    for verb in VERBS:
        found = frame._load(verb)
        if hasattr(found, "commands"):
            yield from (([verb.name, name], inner) for name, inner in found.commands.items())
        else:
            yield [verb.name], found


def test_no_option_is_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """One of two values would be ignored; lists take as many as there are."""
    several = set()
    for words, command in commands():
        for option in command.params:
            if option.param_type_name != "option":
                continue
            once = option.opts[:1] if option.is_flag else [option.opts[0], "1"]
            status = run([*words, *once, *once])
            told = capsys.readouterr().err
            if option.multiple:
                several.add(option.opts[0])
                assert "times" not in told
            else:
                assert status == 2 and f"error: {option.opts[0]} is given 2 times. Give it once." in told, (words, option.opts)
    assert {"--set", "--kill", "--slow"} <= several
    assert run(["--debug", "--debug", "list"]) == 2
    assert run(["search", "--model=gpt-tiny", "--model", "gpt-tiny"]) == 2  # however it is written


OPEN_ONE = """
import os, subprocess, sys, types
from penstock.cli import main as frame
def opens() -> None:
    with open(os.devnull) as file:
        sys.exit(file.fileno() <= 2 or subprocess.call(["bash", "-c", "echo one && echo two >&2"]))
sys.modules["penstock.cli.opens"] = types.SimpleNamespace(opens=opens)
frame.VERBS = (frame.Verb("opens", "opens", "Opens a file."),)
frame.main()
"""


USUAL = {
    "help": (["search", "--help"], 0),
    "table": (["list", "devices"], 0),
    "json": (["list", "models", "--json"], 0),
    "unknown": (["list", "modles"], 2),
    "no such option": (["list", "--modles"], 2),
    "missing": (["check", "Pläne → 日本.json"], 2),
}
"""Command lines that print much, little, and an error, each with its usual status."""
STREAMS = {
    "ascii": "PYTHONIOENCODING=ascii", "latin-1": "PYTHONIOENCODING=latin-1", "stdout": ">&-", "stderr": "2>&-", "all": "<&- >&- 2>&-",
}  # fmt: skip
"""Encodings, and streams that are closed."""
EACH_COMMAND = """
import json, os, sys
from penstock.cli import main as frame
given, printed, report = sys.argv[1:]
found = {}
for what, words in json.loads(given).items():
    before = os.path.getsize(printed)
    if (child := os.fork()) == 0:
        sys.argv = ["penstock", *words]
        frame.main()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[what] = status, os.path.getsize(printed) > before
with open(report, "w") as file:
    json.dump(found, file)
"""
"""Runs commands one after the other, each in a fork of an interpreter that found the streams as they are and has touched none of them."""


@pytest.mark.parametrize("streams", STREAMS)
def test_where_streams_lead_decides_nothing(streams: str, tmp_path: Path) -> None:
    """Neither an encoding without our letters, nor a stream that is closed."""
    printed, report, how = tmp_path / "printed", tmp_path / "report.json", STREAMS[streams]
    given = json.dumps({what: words for what, (words, _) in USUAL.items()})
    line = shlex.join([sys.executable, "-c", EACH_COMMAND, given, str(printed), str(report)])
    with open(printed, "wb") as stdout:
        done = subprocess.run(
            ["bash", "-c", f"{how} {line}" if "=" in how else f"{line} {how}"], stdout=stdout, stderr=subprocess.PIPE, timeout=250
        )
    assert done.returncode == 0 and b"Traceback" not in done.stderr and b"Error" not in done.stderr, done.stderr
    shows = streams not in ("stdout", "all")
    assert json.loads(report.read_text()) == {what: [status, status == 0 and shows] for what, (_, status) in USUAL.items()}


def test_no_file_takes_the_place_of_a_closed_stream() -> None:
    """What a process that we start prints would be written into it."""
    done = subprocess.run(["bash", "-c", shlex.join([sys.executable, "-c", OPEN_ONE, "opens"]) + " <&- >&- 2>&-"], timeout=250)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("time_s", "text"),
    [
        (0, "0 s"),
        (8.5e-7, "850 ns"),
        (1.5e-6, "1.50 µs"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (1.5, "1.50 s"),
        (119.4, "119 s"),
        (125, "2 min 05 s"),
        (3599.7, "1 h 00 min"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 04 h"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_format_time(time_s: float, text: str) -> None:
    assert format_time(time_s) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (4.2 * 2**30, "4.2 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_format_bytes(size_bytes: float, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (1234, "1,234"), (12_340, "12.3 k"), (999_999, "1.00 M"), (1.4e9, "1.40 B"), (7e15, "7000 T")]
)
def test_format_count(number: float, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("amount_usd", "text"),
    [(0, "$0.00"), (0.00123, "$0.00123"), (12.341, "$12.34"), (999.999, "$1,000"), (1234.5, "$1,234"), (-3, "-$3.00")],
)
def test_format_usd(amount_usd: float, text: str) -> None:
    assert format_usd(amount_usd) == text


def test_table_takes_cells_literally(capsys: pytest.CaptureFixture[str]) -> None:
    out().print(table("plans", ["stages", "time"], [["[1, 2]", "12.3 ms"], ["[bold]", "9.0 ms"], [None, "-"]]))
    shown = capsys.readouterr().out
    assert "[1, 2]" in shown and "[bold]" in shown
    assert "  9.0 ms" in shown


@dataclass(frozen=True)
class Point:
    x: numpy.int64
    path: Path


def test_print_json_round_trip(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"point": Point(numpy.int64(3), Path("a/b")), "times_s": numpy.array([0.5, 1.0])})
    assert json.loads(capsys.readouterr().out) == {"point": {"x": 3, "path": "a/b"}, "times_s": [0.5, 1.0]}


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_stays_off_stdout(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with progress("searching [all]", total=2, quiet=quiet) as ticker:
        ticker.advance()
        ticker.describe("still [all]")
        ticker.advance()
    told = capsys.readouterr()
    assert told.out == ""
    assert ("still [all]" in told.err) != quiet


def test_text_of_others_cannot_steer_the_terminal(register: Register, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x9b1m\x07\u202eb"

    def verb() -> None:
        console.out().print(hostile, markup=False)
        console.out().print(console.table(hostile, ["name"], [[hostile]]))
        with console.progress(hostile, total=1) as ticker:
            ticker.describe(hostile)
        raise InputError(f"plan '{hostile}' is not valid")

    register("verb", verb)
    assert run(["verb"]) == 2
    told = "".join(capsys.readouterr())
    assert told.count("a\\x1b[2J\\x9b1m\\x07\\u202eb") >= 4
    assert not set(told) & {"\x1b", "\x9b", "\x07", "\u202e"}
