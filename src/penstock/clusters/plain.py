"""Clusters as plain dicts, to be embedded in plan files."""

from __future__ import annotations

from typing import Any

from penstock.clusters.cluster import Cluster
from penstock.errors import InputError

__all__ = ["cluster_from_dict", "cluster_to_dict"]


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster as dicts, lists, text and numbers only, complete: nothing in it refers to the catalogue."""
    import msgspec

    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(cluster))
    return plain


def cluster_from_dict(data: Any, what: str = "cluster") -> Cluster:
    """The cluster that `cluster_to_dict` gave; `what` names its origin in errors."""
    import msgspec

    try:
        return msgspec.convert(data, Cluster)
    except msgspec.ValidationError as error:
        raise InputError(f"{what} cannot be read: {error}. Write the plan again with this version of Penstock.") from None
