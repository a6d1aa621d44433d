"""Prepared data sets and the global batches drawn from them: lengths without reading tokens, the same order whatever the world size."""

from __future__ import annotations

from penstock.data.batches import GlobalBatch, GlobalBatches
from penstock.data.dataset import DataSet, open_data
from penstock.data.indexed import IndexedTokens, IndexedWriter
from penstock.data.limits import Limits

__all__ = ["DataSet", "GlobalBatch", "GlobalBatches", "IndexedTokens", "IndexedWriter", "Limits", "open_data"]
