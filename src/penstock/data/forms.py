"""What a model makes of a sample: how many token positions it fills on each side, and which of them count in the loss.

decoder           input and target end to end; each token predicts the next; those of the target count, of a chat those of answers
encoder-decoder   input into the encoder; a start token and the target into the decoder, which predicts the target
masked            tokens into the encoder; those that were masked count
images            one position, one label
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, plural

if TYPE_CHECKING:
    from penstock.data.dataset import DataSet
    from penstock.models.ops import Model

__all__ = ["Kind", "SampleForm", "form_of"]

Kind = Literal["decoder", "encoder-decoder", "masked", "images"]
Ints = npt.NDArray[Any]


@dataclass(frozen=True)
class SampleForm:
    """The form in which samples of a data set enter a model."""

    kind: Kind
    paired: bool = True
    """Samples have a target beside their input."""
    prompt_loss: bool = False
    """Whether tokens of the input count in a decoder's loss too, or all of a chat."""

    def positions(self, lengths: Ints) -> tuple[Ints, Ints]:
        """Positions of each sample on both sides, from its lengths after truncation (samples, sides)."""
        nothing = np.zeros(len(lengths), np.int64)
        if self.kind == "decoder":  # the last token is only a label
            return lengths.sum(axis=1, dtype=np.int64) - 1, nothing
        if self.kind == "encoder-decoder":
            return lengths[:, 0].astype(np.int64), lengths[:, 1].astype(np.int64)
        return lengths[:, 0].astype(np.int64), nothing

    def counted(self, input_length: int, positions: int, dec_positions: int) -> int:
        """The number of positions of a sample of text that count in the loss."""
        if self.kind == "encoder-decoder":
            return dec_positions
        if self.paired and not self.prompt_loss:  # label j is token j, a part of the target from the input's length on
            return max(0, positions + 1 - max(input_length, 1))
        return positions

    def answers(self, spans: Ints, positions: int) -> npt.NDArray[np.bool_]:
        """Which positions of a chat count: label j is token j + 1, and those of `spans` are the assistant's."""
        counted = np.full(positions, self.prompt_loss)
        for first, last in np.asarray(spans, np.int64).reshape(-1, 2).tolist():
            counted[max(0, first - 1) : max(0, last - 1)] = True
        return counted


def form_of(model: Model, data: DataSet, *, prompt_loss: bool = False) -> SampleForm:
    """The form in which a model takes a data set, or a clear word that it does not."""
    kind: Kind = "decoder"
    if "form" in model.config:  # somebody's module
        kind = model.config["form"]
    elif model.family == "bert":
        kind = "masked"
    elif model.dec_length:
        kind = "encoder-decoder"
    elif not model.seq_length:
        kind = "images"
    expected = {"masked": "bert", "images": "images"}.get(kind, "text")
    if data.manifest.kind != expected:
        raise InputError(f"model '{model.name}' trains on {expected} data, but '{data.folder}' holds {data.manifest.kind} data.")
    if kind == "images":
        _check_images(model, data)
    paired = "target" in data.manifest.sides
    if kind == "encoder-decoder" and not paired:
        raise InputError(f"model '{model.name}' needs pairs of input and target, but '{data.folder}' holds plain text.")
    vocab = model.config.get("vocab", 0)
    if kind != "images" and vocab and data.manifest.vocab_size > vocab:
        raise InputError(
            f"data '{data.folder}' has a vocabulary of {data.manifest.vocab_size}, model '{model.name}' of {vocab} only. Use a model with "
            f"`vocab: {data.manifest.vocab_size}`, or prepare the data with a smaller tokenizer."
        )
    return SampleForm(kind, paired, prompt_loss)


def _check_images(model: Model, data: DataSet) -> None:
    """A wrong size would only show as tensors that do not fit, a wrong number of classes as a label out of range."""
    size, classes, shape = model.config.get("image_size"), model.config.get("num_classes"), data.manifest.image_shape
    if size and shape and tuple(shape[1:]) != (size, size):
        raise InputError(
            f"model '{model.name}' takes images of {size} × {size}, but '{data.folder}' holds {shape[1]} × {shape[2]}. Prepare them with "
            f"--image-size {size}, or use a model with `image_size: {shape[1]}`."
        )
    if classes and len(data.manifest.classes) > classes:
        raise InputError(
            f"data '{data.folder}' has {plural(len(data.manifest.classes), 'class')}, model '{model.name}' only {classes}. Use a model "
            f"with `num_classes: {len(data.manifest.classes)}`."
        )
