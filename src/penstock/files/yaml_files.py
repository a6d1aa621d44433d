"""YAML by the core schema of version 1.2, in which `off` and `no` are words: PyYAML by itself reads version 1.1."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.files.explaining import short_repr
from penstock.files.reading import read_text

__all__ = ["parsed_yaml", "read_yaml", "yaml_text"]


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
