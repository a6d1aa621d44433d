"""The `penstock` command: finds the verb, runs it, and turns errors into one clear message and an exit status."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperGroup

import penstock
from penstock.cli import console
from penstock.cli.once import OnceCommand, refuse_twice
from penstock.errors import InputError, PenstockError, near_misses
from penstock.files import outputs_apart

__all__ = ["VERBS", "Verb", "main", "run"]

_UsageError: Any = typer.BadParameter.__base__
"""What typer raises for an option that is unknown, missing or not of its type; it has no public name there."""
_TRACEBACK_VARIABLE = "PENSTOCK_TRACEBACK"


class Verb(NamedTuple):
    """`penstock NAME` is the function `MODULE` of `penstock.cli.MODULE`; `help` is its line in `penstock --help`.

    A verb with verbs of its own (`penstock store start`) exposes a `typer.Typer` under that name instead of a function.
    """

    name: str
    module: str
    help: str


# In the order in which `penstock --help` lists them.
VERBS: tuple[Verb, ...] = (
    Verb("demo", "demo", "Measure a small model on this machine, plan for it, train it, and move away from a slow device."),
    Verb("list", "list_", "List the models, devices, clusters, schedules and profiles that have names."),
    Verb("profile", "profile", "Measure a model's ops on this machine's device."),
    Verb("search", "search", "Find the best plans for a model on a cluster."),
    Verb("pareto", "pareto", "Compare every choice of nodes from a pool by time and money."),
    Verb("explain", "explain", "Say where a plan's time, memory and money go."),
    Verb("batch", "batch", "Plan one global batch: micro-batches, order, recomputation, time and memory."),
    Verb("simulate", "simulate", "Show the timeline a plan would give: who computes, sends, waits, and what memory holds."),
    Verb("check", "check", "Prove a plan valid, or programs safe, or say everything that is wrong."),
    Verb("train", "train", "Train a model on your own data in one command; or run a job file, or a plan."),
    Verb("trace", "trace", "Write what every rank of a run did and when, beside what was predicted, for Perfetto."),
    Verb("report", "report", "Write a page to look at: plans, searches, choices of nodes, batches and runs."),
    Verb("reproduce", "reproduce", "Make the figures of Aceso, DynaPipe, FASOP and DynPipe again, and check what they claim."),
    Verb("watch", "watch", "Serve the report of a run to this machine, kept up to date while it goes on."),
    Verb("events", "events", "Tell what a run noticed about slow ranks, late data and costs, and what it decided."),
    Verb("replan", "replan", "Ask a running job to move to another plan."),
    Verb("disturb", "disturb", "Slow down ranks, links or data of a run that goes on."),
    Verb("join", "join", "Take the place of a node that a run on several nodes has lost."),
    Verb("import", "import_", "Trace your own torch module into a model description, or turn another planner's files into a plan."),
    Verb("export", "export", "Write a plan for another system or a launcher, or weights for Hugging Face."),
    Verb("prepare-data", "prepare_data", "Turn texts, chats, images or BERT shards into files that training maps."),
    Verb("store", "store", "Serve the store through which planners hand programs to ranks on other machines."),
)


class LazyGroup(TyperGroup):
    """Lists verbs from the table and imports a verb's module only when that verb is called or its help asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        refuse_twice(self, ctx, args)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str, Any, list[str]]:
        name, *rest = args
        verbs = {verb.name: verb for verb in VERBS}
        if name not in verbs:
            raise InputError(f"there is no command '{name}'. {near_misses(name, verbs)}")
        return name, _load(verbs[name]), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # typer would leave without a word
            raise _Interrupted("interrupted.") from None
        except BrokenPipeError as error:  # typer would take a lost peer for a closed stdout, and leave quietly
            if _reader_left():
                raise
            raise ConnectionError(f"a connection was closed by its other end ({error}).") from error


class _Interrupted(PenstockError):
    """Ctrl-C, with the status shells expect for it."""

    exit_status = 130


def _load(verb: Verb) -> Any:
    """The click command behind a verb."""
    target = getattr(import_module(f"penstock.cli.{verb.module}"), verb.module)
    if not isinstance(target, typer.Typer):
        function, target = target, typer.Typer(add_completion=False)
        target.command(verb.name, cls=OnceCommand)(function)
    return typer.main.get_command(target)


def _reader_left() -> bool:
    """Whether stdout is a pipe or a socket that nobody reads any more."""
    poller = select.poll()
    try:
        poller.register(sys.stdout.fileno(), 0)  # errors and hang-ups are reported without asking
    except (OSError, ValueError):  # a stdout without a file behind it, as under a test runner
        return False
    return bool(poller.poll(0))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


def _set_debug(wanted: bool) -> None:
    if wanted:
        os.environ[_TRACEBACK_VARIABLE] = "1"  # the environment, so that child processes see it too


def _root(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")] = False,
    debug: Annotated[bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.")] = False,
) -> None:
    """Plan and run the parallel training of neural networks.

    Example: penstock search --model gpt-1.3b --cluster 4xa100-40gb --global-batch 64 --out plan.json
    """


def _command() -> Any:
    """The whole command line, with a stand-in for each verb that knows its name and its line of help."""
    app = typer.Typer(cls=LazyGroup, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
    app.callback()(_root)
    for verb in VERBS:
        app.command(verb.name, help=verb.help)(lambda: None)
    return typer.main.get_command(app)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit status: 0 done, 1 failed, 2 wrong input, 3 no feasible plan, 130 interrupted."""
    try:
        _check_text(arguments)
        with outputs_apart():
            found = _command()(args=list(arguments) or ["--help"], prog_name="penstock", standalone_mode=False)
        return found if isinstance(found, int) else 0
    except _UsageError as error:
        verb = next((word for word in arguments if not word.startswith("-")), "")
        console.print_error(f"{error.format_message()} `penstock{f' {verb}' if verb else ''} --help` lists what there is.")
        return InputError.exit_status
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except PenstockError as error:
        _tell(str(error))
        return error.exit_status
    except KeyboardInterrupt:
        console.print_error("interrupted.")
        return 130
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # whoever looked it up: no such name can be right
            _tell(f"'{error.filename}': {error.strerror}.")
            return InputError.exit_status
        _tell(f"{type(error).__name__}: {error}")
        if not _debugging():
            console.err().print(f"This was not expected. To see where: {_TRACEBACK_VARIABLE}=1, or `penstock --debug VERB ...`.")
        return 1


def _check_text(arguments: Sequence[str]) -> None:
    """Refuses bytes that are no text: they could be neither looked up in a vocabulary nor written into a plan."""
    for word in arguments:
        if any("\ud800" <= letter <= "\udfff" for letter in word):
            raise InputError(f"'{word}' is not UTF-8 text. Rename what it names.")


def _tell(message: str) -> None:
    if _debugging():
        console.err().print_exception()
    console.print_error(message)


def _debugging() -> bool:
    return os.environ.get(_TRACEBACK_VARIABLE, "0") not in ("", "0")


def _take_any_streams() -> None:
    """Makes what a verb prints go wherever stdout and stderr lead, so that neither decides how it ends: letters that stdout's encoding
    lacks become `?`, and streams that were closed (`>&-`) lead nowhere."""
    # A file would be given the number of a closed stream, and get what processes of ours print.
    while (nowhere := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(nowhere, True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    sys.stdout = sys.stdout or os.fdopen(nowhere, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(nowhere, "w", encoding="utf-8", closefd=False)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does: what it has begun is cleared away on the way out."""
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point of the `penstock` script."""
    signal.signal(signal.SIGTERM, _end)
    _take_any_streams()
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left (`penstock ... | head`): nothing to tell, and nobody to tell it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)
