"""Raw files become prepared ones once for the same content, with the right tokenizer, or are refused with what to do."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.dataset import open_data
from penstock.data.text.lines import PAIRS
from penstock.data.text.tokenizer import train_tokenizer
from penstock.errors import InputError
from penstock.jobs.raw_data import _as_jsonl, prepare_raw, sample_lengths
from penstock.models.catalog import resolve_model

MODEL = resolve_model("gpt-tiny")


def prepared(path: Path, **options: object) -> Path:
    return prepare_raw([str(path)], MODEL, "gpt-tiny", keeps_weights=False, **options).data.folder  # type: ignore[arg-type]


def test_the_same_content_is_prepared_once(texts: Path, tmp_path: Path) -> None:
    first = prepare_raw([str(texts)], MODEL, "gpt-tiny", keeps_weights=False, split="8,1,1")
    (tmp_path / texts.name).write_bytes(texts.read_bytes())
    again = prepare_raw([str(tmp_path / texts.name)], MODEL, "gpt-tiny", keeps_weights=False, split="8,1,1")
    assert again.was_there and not first.was_there and again.folder == first.folder
    with (tmp_path / texts.name).open("a", encoding="utf-8") as stream:
        stream.write('{"text": "one more"}\n')
    other = prepare_raw([str(tmp_path / texts.name)], MODEL, "gpt-tiny", keeps_weights=False, split="8,1,1")
    assert other.folder != first.folder and not other.was_there
    assert open_data(other.folder).manifest.vocab_size <= MODEL.config["vocab"]


def test_a_tokenizers_other_files_are_part_of_the_question(texts: Path, tmp_path: Path) -> None:
    train_tokenizer(["so many words"], 270).model.save(str(tmp_path))
    vocabulary = str(tmp_path / "vocab.json")

    def prepared_with_it() -> Path:
        return prepared(texts, tokenizer=vocabulary, over_long="truncate")

    first = prepared_with_it()
    assert prepared_with_it() == first
    (tmp_path / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")  # texts become single bytes
    bytes_ = prepared_with_it()
    assert bytes_ != first
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "Z"}', encoding="utf-8")
    ended = prepared_with_it()
    assert ended != bytes_ and open_data(ended).manifest.end_token != open_data(bytes_).manifest.end_token


def test_lengths_are_those_that_the_model_computes(texts: Path) -> None:
    found = prepare_raw([str(texts)], MODEL, "gpt-tiny", keeps_weights=False)
    lengths = found.data.ragged["input"].lengths
    assert sorted(sample.length for sample in sample_lengths(found)) == sorted(int(length) - 1 for length in lengths)


@pytest.mark.parametrize(
    ("name", "content", "sides"),
    [
        ("a.csv", 'id,text\n1,"one, two\nthree"\n2,four five\n', {"input": 2}),
        ("a.tsv", "input\ttarget\none two\tthree\nfour\tfive\n", {"input": 2, "target": 2}),
        ("a.txt", "one two three\n\nfour five\n", {"input": 2}),
    ],
)
def test_tables_and_plain_texts(name: str, content: str, sides: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = open_data(prepared(tmp_path / name, split="1,0,0"))
    assert {side: len(part) for side, part in data.ragged.items()} == sides


CELLS = st.text(st.characters(codec="utf-8"), max_size=20) | st.text("a,\t\"\r\n\x0b\x0c\x1c\x1e\x85\u2028\u2029\0", max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1), st.sampled_from([("a.csv", ","), ("a.tsv", "\t")]))
def test_cells_of_tables_come_back_as_they_were_written(pairs: list[tuple[str, str]], kind: tuple[str, str]) -> None:
    name, delimiter = kind
    with TemporaryDirectory() as folder, (path := Path(folder) / name).open("w", encoding="utf-8", newline="") as stream:
        csv.writer(stream, delimiter=delimiter).writerows([PAIRS, *pairs])
        stream.flush()
        lines = _as_jsonl(path, Path(folder), ()).read_text(encoding="ascii").splitlines()
    assert [json.loads(line) for line in lines] == [dict(zip(PAIRS, pair, strict=True)) for pair in pairs]


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"id,text\n1,{'x' * 200_000}\n\n2\n", encoding="utf-8")
    lines = _as_jsonl(tmp_path / "a.csv", tmp_path, ()).read_text(encoding="ascii").splitlines()
    assert [len(json.loads(line)["text"]) for line in lines] == [200_000, 0]


def test_a_folder_that_is_prepared_is_taken_as_it_is(data: str) -> None:
    assert prepare_raw([data], MODEL, "gpt-tiny", over_long="truncate").folder == data


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "is empty. Give a file with a sample on each line"),
        ("blank.jsonl", '{"text": " "}\n', "no sample is left of 1"),
        ("wrong.jsonl", '{"body": "x"}\n', "fields are body. Expected was"),
        ("wrong.csv", "a,b\n1,2\n", "has columns a, b; `text`, or `input` and `target`, were expected"),
    ],
)
def test_data_that_holds_no_samples(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message.replace("`", ".")):
        prepared(tmp_path / name)


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder without data\\.json"):
        prepared(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        prepared(tmp_path / "nothing.jsonl")


def test_samples_longer_than_the_model_has_positions(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("short one", " ".join(map(str, range(MODEL.seq_length * 2))))))
    with pytest.raises(InputError, match=rf"1 of 2 samples are longer than the {MODEL.seq_length} positions of .*over_long"):
        prepared(path, split="1,0,0")
    found = prepare_raw([str(path)], MODEL, "gpt-tiny", keeps_weights=False, split="1,0,0", over_long="truncate")
    assert found.filled.own.max() == MODEL.seq_length


def test_a_tokenizer_larger_than_the_vocabulary(texts: Path, tmp_path: Path) -> None:
    train_tokenizer((chr(a) + chr(b) for a in range(97, 123) for b in range(97, 123)), 900).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"has \d+ tokens, the vocabulary of model 'gpt-tiny' only 512"):
        prepared(texts, tokenizer=str(tmp_path))


def test_weights_need_the_tokenizer_that_they_were_trained_with(texts: Path, tmp_path: Path) -> None:
    for source, message in (("gpt-tiny", "'gpt-tiny' names none"), (f"hf:{tmp_path}", "holds none")):
        with pytest.raises(InputError, match=f"there is no tokenizer for model 'gpt-tiny': .*{message}.*--tokenizer PATH"):
            prepare_raw([str(texts)], MODEL, source, keeps_weights=True)


def test_random_weights_may_have_a_tokenizer_of_these_texts(texts: Path, tmp_path: Path) -> None:
    """Though the model comes from a folder, which has none."""
    found = prepare_raw([str(texts)], MODEL, f"hf:{tmp_path}", keeps_weights=False)
    assert 0 < found.data.manifest.vocab_size <= MODEL.config["vocab"]
