"""Samples as a model takes them: tokens in, labels out, and which labels count; read for one rank, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.data.dataset import DataSet
from penstock.data.forms import Ints, SampleForm
from penstock.data.limits import NO_LIMITS, Limits
from penstock.data.manifest import SPANS

if TYPE_CHECKING:
    from penstock.models.micro_batch import MicroBatch
    from penstock.plans.plan import Plan, Stage
    from penstock.programs.instructions import Place, Program

__all__ = ["START_TOKEN", "LoadedMicroBatch", "LoadedProgram", "Sample", "Samples"]

START_TOKEN = 0
"""What a decoder beside an encoder reads first, as T5 has it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, truncated as its micro-batch says."""

    inputs: Ints
    """Token ids, or an image of fp32 numbers from -1 to 1."""
    labels: Ints
    """For each position of the side that the loss is on; one number for an image."""
    dec_inputs: Ints | None = None
    counted: Ints | None = None
    """Which labels count in the loss; None: all."""
    types: Ints | None = None
    """Token types (BERT)."""
    next_sentence: int | None = None


@dataclass(frozen=True, eq=False)
class LoadedMicroBatch:
    """A micro-batch with the samples of it that this rank reads: those of its shares, none where its stages need only lengths."""

    micro: MicroBatch
    samples: dict[int, Sample]
    """By id."""


@dataclass(frozen=True, eq=False)
class LoadedProgram:
    """One delivery to a rank: a program, and the samples that the program loads. Unpacks as `micro_batches, program`."""

    micro_batches: list[LoadedMicroBatch]
    program: Program

    def __iter__(self) -> Iterator[Any]:
        return iter((self.micro_batches, self.program))

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """A sample that this rank reads, by the id that the program names: what a runtime asks for."""
        return self._samples[iteration, sample]

    @cached_property
    def _samples(self) -> dict[tuple[int, int], Sample]:
        loaded = ((self.program.iteration_of(number), one.samples) for number, one in enumerate(self.micro_batches))
        return {(iteration, identity): sample for iteration, samples in loaded for identity, sample in samples.items()}


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of a data set by the ids that programs name: an index, plus the size of the set for each repetition in a batch."""

    data: DataSet
    form: SampleForm
    limits: Limits = NO_LIMITS
    """Those that the batches were drawn with."""

    def sample(self, iteration: int, sample: int, length: int, dec_length: int) -> Sample:
        """The sample, cut to these positions on each side (0 for images, and for a decoder that is not there)."""
        parts = self.data[sample % len(self.data)]
        if self.form.kind == "images":
            return Sample(parts["images"].astype(np.float32) / 127.5 - 1.0, np.asarray(parts["labels"]))
        if self.form.kind == "masked":
            return self._masked(parts, length)
        if self.form.kind == "encoder-decoder":
            target = parts["target"][:dec_length].astype(np.int64)
            return Sample(np.array(parts["input"][:length], np.int64), target, np.concatenate([[START_TOKEN], target[:-1]]))
        return self._joined(parts, length)

    def _masked(self, parts: dict[str, Ints], length: int) -> Sample:
        labels, counted = np.zeros(length, np.int64), np.zeros(length, bool)
        within = parts["masked_positions"] < length
        places = parts["masked_positions"][within]
        labels[places], counted[places] = parts["masked_ids"][within], True
        ids, types = (np.array(parts[name][:length], np.int64) for name in ("input", "segments"))
        return Sample(ids, labels, counted=counted, types=types, next_sentence=int(parts["labels"]))

    def _joined(self, parts: dict[str, Ints], length: int) -> Sample:
        """Input and target end to end; each token predicts the next."""
        sides = [parts[side] for side in (("input", "target") if self.form.paired else ("input",))]
        kept = [side[:count] for side, count in zip(sides, self.limits.kept([len(side) for side in sides]), strict=True)]
        prompt, tokens = kept[0], np.concatenate(kept)
        tokens = tokens[: length + 1].astype(np.int64)
        if SPANS in parts:
            return Sample(tokens[:-1], tokens[1:], counted=self.form.answers(parts[SPANS], length))
        counted = np.zeros(length, bool)
        counted[length - self.form.counted(len(prompt), length, 0) :] = True
        return Sample(tokens[:-1], tokens[1:], counted=counted)

    def load(self, program: Program, plan: Plan) -> LoadedProgram:
        """Reads what this rank's stages need of each micro-batch."""
        from penstock.programs.instructions import Load

        readers = {step.stage for step in program.instructions if isinstance(step, Load) and step.needs}
        shares = [share for place in program.places if place.stage in readers for share in _shares(place, plan.stages[place.stage])]
        return LoadedProgram([self._load(micro, shares, program.iteration_of(micro.index)) for micro in program.micro_batches], program)

    def _load(self, micro: MicroBatch, shares: list[tuple[int, int]], iteration: int) -> LoadedMicroBatch:
        places = sorted({place for dp, index in shares for place in range(*micro.share(dp, index))})
        lengths, dec_lengths = micro.lengths or (0,) * len(micro.samples), micro.dec_lengths or (0,) * len(micro.samples)
        read = {micro.samples[at]: self.sample(iteration, micro.samples[at], lengths[at], dec_lengths[at]) for at in places}
        return LoadedMicroBatch(micro, read)


def _shares(place: Place, stage: Stage) -> Iterator[tuple[int, int]]:
    """(dp, index) of this rank wherever the degrees of a stage change."""
    yield place.entry_dp, place.entry_share
    yield place.exit_dp, place.exit_share
    for run in stage.runs:
        yield run.dp, place.index // run.tp
