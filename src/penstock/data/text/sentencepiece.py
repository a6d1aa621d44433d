"""Reads SentencePiece models (`.model`) into `tokenizers`, without the SentencePiece library.

The file is a protocol-buffer message; of its fields these matter:

    1 piece*      1 text · 2 score (f32) · 3 kind (2 unknown, 3 control, 4 user-defined, 6 byte)
    2 training    3 algorithm (1 unigram, 2 BPE) · 35 byte fallback · 40 id of the unknown piece
    3 normaliser  2 character map · 3 dummy prefix · 4 remove extra white space
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import InputError
from penstock.files import MAX_TEXT_BYTES, readable_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["read_sentencepiece"]

_UNIGRAM, _BPE = 1, 2
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"


@dataclass(frozen=True)
class _Model:
    pieces: list[tuple[str, float]]
    kinds: list[int]
    algorithm: int
    byte_fallback: bool
    unknown: int
    character_map: bytes
    dummy_prefix: bool
    squeeze_spaces: bool


def read_sentencepiece(path: str | Path) -> Tokenizer:
    """The tokenizer of a unigram or BPE model."""
    data = readable_bytes(path, "SentencePiece model", MAX_TEXT_BYTES)
    try:
        model = _parse(data)
    except (ValueError, IndexError, struct.error, TypeError):
        raise InputError(f"'{path}' is not a SentencePiece model: it cannot be parsed.") from None
    if not model.pieces or model.algorithm not in (_UNIGRAM, _BPE):
        raise InputError(f"SentencePiece model '{path}' is neither unigram nor BPE, or has no pieces. Other kinds are not read.")
    return _build(model)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message in order: whole numbers, 4 and 8 raw bytes, or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value: Any
            value, at = _varint(data, at)
        else:
            length = {1: 8, 5: 4}.get(kind, -1)
            if kind == 2:
                length, at = _varint(data, at)
            if length < 0 or at + length > len(data):
                raise ValueError("not a message")
            value, at = data[at : at + length], at + length
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("not a number")


def _parse(data: bytes) -> _Model:
    pieces: list[tuple[str, float]] = []
    kinds: list[int] = []
    training: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece.get(1, b"").decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0))
            kinds.append(piece.get(3, 1))
        elif number == 2:
            training = dict(_fields(value))
        elif number == 3:
            normaliser = dict(_fields(value))
    unknown = kinds.index(_UNKNOWN) if _UNKNOWN in kinds else training.get(40, 0)
    return _Model(
        pieces, kinds, training.get(3, _UNIGRAM), bool(training.get(35, 0)), unknown,
        normaliser.get(2, b""), bool(normaliser.get(3, 1)), bool(normaliser.get(4, 1)),
    )  # fmt: skip


def _build(model: _Model) -> Tokenizer:
    """The model in the steps of `tokenizers`: normalise, mark spaces, look up pieces, and back."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if model.algorithm == _UNIGRAM:
        core: Any = models.Unigram(model.pieces, model.unknown, model.byte_fallback)
    else:
        vocab = {piece: index for index, (piece, _) in enumerate(model.pieces)}
        unknown = model.pieces[model.unknown][0]
        core = models.BPE(vocab, _merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=model.byte_fallback)
    tokenizer = Tokenizer(core)
    steps: list[Any] = [normalizers.Precompiled(model.character_map)] if model.character_map else []
    if model.squeeze_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.dummy_prefix else "never"
    # SentencePiece lets a unigram piece begin with a space only; BPE pieces may also span words.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=model.algorithm == _UNIGRAM)
    strip = [decoders.Strip(" ", 1, 0)] if model.dummy_prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    specials = [piece for (piece, _), kind in zip(model.pieces, model.kinds, strict=True) if kind in (_UNKNOWN, _CONTROL)]
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in specials])
    own = [piece for (piece, _), kind in zip(model.pieces, model.kinds, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in own])
    return tokenizer


def _merges(model: _Model) -> list[tuple[str, str]]:
    """The merges that BPE pieces came from: every way to cut a piece into two others, the best-scored pieces first."""
    ranks = {piece: (-score, index) for index, (piece, score) in enumerate(model.pieces) if model.kinds[index] == 1}
    found = []
    for piece, rank in ranks.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        local = sorted((ranks[left], ranks[right], left, right) for left, right in cuts if left in ranks and right in ranks)
        found += [(rank, order, left, right) for order, (_, _, left, right) in enumerate(local)]
    return [(left, right) for _, _, left, right in sorted(found)]
