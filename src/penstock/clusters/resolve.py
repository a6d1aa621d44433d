"""One entry for every way to name a cluster."""

from __future__ import annotations

from pathlib import Path

from penstock.clusters.cluster import Cluster
from penstock.clusters.cluster_file import read_cluster
from penstock.clusters.shorthand import parse_shorthand
from penstock.errors import InputError

__all__ = ["resolve_cluster"]


def resolve_cluster(text: str) -> Cluster:
    """The cluster of a file path, of 'local' (this machine), or of a shorthand such as '2xp4d.24xlarge+6xg5.24xlarge'."""
    name = text.strip()
    if not name or "\0" in name:
        raise InputError(f"cluster {text!r}: give a cluster file, 'local', or a shorthand such as '4xa100-40gb'.")
    if name.lower() == "local":
        from penstock.clusters.local import detect_local

        return detect_local()
    if "/" in name or name.lower().endswith((".yaml", ".yml")) or _is_file(name):
        return read_cluster(name)
    return parse_shorthand(name)


def _is_file(name: str) -> bool:
    """Whether the name is that of a file here; one too long for the file system is not."""
    try:
        return Path(name).is_file()
    except OSError:
        return False
