"""Samples into tensors: a rank's share of a micro-batch, read from whoever has the samples."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from penstock.data.samples import Sample
from penstock.models.micro_batch import MicroBatch
from penstock.models.modules.batch import Batch, Sequences
from penstock.programs.instructions import Program
from penstock.timing.recorded import SAMPLE_BITS, recorded_length

__all__ = ["Source", "load_share"]

Array = npt.NDArray[Any]
_ALIGNED = 256
"""Bytes at which kernels like tensors to begin."""


class Source(Protocol):
    """Gives samples by the ids that programs name."""

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """A sample of one iteration's global batch, of these lengths (0 for images, and for a decoder that is not there)."""


def load_share(
    source: Source, program: Program, micro: MicroBatch, bounds: tuple[int, int], needs: Collection[str], device: torch.device, seed: int,
    *, alone: bool = False, usual_length: int = 0, at_once: bool = False,
) -> Batch:  # fmt: skip
    """Samples [first, last) of a micro-batch, at least one, as tensors. What a stage does not read is not fetched.

    Its loss is its part of the global batch's, or, `alone`, that of the micro-batch. Rows of `usual_length` come again and again.
    `at_once`: see `Batch`.
    """
    (first, last), iteration = bounds, program.iteration_of(micro.index)
    ids = micro.samples[first:last]
    lengths = micro.lengths[first:last] or (0,) * len(ids)
    dec_lengths = micro.dec_lengths[first:last] or (0,) * len(ids)
    samples: list[Sample] = []
    if needs:
        samples = [source.sample(iteration, *one) for one in zip(ids, lengths, dec_lengths, strict=True)]
    batch = _images(samples, ids) if not micro.lengths else _tokens(micro, samples, bounds, needs)
    if "labels" in needs:
        totals = (micro.loss_tokens(), len(micro.samples)) if alone else (program.loss_tokens, program.num_samples)
        _add_labels(batch, micro, samples, bounds, *totals)
    batch.step, batch.seed, batch.training = iteration, seed, program.training
    batch.repeats, batch.at_once = micro.row_length == usual_length > 0, at_once
    return _moved(batch, device)


def _images(samples: Sequence[Sample], ids: Sequence[int]) -> Batch:
    batch = Batch(samples=torch.tensor(ids))
    if samples:
        batch.images = torch.from_numpy(np.stack([sample.inputs for sample in samples]))
        batch.targets = torch.from_numpy(np.stack([sample.labels for sample in samples])).long()
    return batch


def _tokens(micro: MicroBatch, samples: Sequence[Sample], bounds: tuple[int, int], needs: Collection[str]) -> Batch:
    inputs = [sample.inputs for sample in samples] if "inputs" in needs else None
    types = None
    if inputs is not None and samples[0].types is not None:
        types = [sample.types for sample in samples if sample.types is not None]
    batch = Batch(own=_side(micro, bounds, micro.lengths, micro.row_length, inputs, types))
    if micro.dec_lengths:
        dec_inputs = [sample.dec_inputs for sample in samples if sample.dec_inputs is not None] if "dec_inputs" in needs else None
        batch.decoder = _side(micro, bounds, micro.dec_lengths, micro.dec_row_length, dec_inputs, None)
    return batch


def _rows(micro: MicroBatch, bounds: tuple[int, int]) -> list[tuple[int, int]]:
    """[first, last) of the samples of each row, counted from the share's first: one each, unless rows are shared."""
    if not micro.row_sizes:
        return [(at, at + 1) for at in range(bounds[1] - bounds[0])]
    found, at = [], 0
    for size in micro.row_sizes:
        if bounds[0] <= at < bounds[1]:
            found.append((at - bounds[0], at - bounds[0] + size))
        at += size
    return found


def _side(
    micro: MicroBatch, bounds: tuple[int, int], all_lengths: Sequence[int], row_length: int, ids: Sequence[Array] | None,
    types: Sequence[Array] | None,
) -> Sequences:  # fmt: skip
    rows = _rows(micro, bounds)
    own = all_lengths[bounds[0] : bounds[1]]
    lengths = tuple(sum(own[a:b]) for a, b in rows)
    samples = [micro.samples[bounds[0] + a] for a, _ in rows]
    width, total = row_length or max(lengths), 0
    if micro.layout == "packed":
        width, total = max(lengths), max(row_length, sum(lengths))
        filler = _filler(total - sum(lengths), width, len(lengths)) if row_length else ()
        lengths, samples = (*lengths, *filler), [*samples, *(0 for _ in filler)]
    if ids is None:  # nobody reads them, but their number counts
        flat = torch.zeros(1, dtype=torch.int64).expand(total or width * len(rows))
    else:
        flat = _laid_out(ids, rows, width, np.int64, total)
    kinds = None if types is None else _laid_out(types, rows, width, np.int64, total)
    return Sequences(flat, lengths, micro.layout, width, torch.tensor(samples), kinds)


def _filler(tokens: int, longest: int, samples: int) -> tuple[int, ...]:
    """Lengths of what lies behind packed samples: like samples none of whose labels count, and none longer than theirs. Empty ones bring
    their number to one that comes again."""
    lengths = (longest,) * (tokens // longest) + ((tokens % longest,) if tokens % longest else ())
    return (*lengths, *(0,) * (recorded_length(samples + len(lengths), SAMPLE_BITS) - samples - len(lengths)))


def _laid_out(values: Sequence[Array], rows: Sequence[tuple[int, int]], width: int, dtype: Any, total: int = 0) -> torch.Tensor:
    """Row by row with zeros up to `width`, or, where they are to be so many in all, end to end with zeros up to `total`."""
    if total:
        flat = np.zeros(total, dtype)
        np.concatenate(values, out=flat[: sum(map(len, values))], casting="unsafe")
        return torch.from_numpy(flat)
    laid = np.zeros((len(rows), width), dtype)
    for row, (a, b) in enumerate(rows):
        at = 0
        for value in values[a:b]:
            laid[row, at : at + len(value)] = value
            at += len(value)
    return torch.from_numpy(laid.reshape(-1))


def _add_labels(
    batch: Batch, micro: MicroBatch, samples: Sequence[Sample], bounds: tuple[int, int], loss_tokens: int, num_samples: int
) -> None:
    """Labels and their weights in the loss."""
    if not micro.lengths:
        batch.weights = torch.full((len(samples),), 1.0 / loss_tokens)
        return
    rows = _rows(micro, bounds)
    width, total = micro.dec_row_length if micro.dec_lengths else micro.row_length, 0
    if micro.layout == "packed":
        total = max(micro.row_length, sum((micro.dec_lengths or micro.lengths)[slice(*bounds)]))
    counted = [np.ones(len(one.labels), bool) if one.counted is None else one.counted for one in samples]
    found, wanted = sum(int(one.sum()) for one in counted), micro.loss_tokens(*bounds)
    if found != wanted:
        raise ValueError(f"{found} labels of samples {micro.samples[bounds[0] : bounds[1]]} count in the loss, the program says {wanted}")
    batch.labels = _laid_out([one.labels for one in samples], rows, width, np.int64, total)
    batch.weights = _laid_out(counted, rows, width, np.float32, total).div_(loss_tokens)
    if samples[0].next_sentence is not None:
        assert batch.own is not None
        none = [0] * (batch.own.num_rows - len(samples))
        batch.next_sentence = torch.tensor([one.next_sentence for one in samples] + none)
        batch.sample_weights = torch.tensor([1.0 / num_samples] * len(samples) + [float(zero) for zero in none])


def _moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on a device, copied at once from pinned memory: nobody waits for it, and the host is asked once, not for each tensor."""
    if device.type == "cpu":
        return batch
    holders = [holder for holder in (batch, batch.own, batch.decoder) if holder is not None]
    found = [(holder, name, value) for holder in holders for name, value in vars(holder).items() if isinstance(value, torch.Tensor)]
    ends = list(itertools.accumulate(-(-value.nbytes // _ALIGNED) * _ALIGNED for _, _, value in found))
    pinned = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
    for start, (_, _, value) in zip([0, *ends], found, strict=False):
        _piece(pinned, start, value).copy_(value)
    moved = pinned.to(device, non_blocking=True)
    for start, (holder, name, value) in zip([0, *ends], found, strict=False):
        setattr(holder, name, _piece(moved, start, value))
    return batch


def _piece(whole: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes from `start` on as a tensor such as another."""
    return whole[start : start + like.nbytes].view(like.dtype).view(like.shape)
