"""One micro-batch on a device: what the ops read besides the carry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch

from penstock.models.modules.pieces import Pieces, tiled
from penstock.models.shapes import Layout, Shape

__all__ = ["Batch", "Sequences", "random_batch"]

T = TypeVar("T")


@dataclass
class Sequences:
    """The sequences of one side, flat in both layouts: `padded` lays out rows of equal length, `packed` end to end."""

    ids: torch.Tensor
    """(tokens,)"""
    lengths: tuple[int, ...]
    """True length of each sequence."""
    layout: Layout
    row_length: int
    """Padded length of a row (the longest sequence when packed)."""
    samples: torch.Tensor
    """(sequences,) sample ids; they key dropout, so that placement never changes numerics."""
    types: torch.Tensor | None = None
    """(tokens,) token types (BERT)."""
    positions: torch.Tensor = field(init=False)
    """(tokens,) position inside the own sequence."""
    bounds: torch.Tensor = field(init=False)
    """(pieces + 1,) int32 starts of the pieces attention stays inside; padding forms pieces of its own."""
    longest: int = field(init=False)
    piece_starts: torch.Tensor = field(init=False)
    """(tokens,) int32 where the piece of each token begins."""
    piece_ends: torch.Tensor = field(init=False)
    """(tokens,) int32 where it ends."""
    causal_query_order: torch.Tensor = field(init=False)
    """(tiles,) int32 in which attention starts the tiles of queries, if these see earlier keys alone."""
    causal_key_order: torch.Tensor = field(init=False)
    """(tiles,) int32 likewise those of keys."""
    tile_order: torch.Tensor = field(init=False)
    """(tiles,) int32 in which both are started if queries see all keys of their piece."""
    first_tokens: torch.Tensor = field(init=False)
    """(sequences,) index of each sequence's first token."""
    full: bool = field(init=False)
    """No position is padding."""
    _memo: dict[object, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # numpy counts here: torch's small ops on a host wake all of its threads, which takes longer than they work.
        lengths = np.array(self.lengths, dtype=np.int64)
        spans = lengths if self.layout == "packed" else np.full(len(lengths), self.row_length)
        starts = np.zeros(len(spans) + 1, np.int64)
        np.cumsum(spans, out=starts[1:])
        tokens = int(starts[-1])
        if tokens != self.ids.numel():
            raise ValueError(f"{tokens} token positions expected from the lengths, {self.ids.numel()} ids given")
        rows = np.repeat(np.arange(len(spans)), spans)
        # A row is one piece, or, with padding behind its sequence, two.
        edges = np.unique(np.concatenate((starts, starts[:-1] + lengths))).astype(np.int32)
        self.longest = int(np.diff(edges).max())
        self.full = bool((lengths == spans).all())
        made = {
            "positions": np.arange(tokens) - starts[rows], "_row_of": rows, "bounds": edges, "_sizes": lengths,
            "first_tokens": np.minimum(starts[:-1], tokens - 1),  # of an empty one, any
        }  # fmt: skip
        for name, values in (made | tiled(edges)).items():
            setattr(self, name, torch.from_numpy(values).to(self.ids.device))

    def pieces(self, *, causal: bool) -> Pieces:
        """The pieces that attention stays inside, with the order of tiles that suits its direction."""
        orders = (self.causal_query_order, self.causal_key_order) if causal else (self.tile_order, self.tile_order)
        return Pieces(self.piece_starts, self.piece_ends, *orders)

    def memo(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, made once for this micro-batch and shared by all ops that ask for `key`."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(T, self._memo[key])

    @property
    def num_rows(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    def row_keys(self) -> torch.Tensor:
        """(tokens,) a number for each token that only its sample and position decide."""
        return self.memo("row_keys", lambda: self.samples[self._row_of] * 1_000_003 + self.positions)

    def key_padding(self) -> torch.Tensor:
        """(rows, row_length) true where a padded row holds a real token."""
        return self.memo("key_padding", lambda: torch.arange(self.row_length, device=self.ids.device)[None, :] < self._sizes[:, None])


@dataclass
class Batch:
    """A micro-batch: sequences (and the decoder's), or images; labels, and the weight of each in the global loss."""

    labels: torch.Tensor | None = None
    """(tokens,) of the side the loss is on; its entries count where `weights` is not zero."""
    weights: torch.Tensor | None = None
    """(tokens,) or (samples,) fp32; over the global batch they sum to one."""
    own: Sequences | None = None
    decoder: Sequences | None = None
    images: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    samples: torch.Tensor | None = None
    """(samples,) ids of the images, which key dropout."""
    next_sentence: torch.Tensor | None = None
    """(samples,) labels of BERT's second task."""
    sample_weights: torch.Tensor | None = None
    """(samples,) fp32 weights of the second task; over the global batch they sum to one."""
    step: int = 0
    seed: int = 0
    training: bool = True
    repeats: bool = False
    """Micro-batches of this very shape come again and again, so that what is prepared for a shape pays."""
    at_once: bool = False
    """All kernels of a pass are issued at once, from a recording, now or when the shape has come more often: what they take counts, however
    small they are, and not what issuing them takes."""
    torch_products: bool = False
    """Products are torch's own, which save their input before they run: as the last op of a segment sees it that will be recomputed."""

    def side(self, name: str) -> Sequences:
        """The sequences of `own` or `decoder`."""
        sequences = self.own if name == "own" else self.decoder
        if sequences is None:
            raise ValueError(f"this micro-batch has no '{name}' sequences")
        return sequences

    @property
    def shape(self) -> Shape:
        """What the cost formulas see."""
        if self.images is not None:
            return Shape.images(self.images.shape[0])
        own, dec = self.side("own"), self.decoder
        if own.layout == "packed":
            return Shape.packed(own.lengths, dec.lengths if dec else ())
        return Shape.padded(own.num_rows, own.row_length, dec.row_length if dec else 0)


def random_batch(
    lengths: Sequence[int],
    vocab: int,
    *,
    dec_lengths: Sequence[int] = (),
    layout: Layout = "padded",
    row_length: int = 0,
    dec_row_length: int = 0,
    types: int = 0,
    next_sentence: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Batch:
    """Random tokens and labels of these lengths, for profiling and tests; padding gets id 0 and weight 0."""
    generator = torch.Generator().manual_seed(seed)

    def side(sizes: Sequence[int], row: int) -> tuple[Sequences, torch.Tensor]:
        row = row or max(sizes)
        spans = sizes if layout == "packed" else [row] * len(sizes)
        real = torch.cat([torch.arange(span) < size for span, size in zip(spans, sizes, strict=True)])
        ids = torch.randint(1, vocab, (sum(spans),), generator=generator) * real
        kinds = torch.randint(0, types, (sum(spans),), generator=generator).to(device) if types else None
        samples = torch.arange(len(sizes)).to(device)
        return Sequences(ids.to(device), tuple(sizes), layout, row, samples, kinds), real

    own, real = side(lengths, row_length)
    decoder = None
    if dec_lengths:
        decoder, real = side(dec_lengths, dec_row_length)
    labels = torch.randint(0, vocab, real.shape, generator=generator)
    weights = real.float() / real.sum()
    follows = torch.randint(0, 2, (len(lengths),), generator=generator).to(device) if next_sentence else None
    shares = torch.full((len(lengths),), 1 / len(lengths), device=device) if next_sentence else None
    return Batch(labels.to(device), weights.to(device), own, decoder, next_sentence=follows, sample_weights=shares)
