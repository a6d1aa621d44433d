"""JSON as people write it: read strictly, with errors that say where."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files.explaining import short_repr
from penstock.files.reading import read_text

__all__ = ["parsed_json", "read_json"]


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
