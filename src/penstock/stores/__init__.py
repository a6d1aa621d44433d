"""How programs travel from planners to ranks: in memory, through the launcher of the job, or through Redis, behind one protocol."""

from __future__ import annotations

from penstock.stores.addresses import open_store
from penstock.stores.protocol import Job, Store, StoreError

__all__ = ["Job", "Store", "StoreError", "open_store"]
