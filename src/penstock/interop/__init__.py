"""Readers of other planners' cost tables: Aceso, FASOP, DynaPipe."""

from __future__ import annotations

from collections.abc import Callable

from penstock.errors import InputError, near_misses
from penstock.systems.aceso.tables import AcesoTables
from penstock.systems.dynapipe.tables import DynaPipeTables
from penstock.systems.fasop.tables import FasopTables

__all__ = ["AcesoTables", "DynaPipeTables", "FasopTables", "open_tables"]

_READERS: dict[str, Callable[[str], AcesoTables | FasopTables | DynaPipeTables]] = {
    "aceso": AcesoTables.open,
    "fasop": FasopTables.open,
    "dynapipe": DynaPipeTables.open,
}


def open_tables(text: str) -> AcesoTables | FasopTables | DynaPipeTables:
    """The source that `aceso:DIR`, `fasop:DIR` or `dynapipe:DIR/NAME` names."""
    kind, colon, path = text.partition(":")
    if kind not in _READERS:
        raise InputError(f"costs '{text}': no reader of '{kind}' tables. {near_misses(kind, _READERS)}")
    if not colon or not path:
        raise InputError(f"costs '{text}': expected '{kind}:' and the {'path DIR/NAME of a table' if kind == 'dynapipe' else 'folder'}.")
    return _READERS[kind](path)
