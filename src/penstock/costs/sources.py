"""The source of costs that a text names: `roofline` or `profile:FILE`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from penstock.clusters import Cluster
from penstock.costs.profile import BesidePoint, read_profile
from penstock.costs.profiled import Profiled
from penstock.costs.roofline import Roofline
from penstock.costs.source import CostSource
from penstock.errors import InputError, ProfileMissingError, near_misses, shell_words

__all__ = ["beside_loads", "open_costs", "shipped_profiles"]

SHIPPED = Path(__file__).with_name("shipped")
_SOURCES: dict[str, tuple[str, Callable[[str, Cluster | None], CostSource]]] = {
    "roofline": ("roofline", lambda path, cluster: Roofline(cluster=cluster)),
    "profile": ("profile:FILE", lambda path, cluster: _profile(path)),
}
"""Each kind of source: how it is written, and what opens it, given what stands behind the colon."""
_FORMS = [form for form, _ in _SOURCES.values()]
_TABLES = {"aceso": "aceso:DIR", "fasop": "fasop:DIR", "dynapipe": "dynapipe:DIR/NAME"}
"""Tables of other planners. They know those planners' own models alone, and are searched by those planners' own rules."""


def open_costs(text: str = "roofline", cluster: Cluster | None = None) -> CostSource:
    """The source named by `text`; `cluster` makes devices known to the roofline that the catalogue does not have.

    >>> open_costs("profile:h200-141gb").name
    'profile:h200-141gb'
    """
    kind, colon, path = text.strip().partition(":")
    if kind in _TABLES:
        raise ProfileMissingError(
            f"costs '{text}' are the tables of another planner, which know that planner's own models alone. `penstock search` takes "
            f"{_TABLES['aceso']} and {_TABLES['fasop']}, `penstock batch` {_TABLES['dynapipe']}; here use {' or '.join(_FORMS)}."
        )
    if kind not in _SOURCES:
        close = near_misses(kind, [*_SOURCES, *_TABLES])
        raise InputError(f"costs '{text}' is not known. {close} Write one of {', '.join(_FORMS)}.")
    form, opened = _SOURCES[kind]
    if bool(colon) != (":" in form) or bool(path) != bool(colon) or "\0" in path:
        raise InputError(f"costs '{text}': expected {form}.")
    return opened(path, cluster)


def beside_loads(source: CostSource) -> list[BesidePoint]:
    """What a source has measured beside loads; most have nothing."""
    known = source.devices.values() if isinstance(source, Profiled) else ()
    return [point for device in known for point in device.profile.beside]


def shipped_profiles() -> dict[str, Path]:
    """The profiles that come with Penstock, by name."""
    return {path.name.removesuffix(".json.gz"): path for path in sorted(SHIPPED.glob("*.json.gz"))}


def _profile(path: str) -> Profiled:
    """A profile file, or where there is none of that name a shipped one."""
    shipped = shipped_profiles()
    if os.path.exists(path):  # False, too, for a name that no file could have
        return Profiled.open(path)
    if path not in shipped:
        raise ProfileMissingError(
            f"profile '{path}' does not exist. Make one with `{shell_words('penstock', 'profile', '--model', 'M', '--out', path)}`, or "
            f"use one that comes with Penstock. {near_misses(path, shipped)}"
        )
    return Profiled(read_profile(shipped[path]), path)
