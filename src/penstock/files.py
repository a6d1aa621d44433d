"""Reading and writing the files people hand to Penstock: clear errors in, atomic replacement out."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import reprlib
import stat
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import InputError, near_misses

__all__ = [
    "check_folder", "check_new_folder", "check_writable", "csv_rows", "csv_text", "decoded", "describe_validation_error", "outputs_apart",
    "parsed_json", "parsed_yaml", "read_json", "read_text", "read_yaml", "readable_bytes", "readable_file", "reserve_output", "short_repr",
    "write_bytes", "write_json", "write_text", "written_together", "yaml_text",
]  # fmt: skip


MAX_PROBLEMS = 20
"""Problems of one file that are told; nobody reads more, and a wrong file may have a million."""
MAX_TEXT_BYTES = 2**30
"""Far beyond any plan, table or list of lengths; a larger file was named by mistake, and reading it would take all memory."""


def readable_file(path: str | Path, what: str) -> Path:
    """The path, if a regular file is there; `what` names the kind of file in the error ("plan", "cluster file").

    A named pipe without a writer would be waited for forever, and a device never ends.
    """
    path = Path(path)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise InputError(f"{what} '{path}' does not exist. Check the path, or create the file first.") from None
    except (OSError, ValueError) as error:  # a name too long, a part that is no directory, a NUL in the name
        raise InputError(f"{what} '{path}' cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    outputs = _OUTPUTS.get()
    if outputs and os.path.realpath(path) in outputs:
        raise InputError(f"{what} '{path}' would be overwritten by this command, which is to write there. Choose another name to write to.")
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        raise InputError(f"{what} '{path}' is a {kinds.get(stat.S_IFMT(mode), 'device')}, a file was expected.")
    return path


def read_text(path: str | Path, what: str) -> str:
    """The UTF-8 text of a file, without the mark that spreadsheets put before it."""
    return decoded(readable_bytes(path, what, MAX_TEXT_BYTES), path, what)


def decoded(data: bytes, path: str | Path, what: str) -> str:
    """The UTF-8 text in the bytes of a file, its lines ended by \\n alone."""
    return _utf8(data, path, what).replace("\r\n", "\n").replace("\r", "\n")


def _utf8(data: bytes, path: str | Path, what: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{what} '{path}' is not UTF-8 text (byte {error.start}).") from None


def readable_bytes(path: str | Path, what: str, max_bytes: int | None = None) -> bytes:
    """All bytes of a regular file, up to a limit."""
    path = readable_file(path, what)
    try:
        if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
            raise InputError(f"{what} '{path}' has {size / 2**30:.1f} GiB; at most {max_bytes / 2**30:.0f} GiB of it would be read.")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}.") from None


def read_json(path: str | Path, what: str) -> Any:
    """The JSON value in a file; names given twice are refused. NaN is let through, so that whoever checks the value can name its field."""
    return parsed_json(read_text(path, what), path, what)


def parsed_json(text: str, path: str | Path, what: str) -> Any:
    """The JSON value of a text that was read from `path`."""
    try:
        value = json.loads(text, object_pairs_hook=_once_each)
        if _SURROGATE.search(text):  # of a pair, usually, which is a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        raise InputError(f"{what} '{path}' is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except RecursionError:
        raise InputError(f"{what} '{path}' is not valid JSON: its lists are nested too deep to be read.") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InputError(f"{what} '{path}' is not valid JSON: {half!a} is half of a character, which no text can hold.") from None
    except ValueError as error:
        raise InputError(f"{what} '{path}' is not valid JSON: {error}.") from None


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs; of two values under one name, a reader would silently lose the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {short_repr(name)} is given twice in one object")
    return found


def read_yaml(path: str | Path, what: str) -> Any:
    """The YAML value in a file; see `parsed_yaml`."""
    return parsed_yaml(read_text(path, what), path, what)


def parsed_yaml(text: str, path: str | Path, what: str) -> Any:
    """The YAML value of a text that was read from `path`, by the core schema of YAML 1.2; keys given twice are refused."""
    import yaml

    try:
        return yaml.load(text, _yaml_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise InputError(f"{what} '{path}' is not valid YAML:{where} {problem}.") from None
    except RecursionError:
        raise InputError(f"{what} '{path}' is not valid YAML: its lists are nested too deep to be read.") from None
    except (LookupError, AttributeError):  # !!bool maybe, !!timestamp soon
        raise InputError(f"{what} '{path}' is not valid YAML: a value is not of the type that its tag names.") from None
    except (ValueError, TypeError) as error:
        raise InputError(f"{what} '{path}' is not valid YAML: {error}.") from None


def yaml_text(value: Any) -> str:
    """A value as one line of YAML that means the same to `parsed_yaml` and to readers of YAML 1.1."""
    import yaml

    return str(yaml.dump(value, Dumper=_yaml_dumper(), default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False))


# YAML 1.1, which PyYAML reads, takes `off` and `no` for booleans, 1:30 for ninety, 0777 for octal and 1e-5 for text.
_YAML_WORDS = {
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
    "null": r"~|null|Null|NULL|",
    "merge": "<<",
}


@cache
def _yaml_loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, which YAML forbids and PyYAML does not notice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[Any] = set()
            for key_node, _ in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":
                    continue
                key = self.construct_object(key_node, deep=True)
                if key in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {short_repr(key)} is given twice", key_node.start_mark)
                seen.add(key)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {}
    _resolve_core(Loader)
    Loader.add_constructor("tag:yaml.org,2002:int", _yaml_int)
    return Loader


@cache
def _yaml_dumper() -> Any:
    """Puts in quotes what either version would not read as text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    _resolve_core(Dumper)
    return Dumper


def _resolve_core(kind: Any) -> None:
    for word, pattern in _YAML_WORDS.items():
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{word}", re.compile(rf"(?:{pattern})\Z"), None)


def _yaml_int(loader: Any, node: Any) -> int:
    """Decimal unless it says otherwise: 0777 is 777."""
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


def csv_rows(path: str | Path, what: str, delimiter: str = ",") -> Iterator[list[str]]:
    """The rows of a CSV file, blank lines as empty ones; a cell may hold any text, line ends too, of any length."""
    csv.field_size_limit(MAX_TEXT_BYTES)  # 128 KiB otherwise
    text = _utf8(readable_bytes(path, what, MAX_TEXT_BYTES), path, what)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        yield from reader
    except csv.Error as error:
        raise InputError(f"{what} '{path}', line {reader.line_num}: not valid CSV: {error}.") from None


def write_text(path: str | Path, text: str) -> None:
    """Replaces `path` with UTF-8 text in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replaces `path` in one step: readers see the old file or the new, never half of it."""
    path = Path(path)
    _check_no_directory(path)
    if _is_special(path):  # /dev/stdout, a named pipe: nothing to replace
        _write_through(path, data)
        return
    if path.is_symlink():  # the link stays, what it leads to is replaced
        path = Path(os.path.realpath(path))
    _home(path)
    with written_together() as group:
        group.add(path, data)


@contextmanager
def written_together() -> Iterator[_Group]:
    """Files that are written inside appear when it ends, all of them; if anything fails before, none does, nor a folder made for one."""
    outer = _GROUP.get()
    if outer is not None:
        yield outer
        return
    group = _Group()
    token = _GROUP.set(group)
    try:
        yield group
        group.appear()
    except BaseException:
        group.vanish()
        raise
    finally:
        _GROUP.reset(token)


class _Group:
    """Files under other names beside those that they are to have, so that nothing but renaming them is left to do."""

    def __init__(self) -> None:
        self._files: list[tuple[str, Path]] = []
        self._folders: list[Path] = []

    def add(self, path: Path, data: bytes) -> None:
        try:
            self._folders += [parent for parent in (path.parent, *path.absolute().parents) if not os.path.exists(parent)]
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
            self._files.append((temporary, path))
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, _mode(path))
        except OSError as error:
            raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None

    def appear(self) -> None:
        while self._files:
            temporary, path = self._files[0]
            try:
                os.replace(temporary, path)
            except OSError as error:
                raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
            del self._files[0]

    def vanish(self) -> None:
        for temporary, _ in self._files:
            with suppress(OSError):
                os.unlink(temporary)
        for folder in self._folders:  # the innermost of each file first
            with suppress(OSError):  # somebody else has put something there meanwhile
                os.rmdir(folder)


def _mode(path: Path) -> int:
    """Who may do what with a file that is to be at `path`: as with the one that is there, or as with any new file."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode) & 0o777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


_GROUP: ContextVar[_Group | None] = ContextVar("files that are written together", default=None)


def check_writable(path: str | Path) -> None:
    """Refuses a name that no file can be written under, before the work whose result it is to hold: an existing directory, a place inside
    of something that is none, a name that is empty or too long, a folder that takes no files."""
    path = Path(path)
    _check_no_directory(path)
    if not _is_special(path):  # /dev/stdout, a named pipe: written through, not replaced
        _check_takes_files(_home(Path(os.path.realpath(path)) if path.is_symlink() else path), path)


def reserve_output(path: str | Path) -> None:
    """Takes a name for one output: inside `outputs_apart`, another that has it is refused, and nobody reads the file."""
    outputs, place = _OUTPUTS.get(), os.path.realpath(path)
    if outputs is None or _is_special(Path(path)):  # of a terminal or a pipe nothing is lost
        return
    if place in outputs:
        raise InputError(f"'{path}' is where this command writes something else. Choose another name.")
    outputs.add(place)


@contextmanager
def outputs_apart() -> Iterator[None]:
    """While entered, a file that `reserve_output` has named is neither read as an input nor written as another output."""
    token = _OUTPUTS.set(set())
    try:
        yield
    finally:
        _OUTPUTS.reset(token)


_OUTPUTS: ContextVar[set[str] | None] = ContextVar("files that a command is to write", default=None)


def check_folder(path: str | Path) -> None:
    """Refuses a name that is no folder and cannot become one, or one that takes no files."""
    path = Path(path)
    if _is_directory(path):
        _check_takes_files(path, path)
    elif os.path.lexists(path):
        raise InputError(f"'{path}' cannot be written: it is not a directory.")
    else:
        _check_takes_files(_home(path), path)


def check_new_folder(path: str | Path) -> None:
    """Refuses a name that no new folder can have, or one that is not empty."""
    check_folder(path)
    if os.path.exists(path) and os.listdir(path):
        raise InputError(f"'{path}' exists and is not an empty folder. Remove it, or choose another.")


def _check_no_directory(path: Path) -> None:
    if not path.name or _is_directory(path):
        raise InputError(f"'{path}' cannot be written: it is a directory, the name of a file was expected.")


def _is_directory(path: Path) -> bool:
    """Whether there is a directory; a name that cannot be looked up is told."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        return False  # told with the part that is none
    except (OSError, ValueError) as error:  # a name too long, a NUL in the name, links in a circle
        raise InputError(f"'{path}' cannot be written: {getattr(error, 'strerror', None) or error}.") from None


def _home(path: Path) -> Path:
    """The nearest directory above a place that there is; anything else is refused."""
    home = next(parent for parent in path.absolute().parents if os.path.exists(parent))
    if not os.path.isdir(home):
        raise InputError(f"'{path}' cannot be written: '{home}' is not a directory.")
    return home


def _check_takes_files(home: Path, path: Path) -> None:
    """Makes a nameless file in `home`: rights, mounts and quotas say no in more ways than can be asked for."""
    try:
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: '{home}' takes no files ({error.strerror}).") from None


def _is_special(path: Path) -> bool:
    """Whether the path is a device, a pipe or a socket."""
    return os.path.exists(path) and not os.path.isfile(path)


def _write_through(path: Path, data: bytes) -> None:
    try:
        with open(path, "wb") as stream:
            stream.write(data)
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None


def write_json(path: str | Path, value: Any) -> None:
    """Writes `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV, in which no text begins what a spreadsheet would take for a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(map(_no_formula, columns))
    writer.writerows([_no_formula(value) for value in row] for row in rows)
    return text.getvalue()


def _no_formula(value: Any) -> Any:
    """An apostrophe before what begins a formula; numbers stay numbers, the negative ones too."""
    return f"'{value}" if isinstance(value, str) and value.lstrip()[:1] in ("=", "+", "-", "@") else value


def short_repr(value: object) -> str:
    """A value as text, however large or nested it is."""
    return textwrap.shorten(reprlib.repr(value), 120, placeholder=" …")


def describe_validation_error(error: Any, what: str, fields: Mapping[str, Iterable[str]] | None = None) -> str:
    """One line per problem that pydantic found: the field, the value given, what was expected.

    `fields` has the known fields of each owner ("" is the top), from which the nearest to an unknown one are named.
    """
    lines, problems = [], error.errors()
    for problem in problems[:MAX_PROBLEMS]:
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        given = "" if problem["type"] == "missing" else f" (got {short_repr(problem.get('input'))})"
        lines.append(f"  {field}: {_explained(problem, fields or {})}{given}")
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  … and {len(problems) - MAX_PROBLEMS:,} more problems")
    return f"{what} is not valid:\n" + "\n".join(lines)


def _explained(problem: Any, fields: Mapping[str, Iterable[str]]) -> str:
    """pydantic's own words, or for an unknown field the nearest known ones."""
    *parents, field = problem["loc"] or ("",)
    owner = next((str(part) for part in reversed(parents) if isinstance(part, str)), "")
    if problem["type"] != "extra_forbidden" or owner not in fields:
        return str(problem["msg"])
    return f"this field does not exist. {near_misses(str(field), fields[owner])}"
