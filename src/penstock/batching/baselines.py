"""How batches are usually cut: fixed micro-batches padded to the longest sample, rows packed to a fixed length, a budget of tokens.

Each gives micro-batches in the order of the batch; `run_baseline` deals them to the replicas in turn and runs 1F1B with the one
recomputation mode that is fastest of those that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from msgspec.structs import replace

from penstock.batching.chunks import usual_order
from penstock.batching.costs import PipelineCosts
from penstock.batching.fitting import TooLong, fit_samples, positions
from penstock.batching.ordering import Ints, by_length
from penstock.batching.plan import BatchPlan, ReplicaBatch, SampleLengths
from penstock.batching.workloads import batch_workload, is_priced
from penstock.errors import InfeasibleError, InputError, plural
from penstock.models.micro_batch import MicroBatch
from penstock.timing.execution import execute

__all__ = [
    "Attention", "Order", "baseline_rows", "best_fixed", "fixed_batches", "packed_rows", "run_baseline", "token_budget", "usual_ways",
]  # fmt: skip

Attention = Literal["across", "inside"]
Order = Callable[[Ints, Ints], Ints]
"""From lengths, and those of decoders, to the order of samples."""
_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a micro-batch that are tried."""
_FIXED = "{} rows padded to the longest sample"


def fixed_batches(samples: Sequence[SampleLengths], costs: PipelineCosts, rows: int) -> list[MicroBatch]:
    """`rows` samples at a time, every row as long as the longest sample of the batch."""
    enc, dec = positions(samples, costs)
    lengths = _padded(int(enc.max()), costs), _padded(int(dec.max()), costs)
    return [_padded_batch(samples, costs, list(range(at, min(at + rows, len(samples)))), lengths) for at in range(0, len(samples), rows)]


def token_budget(samples: Sequence[SampleLengths], costs: PipelineCosts, max_tokens: int, order: Order = by_length) -> list[MicroBatch]:
    """Neighbours in an order, by length unless given, together as long as the padded micro-batch has at most `max_tokens` positions."""
    enc, dec = positions(samples, costs)
    groups: list[list[int]] = []
    for i in order(enc, dec).tolist():
        grown = [*groups[-1], i] if groups else [i]
        row = _padded(int(enc[grown].max()), costs) + _padded(int(dec[grown].max()), costs)
        if groups and len(grown) * row <= max_tokens:
            groups[-1] = grown
        else:
            groups.append([i])
    return [
        _padded_batch(samples, costs, group, (_padded(int(enc[group].max()), costs), _padded(int(dec[group].max()), costs)))
        for group in groups
    ]


def packed_rows(
    samples: Sequence[SampleLengths],
    costs: PipelineCosts,
    rows: int,
    row_length: int = 0,
    attention: Attention = "inside",
    separator: int = 0,
) -> list[MicroBatch]:
    """Samples packed into rows of one length (the longest sample's; `row_length` on both sides if that is more), longest first into the
    first row that has room, with `separator` tokens between neighbours; `rows` rows make a micro-batch. Attention `across` the samples of
    a row pays for the whole row, `inside` for each sample."""
    enc, dec = positions(samples, costs)
    room = max(row_length, _padded(int(enc.max()), costs)), max(row_length * costs.has_decoder, _padded(int(dec.max()), costs))
    if attention == "inside" and "packed" not in costs.layouts:
        raise InputError("attention inside samples needs the packed layout, which these costs do not hold. Use attention across samples.")
    # Neighbours with a separator are one text: of a row, not of each sample, the last token has no next one to predict.
    between = (separator - costs.length_offset, separator * costs.has_decoder) if separator else (0, 0)
    packed = _first_fit(enc + between[0], dec + between[1], (room[0] + between[0], room[1] + between[1]))
    batches = []
    for at in range(0, len(packed), rows):
        group = packed[at : at + rows]
        members = [i for row in group for i in row]
        if attention == "across":
            whole = _padded_batch(samples, costs, members, room)
            batches.append(replace(whole, row_sizes=tuple(map(len, group))))
        else:
            batches.append(MicroBatch(0, tuple(samples[i].id for i in members), "packed", tuple(enc[members].tolist())))
    return batches


def _first_fit(enc: np.ndarray, dec: np.ndarray, room: tuple[int, int]) -> list[list[int]]:
    """Rows of samples; only the last few dozen open rows are looked at, since earlier ones are nearly full."""
    rows: list[list[int]] = []
    left: list[list[int]] = []
    for i in by_length(enc, dec).tolist():
        for at in range(max(0, len(rows) - 256), len(rows)):
            if left[at][0] >= enc[i] and left[at][1] >= dec[i]:
                break
        else:
            at = len(rows)
            rows.append([])
            left.append(list(room))
        rows[at].append(i)
        left[at][0] -= int(enc[i])
        left[at][1] -= int(dec[i])
    return rows


def _padded(length: int, costs: PipelineCosts) -> int:
    return -(-length // costs.round_to) * costs.round_to


def _padded_batch(samples: Sequence[SampleLengths], costs: PipelineCosts, members: list[int], lengths: tuple[int, int]) -> MicroBatch:
    chosen = [samples[i] for i in members]
    enc, dec = positions(chosen, costs)
    return MicroBatch(
        0, tuple(sample.id for sample in chosen), "padded", tuple(enc.tolist()), tuple(dec.tolist()) if costs.has_decoder else (),
        *lengths,
    )  # fmt: skip


def usual_ways(samples: Sequence[SampleLengths], costs: PipelineCosts, too_long: TooLong = "refuse") -> dict[str, BatchPlan]:
    """By name the plan of each usual way to cut a batch, at the size of micro-batches that suits it best; ways that fit at no size are left
    out. Sizes are 1 to 64 rows, and budgets as large; `method` of a plan says which.
    """
    kept = fit_samples(samples, costs, too_long).samples
    enc, dec = positions(kept, costs)
    longest = _padded(int(enc.max()), costs) + _padded(int(dec.max()), costs)
    ways: dict[str, tuple[str, Callable[[int], list[MicroBatch]]]] = {}
    if "padded" in costs.layouts:
        ways["uniform"] = _FIXED, lambda rows: fixed_batches(kept, costs, rows)
        ways["budget"] = "similar lengths, up to {} padded rows' tokens", lambda rows: token_budget(kept, costs, rows * longest)
        ways["across"] = "{} packed rows, attention across samples", lambda rows: packed_rows(kept, costs, rows, attention="across")
    if "packed" in costs.layouts:
        ways["packed"] = "{} packed rows, attention inside samples", lambda rows: packed_rows(kept, costs, rows)
    found = {way: _best_size(name, cut, costs) for way, (name, cut) in ways.items()}
    return {way: plan for way, plan in found.items() if plan is not None}


def baseline_rows(samples: Sequence[SampleLengths], costs: PipelineCosts, too_long: TooLong = "refuse") -> list[BatchPlan]:
    """The plans of `usual_ways`."""
    return list(usual_ways(samples, costs, too_long).values())


def best_fixed(samples: Sequence[SampleLengths], costs: PipelineCosts) -> BatchPlan | None:
    """Fixed micro-batches padded to the longest sample, at the size that suits best; None if they fit at no size."""
    return _best_size(_FIXED, lambda rows: fixed_batches(samples, costs, rows), costs)


def _best_size(name: str, cut: Callable[[int], list[MicroBatch]], costs: PipelineCosts) -> BatchPlan | None:
    best: BatchPlan | None = None
    for rows in _SIZES:
        try:
            plan = run_baseline(cut(rows), costs, name.format(rows))
        except InfeasibleError:  # nor do larger ones fit
            break
        if best is None or plan.predicted_s < best.predicted_s:
            best = plan
    return best


def run_baseline(batches: Sequence[MicroBatch], costs: PipelineCosts, method: str) -> BatchPlan:
    """The baseline's plan in the fastest mode that fits everywhere, if the plan allows micro-batches of these sizes."""
    if any(len(batch.samples) > costs.max_samples or batch.num_positions > costs.max_tokens for batch in batches):
        raise InfeasibleError(f"{method}: the plan allows no such micro-batches. Make them smaller.")
    plans = [plan for mode in range(len(costs.modes)) if (plan := _run(batches, costs, mode, method)) is not None]
    if not plans:
        raise InfeasibleError(f"{method}: no recomputation mode has room for {plural(len(batches), 'micro-batch')}. Make them smaller.")
    return min(plans, key=lambda plan: plan.predicted_s)


def _run(batches: Sequence[MicroBatch], costs: PipelineCosts, mode: int, method: str) -> BatchPlan | None:
    """All micro-batches in one mode, dealt in turn; None if they do not fit."""
    done, parts = [], costs.num_stages * costs.num_chunks
    for replica in range(costs.num_replicas):
        dealt = enumerate(batches[replica :: costs.num_replicas])
        own = tuple(replace(batch, index=index, recompute=(mode,) * parts) for index, batch in dealt)
        schedule = usual_order(costs, len(own))
        if not own:
            done.append(ReplicaBatch((), schedule, 0.0, tuple(costs.state_bytes[replica].tolist())))
            continue
        if not is_priced(costs, own, replica):
            return None
        found = execute(schedule, batch_workload(costs, own, replica))
        if found.violation is not None:
            return None
        done.append(ReplicaBatch(own, schedule, found.pipeline_s, tuple(found.peak_bytes.tolist())))
    limits = tuple(tuple(map(float, row)) for row in costs.limit_bytes)
    slowest = max(replica.predicted_s for replica in done)
    return BatchPlan(tuple(done), slowest + costs.fixed_s, 0.0, limits, costs.name, method=method)
