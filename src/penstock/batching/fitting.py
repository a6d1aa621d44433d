"""Samples that fit no device even alone: refused, dropped, or cut to the length that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from penstock.batching.costs import PipelineCosts
from penstock.batching.ordering import Ints
from penstock.batching.plan import SampleLengths
from penstock.batching.search import new_state
from penstock.errors import InfeasibleError, InputError, first_of, plural

__all__ = ["Fitted", "TooLong", "fit_samples", "positions"]

TooLong = Literal["refuse", "drop", "truncate"]
_SHOWN = 5


@dataclass(frozen=True)
class Fitted:
    """The samples that can be trained on, and those that were too long for any device: left out, or cut off."""

    samples: tuple[SampleLengths, ...]
    dropped: tuple[SampleLengths, ...] = ()
    truncated: tuple[SampleLengths, ...] = ()
    """As they were."""


def positions(samples: Sequence[SampleLengths], costs: PipelineCosts) -> tuple[Ints, Ints]:
    """Token positions that each sample takes on both sides."""
    enc = np.array([sample.length for sample in samples], dtype=np.int64) + costs.length_offset
    dec = np.array([sample.dec_length for sample in samples], dtype=np.int64)
    return np.maximum(enc, 1), dec + costs.dec_offset if costs.has_decoder else np.zeros_like(dec)


def fit_samples(samples: Sequence[SampleLengths], costs: PipelineCosts, too_long: TooLong = "refuse") -> Fitted:
    """Checks ids and lengths, prices every sample alone, and does as `too_long` says with those that fit nowhere."""
    _check(samples, costs)
    enc, dec = positions(samples, costs)
    fits = _fits(costs, enc, dec)
    bad = [sample for sample, fine in zip(samples, fits, strict=True) if not fine]
    if not bad:
        return Fitted(tuple(samples))
    if too_long == "refuse":
        most = f" The model takes {plural(costs.max_length, 'position')}." if max(enc) > costs.max_length else ""
        small = max(enc + dec) > costs.max_tokens
        where = f"the plan's micro-batches of up to {plural(costs.max_tokens, 'token')}" if small else "the memory of every device"
        raise InfeasibleError(f"{_list(bad, costs)} in {where}, not even alone.{most} Drop or truncate, or change the plan.")
    if too_long == "drop":
        kept = tuple(sample for sample, fine in zip(samples, fits, strict=True) if fine)
        return Fitted(kept, dropped=tuple(bad))
    shorter = {sample.id: _truncate(sample, costs) for sample in bad}
    return Fitted(tuple(shorter.get(sample.id, sample) for sample in samples), truncated=tuple(bad))


def _check(samples: Sequence[SampleLengths], costs: PipelineCosts) -> None:
    for r, s in np.argwhere(costs.state_bytes >= costs.limit_bytes).tolist():
        state, limit = costs.state_bytes[r, s] / 1e9, costs.limit_bytes[r, s] / 1e9
        raise InfeasibleError(
            f"stage {s} of replica {r} needs {state:.3f} GB for its weights and their optimizer state alone, {limit:.3f} may be used."
        )
    seen: set[int] = set()
    for sample in samples:
        if sample.id in seen:
            raise InputError(f"sample {sample.id} comes twice in the batch; ids must differ.")
        seen.add(sample.id)
        if sample.length < 1 or sample.dec_length < 0:
            raise InputError(f"sample {sample.id} has lengths {sample.length} and {sample.dec_length}; at least one token was expected.")
        if sample.dec_length and not costs.has_decoder:
            raise InputError(f"sample {sample.id} has a decoder length of {sample.dec_length}, but the model has no decoder.")


def _fits(costs: PipelineCosts, enc: Ints, dec: Ints) -> list[bool]:
    """Whether each sample runs alone; each distinct pair of lengths is priced once."""
    from penstock.batching.anneal_kernels import fill

    keys, inverse = np.unique(enc * (int(dec.max()) + 1) + dec, return_inverse=True)
    pairs = np.stack(np.divmod(keys, int(dec.max()) + 1))
    count = len(keys)
    state = new_state(costs, count, 1)
    fill(state, costs.tables, np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1]), np.arange(count), np.arange(count + 1))
    fits = np.isfinite(state.charge) & (pairs[0] <= costs.max_length)
    return [bool(fine) for fine in fits[inverse.ravel()]]


def _list(bad: Sequence[SampleLengths], costs: PipelineCosts) -> str:
    texts = [f"{s.id} ({s.length}{f' + {s.dec_length}' if costs.has_decoder else ''} tokens)" for s in bad]
    return f"sample {first_of(texts, _SHOWN)} {'does' if len(bad) == 1 else 'do'} not fit"


def _truncate(sample: SampleLengths, costs: PipelineCosts) -> SampleLengths:
    """The longest beginning of a sample that fits; the decoder's side gives way once the other is down to its size."""
    for part in ("length", "dec_length"):
        low, high = 0, getattr(sample, part)
        while low < high - 1:
            middle = (low + high) // 2
            tried = replace(sample, **{part: middle})
            fits = _fits(costs, *positions([tried], costs))[0]
            low, high = (middle, high) if fits else (low, middle)
        if low > 0 and (part == "length" or costs.has_decoder):
            return replace(sample, **{part: low})
    raise InfeasibleError(f"sample {sample.id} fits no device at any length. Use a plan with smaller stages, or devices with more memory.")
