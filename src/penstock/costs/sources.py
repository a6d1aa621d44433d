"""The source of costs that a text names: `roofline`, `profile:FILE`, `aceso:DIR`, `fasop:DIR`, `dynapipe:DIR/NAME`."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.clusters import Cluster, Link, with_measured_links
from penstock.costs.measured_links import links_of
from penstock.costs.profile import read_profile
from penstock.costs.profiled import Profiled
from penstock.costs.roofline import Roofline
from penstock.costs.source import CostSource
from penstock.errors import InputError, near_misses

__all__ = ["IMPORTED", "is_imported", "open_costs", "shipped_profiles", "with_links_of"]

SHIPPED = Path(__file__).with_name("shipped")
IMPORTED = ("aceso", "fasop", "dynapipe")
"""Sources that hold other planners' tables."""
_FORMS = {"roofline": "roofline", "profile": "profile:FILE", "aceso": "aceso:DIR", "fasop": "fasop:DIR", "dynapipe": "dynapipe:DIR/NAME"}


def open_costs(text: str = "roofline", cluster: Cluster | None = None) -> CostSource:
    """The source named by `text`; `cluster` makes devices known to the roofline that the catalogue does not have.

    >>> open_costs("profile:h200-141gb").name
    'profile:h200-141gb'
    """
    kind, colon, path = text.strip().partition(":")
    if kind not in _FORMS or (kind == "roofline" and colon):
        close = near_misses(kind, _FORMS)
        raise InputError(f"costs '{text}' is not known. {close} Write one of {', '.join(_FORMS.values())}.")
    if kind == "roofline":
        return Roofline(cluster=cluster)
    if not path or "\0" in path:
        raise InputError(f"costs '{text}': expected {_FORMS[kind]}.")
    if kind == "profile":
        return _profile(path)
    from penstock.interop import open_tables

    return open_tables(text.strip())


def shipped_profiles() -> dict[str, Path]:
    """The profiles that come with Penstock, by name."""
    return {path.name.removesuffix(".json.gz"): path for path in sorted(SHIPPED.glob("*.json.gz"))}


def _profile(path: str) -> Profiled:
    """A profile file, or where there is none of that name a shipped one."""
    shipped = shipped_profiles()
    if os.path.exists(path):  # False, too, for a name that no file could have
        return Profiled.open(path)
    if path not in shipped:
        raise InputError(
            f"profile '{path}' does not exist. Make one with `penstock profile --model M --out {path}`, or use one that comes "
            f"with Penstock. {near_misses(path, shipped)}"
        )
    return Profiled(read_profile(shipped[path]), path)


def is_imported(source: CostSource) -> bool:
    """Whether the source holds another planner's tables, which know that planner's models only."""
    return source.name.partition(":")[0] in IMPORTED


def with_links_of(source: CostSource, cluster: Cluster) -> Cluster:
    """The cluster with the links that a profile measured; as it is where none were."""
    if not isinstance(source, Profiled):
        return cluster
    links: dict[str, Link] = {}
    for name, device in source.devices.items():
        links |= links_of(device.profile, name)
    return with_measured_links(cluster, links) if links else cluster
