"""The view of a planned batch: its micro-batches as rows by length, with padding, and the load of each replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batching.plan import BatchPlan
from penstock.models.micro_batch import MicroBatch
from penstock.reports.blocks import Block, ChartLine, Charts, Fact, Facts, Stack, Table, View

__all__ = ["batch_views", "micro_batch_blocks"]

_MOST_BARS = 200


def batch_views(batch: BatchPlan) -> list[View]:
    """Tokens and padding of each micro-batch, the lengths, and what each replica takes."""
    micro_batches = [(replica, number, one) for replica, own in enumerate(batch.replicas) for number, one in enumerate(own.micro_batches)]
    facts = Facts((
        Fact("iteration", batch.predicted_s, "time", batch.costs), Fact("micro-batches", batch.num_micro_batches, "count"),
        Fact("tokens", batch.num_tokens, "count"), Fact("padding", batch.padding_share, "share"),
        Fact("peak memory", batch.peak_bytes, "bytes"),
        Fact("bound", batch.bound_s or None, "time", "no plan of this batch takes less"), Fact("dropped", len(batch.dropped), "count"),
    ))  # fmt: skip
    load = Stack("load of each replica", tuple(f"replica {number}" for number in range(len(batch.replicas))), ("passes",), "time",
                 tuple((own.predicted_s,) for own in batch.replicas))  # fmt: skip
    return [View("batch", "Batch", [facts, load, *micro_batch_blocks(micro_batches)])]


def micro_batch_blocks(micro_batches: Sequence[tuple[int, int, MicroBatch]]) -> list[Block]:
    """Tokens and padding of micro-batches, each with its replica and number, and the lengths of their samples."""
    lengths = np.sort(np.concatenate([np.array(one.lengths, np.int64) for *_, one in micro_batches] or [np.zeros(0, np.int64)]))[::-1]
    rows = tuple(
        (replica, number, one.layout, len(one.samples), one.row_length, one.num_tokens, one.num_positions,
         1 - one.num_tokens / max(1, one.num_positions), " ".join(map(str, one.recompute)))
        for replica, number, one in micro_batches
    )  # fmt: skip
    shown = micro_batches[:_MOST_BARS]
    return [
        Stack("tokens of each micro-batch, and padding", tuple(f"{replica}.{number} {one.layout}" for replica, number, one in shown),
              ("tokens", "padding"), "count",
              tuple((float(one.num_tokens), float(one.num_positions - one.num_tokens)) for *_, one in shown),
              cuts=tuple(tuple(np.cumsum(one.lengths, dtype=float).tolist()[:-1]) for *_, one in shown)),
        Charts("lengths of samples, longest first", "sample", np.arange(len(lengths)),
               ((ChartLine("tokens", "count", lengths.astype(np.float64)),),), steps=True),
        Table("micro-batches", ("replica", "number", "layout", "samples", "row", "tokens", "positions", "padding", "recomputation"),
              ("number", "number", "text", "number", "number", "count", "count", "share", "text"), rows),
    ]  # fmt: skip
