"""Reading and writing the files people hand to Penstock: clear errors in, atomic replacement out."""

from __future__ import annotations

import json
import os
import reprlib
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from penstock.errors import InputError, near_misses

__all__ = ["describe_validation_error", "read_json", "read_text", "read_yaml", "short_repr", "write_bytes", "write_json", "write_text"]


def read_text(path: str | Path, what: str) -> str:
    """The text of `path`; `what` names the kind of file in the error ("plan", "cluster file")."""
    path = Path(path)
    try:
        if path.is_char_device():  # /dev/zero never ends
            raise InputError(f"{what} '{path}' is a device, a file was expected.")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{what} '{path}' does not exist. Check the path, or create the file first.") from None
    except IsADirectoryError:
        raise InputError(f"{what} '{path}' is a directory, a file was expected.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{what} '{path}' is not UTF-8 text (byte {error.start}).") from None
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}.") from None


def read_json(path: str | Path, what: str) -> Any:
    """The JSON value in `path`."""
    text = read_text(path, what)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{what} '{path}' is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}.") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{what} '{path}' is not valid JSON: {error}.") from None


def read_yaml(path: str | Path, what: str) -> Any:
    """The YAML value in `path`, read with the safe loader."""
    import yaml

    text = read_text(path, what)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise InputError(f"{what} '{path}' is not valid YAML:{where} {problem}.") from None
    except (RecursionError, ValueError) as error:
        raise InputError(f"{what} '{path}' is not valid YAML: {error}.") from None


def write_text(path: str | Path, text: str) -> None:
    """Replaces `path` with UTF-8 text in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replaces `path` in one step: readers see the old file or the new, never half of it."""
    path = Path(path)
    _check_target(path)
    if _is_special(path):  # /dev/stdout, a named pipe: nothing to replace
        _write_through(path, data)
        return
    if path.is_symlink():  # the link stays, what it leads to is replaced
        path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise InputError(f"'{path}' cannot be written: {error.strerror}.") from None
    except BaseException:
        os.unlink(temporary)
        raise


def _check_target(path: Path) -> None:
    """Refuses a target that is a directory, or that lies inside of something that is none."""
    if os.path.isdir(path):
        raise InputError(f"'{path}' cannot be written: it is a directory, the name of a file was expected.")
    for parent in path.parents:
        if os.path.exists(parent):
            if not os.path.isdir(parent):
                raise InputError(f"'{path}' cannot be written: '{parent}' is not a directory.")
            return


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


def short_repr(value: object) -> str:
    """A value as text, however large or nested it is."""
    return textwrap.shorten(reprlib.repr(value), 120, placeholder=" …")


def describe_validation_error(error: Any, what: str, fields: Mapping[str, Iterable[str]] | None = None) -> str:
    """One line per problem that pydantic found: the field, the value given, what was expected.

    `fields` has the known fields of each owner ("" is the top), from which the nearest to an unknown one are named.
    """
    lines = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"]) or "(top level)"
        given = "" if problem["type"] == "missing" else f" (got {short_repr(problem.get('input'))})"
        lines.append(f"  {field}: {_explained(problem, fields or {})}{given}")
    return f"{what} is not valid:\n" + "\n".join(lines)


def _explained(problem: Any, fields: Mapping[str, Iterable[str]]) -> str:
    """pydantic's own words, or for an unknown field the nearest known ones."""
    *parents, field = problem["loc"] or ("",)
    owner = next((str(part) for part in reversed(parents) if isinstance(part, str)), "")
    if problem["type"] != "extra_forbidden" or owner not in fields:
        return str(problem["msg"])
    return f"this field does not exist. {near_misses(str(field), fields[owner])}"
