"""Whether a stage's passes are played from recordings on a GPU (`runtime.parallel.recordings`), so that none waits for its host.

A recording serves one shape, so that shapes have to come again. Where a stage is the whole model nobody else must agree on sizes, and small
micro-batches are made a little larger, to one of a few sizes: rows are padded on, and filler is laid behind packed samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec

from penstock.models.micro_batch import MicroBatch
from penstock.models.ops import Model, PlacedOp
from penstock.models.shapes import NOTHING, Quantity, Shape
from penstock.models.transformer import RAGGED_WIDTHS
from penstock.plans.plan import Plan, Stage
from penstock.schedules.rules import SCHEDULES

__all__ = ["LEAST_STEP", "PACKED_BITS", "SAMPLE_BITS", "FewShapes", "can_be_recorded", "is_recorded", "recorded_length"]

_ROW_BITS, PACKED_BITS, SAMPLE_BITS = 3, 4, 1
"""Rows have 2³ lengths between a power of two and the next, or so many pairs of lengths where there is a decoder; packed micro-batches,
which nothing but their number of tokens tells apart, have twice as many. Where there is a head on each sample, there are few numbers of
samples besides."""
LEAST_STEP = 8
_BUSY_FLOPS = 5e10
"""Arithmetic of an average op's forward pass from which on a GPU takes longer for it than its host to issue it, which took up to 120 µs for
both passes of an op, and up to 250 µs where it was recomputed."""


def can_be_recorded(plan: Plan, stage: Stage, model: Model) -> bool:
    """Whether passes of micro-batches of one shape are the same work every time, on one rank and from weights that stay in place.

    Nothing may be drawn at random, and the module must be one of ours: what others do beside their kernels is not known.
    """
    rules = SCHEDULES[plan.schedule]
    if rules.asynchronous or rules.splits_backward or stage.runs or stage.zero > 1 or stage.degrees.tp > 1:
        return False
    return not any(op.config.get("dropout") or op.kind == "traced" for op in model.distinct_ops)


def is_recorded(plan: Plan, stage: Stage, model: Model, *, ragged: bool) -> bool:
    """Whether training records the passes of a stage, since few shapes come again and again: fixed numbers of padded rows, or packed
    samples where nothing but their tokens tells one micro-batch from another.

    `ragged`: samples differ in length. Stages of a pipeline then see too many shapes.
    """
    if plan.micro_batching.layout == "packed":
        return plan.num_stages == 1 and _sees_only_tokens(model) and can_be_recorded(plan, stage, model)
    if plan.micro_batching.policy != "fixed" or (ragged and plan.num_stages > 1):
        return False
    return can_be_recorded(plan, stage, model)


def _sees_only_tokens(model: Model) -> bool:
    """Whether kernels for packed samples depend on how many tokens there are, and not on their lengths: those of our own attention, which
    are made for half precision. Heads on each sample have few numbers of them."""
    attention = [op.config for op in model.distinct_ops if op.kind == "attention"]
    own = all(c["fused"] and not c["bias_source"] and not c["cross_source"] and c["head_width"] in RAGGED_WIDTHS for c in attention)
    return bool(attention) and own and model.dtype in ("bf16", "fp16")


@dataclass(frozen=True)
class FewShapes:
    """The sizes that micro-batches of a stage are brought to where it is recorded: small ones alone, which wait for their host."""

    flops: Quantity
    """Of the forward passes of all ops together."""
    num_ops: int
    recomputed: float = 0.0
    """The largest share of the ops that a pattern of the stage recomputes."""
    dp: int = 1
    """Ranks that share each micro-batch."""
    row_lengths: tuple[int, int] = (0, 0)
    """The plan's own, of both sides: where all rows are alike, none is padded further."""

    @classmethod
    def of(cls, places: Sequence[PlacedOp], plan: Plan, stage: Stage) -> FewShapes:
        """For the ops of a stage."""
        recomputed = max(len(stage.recomputed(pattern)) for pattern in range(max(1, len(stage.recompute)))) / len(places)
        flops = sum((place.op.flops for place in places), NOTHING)
        return cls(flops, len(places), recomputed, stage.degrees.dp, (plan.seq_length, plan.dec_length))

    def keeps_busy(self, shape: Shape) -> bool:
        """Whether a GPU that shares a micro-batch of this shape takes longer for its part than the host to issue it."""
        return self.flops.at(shape) >= self._busy_flops

    def brought(self, micro: MicroBatch, index: int = 0) -> MicroBatch:
        """The micro-batch with what rank `index` has of it at a size that comes again; `row_length` of a packed one is then the number of
        its tokens with the filler behind them."""
        if not micro.lengths or micro.row_sizes or self.keeps_busy(micro.shape()):
            return micro
        if micro.layout == "packed":
            return msgspec.structs.replace(micro, row_length=recorded_length(micro.shape(self.dp, index).tokens, PACKED_BITS))
        rows, dec_rows = self._rows(micro.row_length, micro.dec_row_length)
        return msgspec.structs.replace(micro, row_length=rows, dec_row_length=dec_rows)

    def num_tokens(self, shape: Shape) -> int:
        """Tokens of a packed micro-batch with filler, on all ranks that share it, as if they had equal parts."""
        return shape.tokens if self.keeps_busy(shape) else self.dp * recorded_length(ceil(shape.tokens / self.dp), PACKED_BITS)

    @property
    def packed(self) -> tuple[float, float, float, float]:
        """`num_tokens` for kernels: arithmetic for each token, and for each key that one sees; from how much on none is filled up; dp."""
        terms = self.flops.form().terms()
        return terms.get("tokens", 0.0), terms.get("squares", 0.0), self._busy_flops, float(self.dp)

    @property
    def _busy_flops(self) -> float:
        return _BUSY_FLOPS * (1 + self.recomputed) * self.num_ops * self.dp

    def _rows(self, rows: int, dec_rows: int) -> tuple[int, int]:
        """Never beyond the plan's own lengths, and never cut."""
        bits = _ROW_BITS - bool(dec_rows)

        def padded(length: int, usual: int) -> int:
            return max(length, min(recorded_length(length, bits), usual)) if length else 0

        return padded(rows, self.row_lengths[0]), padded(dec_rows, self.row_lengths[1])


def recorded_length(length: int, bits: int) -> int:
    """The next of 2^bits lengths between a power of two and the next: 4 % more on average with three bits, 2 % with four."""
    step = max(LEAST_STEP, 1 << max(0, length.bit_length() - 1 - bits))
    return -(-length // step) * step
