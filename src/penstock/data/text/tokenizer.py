"""Tokenizers from any of the files they come in, or trained on the spot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.data.text.declared import add_declared_tokens, declared_end_token
from penstock.errors import InputError
from penstock.files import readable_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["END_TOKENS", "check_own_end_token", "check_vocab_size", "find_end_token", "load_tokenizer", "train_tokenizer"]

END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[SEP]")
"""Names under which vocabularies have the token that ends a text, in the order in which they are looked for where no file declares it."""

_SPECIALS, _NUM_BYTES = (END_TOKENS[0], "<|pad|>"), 256
MAX_VOCAB = 2_000_000
"""Above any vocabulary in use; the trainer takes the memory of a whole one at the start, and ends the process where it gets none."""
_EXPECTED = "a tokenizer.json, a vocab.json beside merges.txt, a vocab.txt (WordPiece), a SentencePiece .model, or a folder of one of these"


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a file or folder."""
    given, path = path, Path(path)
    if os.path.isdir(path):
        path = next((path / name for name in _LOADERS if (path / name).is_file()), next(iter(sorted(path.glob("*.model"))), path))
    if os.path.isdir(path):
        raise InputError(f"folder '{given}' holds no tokenizer. Expected is {_EXPECTED}.")
    if not os.path.lexists(path):
        raise InputError(f"tokenizer '{given}' does not exist. Expected is {_EXPECTED}.")
    readable_file(path, "tokenizer")
    load = _LOADERS.get(path.name) or _SUFFIXES.get(path.suffix)
    if load is None:
        raise InputError(f"tokenizer '{given}' is of no known kind. Expected is {_EXPECTED}.")
    try:
        tokenizer = load(path)
        if path.suffix != ".json" or path.name == "vocab.json":  # a tokenizer.json has its added tokens in itself
            add_declared_tokens(tokenizer, path)
        tokenizer.no_truncation()  # files keep what their last user had set
        tokenizer.no_padding()
        return tokenizer
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise InputError(f"tokenizer '{path}' cannot be read: {error}.") from None


def _whole(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _byte_level_bpe(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    merges = path.with_name("merges.txt")
    if not merges.is_file():
        raise InputError(f"'{path}' needs a merges.txt beside it.")
    tokenizer = Tokenizer(models.BPE.from_file(str(path), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in END_TOKENS if tokenizer.token_to_id(name) is not None])
    return tokenizer


def _word_piece(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    if tokenizer.token_to_id("[UNK]") is None:
        raise InputError(f"vocabulary '{path}' has no [UNK]: it is not one of WordPiece.")
    words = [word for word in tokenizer.get_vocab() if not word.startswith("[")]
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=all(word == word.lower() for word in words))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(
        [name for name in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]") if tokenizer.token_to_id(name) is not None]
    )
    return tokenizer


def _sentencepiece(path: Path) -> Tokenizer:
    from penstock.data.text.sentencepiece import read_sentencepiece

    return read_sentencepiece(path)


# What a folder is searched for, in this order.
_LOADERS: dict[str, Callable[[Path], Tokenizer]] = {
    "tokenizer.json": _whole,
    "vocab.json": _byte_level_bpe,
    "vocab.txt": _word_piece,
    "merges.txt": lambda path: _byte_level_bpe(path.with_name("vocab.json")),
}
_SUFFIXES: dict[str, Callable[[Path], Tokenizer]] = {".json": _whole, ".model": _sentencepiece, ".txt": _word_piece}


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a vocabulary that no tokenizer can be trained to have."""
    if vocab_size > MAX_VOCAB:
        raise InputError(f"a vocabulary of {vocab_size:,} is too large: at most {MAX_VOCAB:,} tokens are trained.")
    if vocab_size < _NUM_BYTES + len(_SPECIALS):
        raise InputError(f"a vocabulary of {vocab_size} is too small: {_NUM_BYTES} bytes and {len(_SPECIALS)} special tokens need a place.")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most this many tokens, with an end-of-text and a padding token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_vocab_size(vocab_size)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(_SPECIALS), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def check_own_end_token(wanted: str) -> None:
    """Refuses what is no special token of a tokenizer that is trained here; texts do not end with a piece of a word."""
    if wanted not in ("auto", "none", END_TOKENS[0]):
        raise InputError(f"a tokenizer trained here ends texts with '{END_TOKENS[0]}', not with '{wanted}'. Use auto or none.")


def find_end_token(tokenizer: Tokenizer, wanted: str, path: str | None = None) -> int | None:
    """The id of the token that ends a text: the named one, for `auto` the one that the folder of `path` declares or else a usual one, None
    for `none`."""
    if wanted == "none":
        return None
    if wanted == "auto":
        declared = None if path is None else declared_end_token(path)
        names = END_TOKENS if declared is None else (declared, *END_TOKENS)
        return next((found for name in names if (found := tokenizer.token_to_id(name)) is not None), None)
    found = tokenizer.token_to_id(wanted)
    if found is None:
        raise InputError(f"the tokenizer has no token '{wanted}' to end texts with. Use one of its tokens, auto or none.")
    return int(found)
