"""Tokenizers from every kind of file, SentencePiece's among them, and those that cannot be read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from penstock.data.text.tokenizer import find_end_token, load_tokenizer, train_tokenizer
from penstock.errors import InputError

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "a cat and a dog"] * 20
HARD = ["the cat", "  the   cat  ", "naïve ﬁne Ⅷ", "日本 😀", "", "a\tb\nc", "the.cat,the-dog"]


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def field(number: int, value: bytes | int | float) -> bytes:
    """One field of a protocol-buffer message."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def model(pieces: list[tuple[str, float, int]], algorithm: int, *, byte_fallback: bool = False, prefix: bool = True) -> bytes:
    """A SentencePiece model of these (text, score, kind)."""
    body = b"".join(field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in pieces)
    training = field(3, algorithm) + field(35, int(byte_fallback)) + field(40, 0)
    return body + field(2, training) + field(3, field(3, int(prefix)) + field(4, 1))


SPECIAL = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]


def test_a_unigram_model_takes_the_likeliest_cut(tmp_path: Path) -> None:
    pieces = [*SPECIAL, ("▁", -5.0, 1), ("▁ab", -2.0, 1), ("abc", -2.5, 1), ("c", -3.0, 1), ("a", -4.0, 1), ("b", -4.0, 1)]
    (tmp_path / "spiece.model").write_bytes(model(pieces, 1))
    tokenizer = load_tokenizer(tmp_path)
    # ▁ab + c costs 5.0, ▁ + abc costs 7.5
    assert tokenizer.encode("abc  ab", add_special_tokens=False).tokens == ["▁ab", "c", "▁ab"]
    assert tokenizer.encode("z", add_special_tokens=False).ids == [3, 0]
    assert tokenizer.decode([4, 6, 4]) == "abc ab" and find_end_token(tokenizer, "auto") == 2


def test_pieces_that_are_special_may_be_anywhere(tmp_path: Path) -> None:
    """T5's unknown piece is its third; a piece that a user defined is never cut, whatever the others would make of it; no space is put
    before a text unless the model says so."""
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("▁", -1.0, 1), ("a", -1.0, 1), ("b", -1.0, 1), ("ab", -9.0, 4)]
    (tmp_path / "with.model").write_bytes(model(pieces, 1))
    (tmp_path / "without.model").write_bytes(model(pieces, 1, prefix=False))
    first, second = (load_tokenizer(tmp_path / f"{name}.model") for name in ("with", "without"))
    assert first.encode("ba z", add_special_tokens=False).ids == [3, 5, 4, 3, 2]
    assert second.encode("ba z", add_special_tokens=False).ids == [5, 4, 3, 2]
    assert second.encode("bab", add_special_tokens=False).ids == [5, 6]


def test_a_bpe_model_merges_the_best_scored_first(tmp_path: Path) -> None:
    letters = [(letter, -10.0 - i, 1) for i, letter in enumerate("▁abc")]
    (tmp_path / "own.model").write_bytes(model([*SPECIAL, ("bc", 0.0, 1), ("ab", -1.0, 1), ("▁ab", -2.0, 1), *letters], 2))
    tokenizer = load_tokenizer(tmp_path / "own.model")
    assert tokenizer.encode("abc ab", add_special_tokens=False).tokens == ["▁", "a", "bc", "▁ab"]
    (tmp_path / "own.model").write_bytes(model([*SPECIAL, ("c▁a", 0.0, 1), ("▁a", -1.0, 1), *letters], 2))
    tokenizer = load_tokenizer(tmp_path / "own.model")  # a piece may span two words
    assert tokenizer.encode("bc ab", add_special_tokens=False).tokens == ["▁", "b", "c▁a", "b"]


def test_unknown_characters_fall_back_to_bytes(tmp_path: Path) -> None:
    pieces = [*SPECIAL, ("▁", -1.0, 1), *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256))]
    (tmp_path / "bytes.model").write_bytes(model(pieces, 1, byte_fallback=True))
    tokenizer = load_tokenizer(tmp_path / "bytes.model")
    assert tokenizer.decode(tokenizer.encode("é 😀", add_special_tokens=False).ids) == "é 😀"


@pytest.mark.parametrize("algorithm", ["unigram", "bpe"])
@pytest.mark.parametrize("byte_fallback", [False, True])
def test_tokens_equal_those_of_the_sentencepiece_library(tmp_path: Path, algorithm: str, byte_fallback: bool) -> None:
    library = pytest.importorskip("sentencepiece", reason="the Python package 'sentencepiece' is not installed")
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    size = 300 if byte_fallback else 40
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "texts"), model_prefix=str(tmp_path / "m"), vocab_size=size, model_type=algorithm, byte_fallback=byte_fallback,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    expected, found = library.SentencePieceProcessor(model_file=str(tmp_path / "m.model")), load_tokenizer(tmp_path / "m.model")
    for text in (*TEXTS[:3], *HARD):
        assert found.encode(text, add_special_tokens=False).ids == expected.encode(text), text


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 280).model.save(str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["merges.txt", "vocab.json"]
    for given in (tmp_path, tmp_path / "vocab.json", tmp_path / "merges.txt"):
        tokenizer = load_tokenizer(given)
        for text in HARD:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
    end = tokenizer.token_to_id("<|endoftext|>")
    assert find_end_token(tokenizer, "auto") == end and tokenizer.encode("a<|endoftext|>b").ids.count(end) == 1
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(InputError, match=r"needs a merges\.txt beside it"):
        load_tokenizer(tmp_path)


def test_word_pieces(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "the"]))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("The CATS sit", add_special_tokens=False).tokens == ["the", "cat", "##s", "[UNK]"]
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "Cat", "##s"]))
    assert load_tokenizer(tmp_path).encode("Cats cat CAT", add_special_tokens=False).tokens == ["Cat", "##s", "cat", "[UNK]"]
    assert find_end_token(tokenizer, "auto") == 3 and find_end_token(tokenizer, "none") is None and find_end_token(tokenizer, "cat") == 5


def test_settings_of_a_tokenizers_last_user_change_nothing(tmp_path: Path) -> None:
    """Files keep the truncation and the padding that were on when they were saved."""
    tokenizer = train_tokenizer(TEXTS, 280)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(pad_id=1, pad_token="<|pad|>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path).encode_batch_fast([*TEXTS[:2], "a"], add_special_tokens=False)
    assert [train_tokenizer(TEXTS, 280).encode(text).ids for text in (*TEXTS[:2], "a")] == [one.ids for one in found]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "added_tokens.json"])
def test_tokens_that_a_folder_adds_to_its_vocabulary(name: str, tmp_path: Path) -> None:
    """Without them `<|im_start|>` would be a dozen tokens of bytes."""
    tokenizer = train_tokenizer(TEXTS, 280)
    tokenizer.model.save(str(tmp_path))
    size = tokenizer.get_vocab_size()
    kinds = {"<|im_end|>": size + 1, "<|im_start|>": size}
    decoder = {str(place): {"content": text, "special": True} for text, place in kinds.items()}
    (tmp_path / name).write_text(json.dumps(kinds if name.startswith("added") else {"added_tokens_decoder": decoder}))
    found = load_tokenizer(tmp_path)
    assert found.encode("<|im_start|>the<|im_end|>").ids == [size, *tokenizer.encode("the").ids, size + 1]
    assert found.get_vocab_size() == size + 2
    wrong = {"added_tokens_decoder": {"7": {"content": "<a>"}}}
    (tmp_path / name).write_text(json.dumps({"<a>": 7} if name.startswith("added") else wrong))
    with pytest.raises(InputError, match=f"has token '<a>' at {size}, but its folder declares it at 7"):
        load_tokenizer(tmp_path / "vocab.json")


@pytest.mark.parametrize("declared", [{"eos_token": "<|im_end|>"}, {"eos_token": {"content": "<|im_end|>", "special": True}}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_texts_end_as_the_tokenizers_folder_declares(declared: dict[str, object], name: str, tmp_path: Path) -> None:
    """Gemma's vocabulary has HTML's `</s>`, Qwen's chat models end with another token than `<|endoftext|>`, which they have too."""
    tokenizer = train_tokenizer(TEXTS, 280)
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    usual, own = (tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
    assert find_end_token(tokenizer, "auto", str(tmp_path)) == usual
    (tmp_path / name).write_text(json.dumps(declared))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        assert find_end_token(load_tokenizer(path), "auto", str(path)) == own
    (tmp_path / name).write_text(json.dumps({"eos_token": "of another vocabulary"}))
    assert find_end_token(tokenizer, "auto", str(tmp_path)) == usual


def test_a_trained_tokenizer_gives_back_any_text(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 300).save(str(tmp_path / "any name.json"))
    tokenizer = load_tokenizer(tmp_path / "any name.json")
    assert tokenizer.get_vocab_size() <= 300
    for text in (*TEXTS[:3], *HARD):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "cannot be read"), ("vocab.bin", b"", "is of no known kind"),
        ("x.model", b"\x0a\xff", "is not a SentencePiece"),
        ("x.model", b"", "neither unigram nor BPE"), ("x.model", field(1, field(1, b"\xff")), "is not a SentencePiece"),
        ("x.model", model(SPECIAL, 3), "neither unigram nor BPE"), ("vocab.txt", b"cat", r"has no \[UNK\]"),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        load_tokenizer(tmp_path / name)


def test_folders_without(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0}))
    with pytest.raises(InputError, match=r"merges\.txt"):
        load_tokenizer(tmp_path)
