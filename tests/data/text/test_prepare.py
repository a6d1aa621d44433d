"""`penstock prepare-data` on text: what is kept, dropped, split and written, and how wrong input is told."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundled_texts import TASKS, generate
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import run
from penstock.data import IndexedTokens, Limits, open_data
from penstock.data.bundled import bundled_files
from penstock.data.kept_lengths import keep_lengths
from penstock.data.text.cleaning import DROPPED, first_of_equals, parse_split, split_samples
from penstock.data.text.lines import PAIRS, TEXT, LineSpan, detect_fields, parse_fields, pieces_of, read_samples
from penstock.data.text.prepare import TextRequest, _training_texts, prepare_text
from penstock.errors import InputError


def write_pairs(path: Path, pairs: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps({"input": a, "target": b}) + "\n" for a, b in pairs), encoding="utf-8")
    return path


def words(count: int, at: int = 0) -> str:
    return " ".join(f"w{(at + i) % 97}" for i in range(count))


def decoded(folder: Path, split: str) -> list[tuple[str, ...]]:
    from tokenizers import Tokenizer

    tokenizer, data = Tokenizer.from_file(str(folder / "tokenizer.json")), open_data(folder, split)
    return [tuple(tokenizer.decode(data[i][side].tolist()) for side in data.manifest.sides) for i in range(len(data))]


def test_what_comes_out_is_what_went_in_less_what_was_cleaned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = [(f"question {i} {words(i % 30, i)}", f"answer {i}") for i in range(200)]
    second = [(f"other {i}", words(1 + i % 9)) for i in range(100)]
    one = write_pairs(tmp_path / "one.jsonl", [*first, first[3], ("", "x"), ("", "x"), ("x", " \n")])
    two = write_pairs(tmp_path / "two.jsonl", [first[0], *second])
    out = tmp_path / "out"
    arguments = ["prepare-data", str(one), str(two), "--train-tokenizer", "400", "--split", "8,1,1", "--out", str(out), "--json"]
    assert run([*arguments, "--weights", "3,1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {name: told["counts"][name] for name in ("read", "empty", "duplicate", "kept")} == {
        "read": 305,
        "empty": 3,
        "duplicate": 2,
        "kept": 300,
    }
    assert {name: split["samples"] for name, split in told["splits"].items()} == {"train": 240, "validation": 30, "test": 30}
    assert [(task["name"], task["start"], task["stop"], task["weight"]) for task in told["splits"]["train"]["tasks"]] == [
        ("one", 0, 160, 3.0), ("two", 160, 240, 1.0)]  # fmt: skip
    everything = [sample for split in told["splits"] for sample in decoded(out, split)]
    assert sorted(everything) == sorted([*first, *second])
    train = open_data(out)
    end = told["end_token"]
    assert all(int(train[i]["target"][-1]) == end and end not in train[i]["input"] for i in range(len(train)))
    assert sum(int(side.sum()) for side in train.lengths) == sum(told["splits"]["train"]["tokens"].values())
    assert train.mixture().shares() == [180, 60]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one.jsonl", "out", "two.jsonl"]


def test_pairs_that_read_alike_end_to_end_are_no_duplicates(tmp_path: Path) -> None:
    pairs = [("one two", "three"), ("one ", "twothree"), ("one", " twothree")]
    prepare_text(TextRequest((write_pairs(tmp_path / "a.jsonl", pairs),), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0)))
    assert sorted(decoded(tmp_path / "out", "train")) == sorted(pairs)


def test_a_tokenizer_is_trained_on_what_is_trained_on(tmp_path: Path) -> None:
    """Each sample says a word of its own again and again: of those that are held out the tokenizer has never seen the word."""
    letters = "abcdefghijklmnopqrst"
    own = ["".join(letters[(7 * i + 3 * i * place + place) % 20] for place in range(8)) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": " ".join([word] * 40)}) + "\n" for word in own))
    out = tmp_path / "out"
    prepare_text(TextRequest((tmp_path / "a.jsonl",), out, train_tokenizer=1000, split=(1.0, 1.0, 0.0), end_token="none"))
    tokens = {split: open_data(out, split).lengths[0].tolist() for split in ("train", "validation")}
    assert len(set(own)) == 20 and len(tokens["train"]) == len(tokens["validation"]) == 10
    assert max(tokens["train"]) <= 41 and min(tokens["validation"]) >= 80


def test_others_may_read_what_was_prepared_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        prepare_text(TextRequest((write_pairs(tmp_path / "a.jsonl", [("a", "b")]),), tmp_path / "out", train_tokenizer=300))
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_order_within_a_task_is_that_of_its_file(tmp_path: Path) -> None:
    pairs = [(f"{i:03d}", "x") for i in range(100)]
    prepare_text(TextRequest((write_pairs(tmp_path / "a.jsonl", pairs),), tmp_path / "out", train_tokenizer=300))
    train = decoded(tmp_path / "out", "train")
    assert train == sorted(train) and len(train) == 95


def test_the_number_of_workers_and_of_pieces_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [(words(i % 80, i), words(i % 7 + 1)) for i in range(4000)])
    tokenizer = tmp_path / "first" / "tokenizer.json"
    prepare_text(TextRequest((path,), tmp_path / "first", train_tokenizer=300, workers=1))
    monkeypatch.setattr("penstock.data.text.prepare._INLINE_BYTES", 0)
    monkeypatch.setattr("penstock.data.text.prepare.pieces_of", lambda path: pieces_of(path, 100_000))
    prepare_text(TextRequest((path,), tmp_path / "second", str(tokenizer), workers=2))
    for file in (tmp_path / "first").iterdir():
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes(), file.name


@given(
    lines=st.lists(st.text(max_size=6).map(lambda text: json.dumps({"text": text})) | st.just("") | st.just(" "), max_size=12),
    size=st.integers(1, 40),
)
def test_pieces_of_any_size_have_each_line_once(lines: list[str], size: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        found = [sample for piece in pieces_of(path, size) for sample in read_samples(piece, TEXT) if sample]
        assert found == [(json.loads(line)["text"],) for line in lines if line.strip()]


def test_plain_text_has_one_side(tmp_path: Path) -> None:
    path = tmp_path / "books.jsonl"
    path.write_text("".join(json.dumps({"text": words(5, i), "id": i}) + "\n" for i in range(50)))
    manifest = prepare_text(TextRequest((path,), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0), keep_duplicates=True))
    assert manifest.sides == ["input"] and list(manifest.splits) == ["train"]
    assert decoded(tmp_path / "out", "train") == [(words(5, i),) for i in range(50)]
    assert len(open_data(tmp_path / "out" / "train_input")) == 50  # as Megatron-LM would name it


@pytest.mark.parametrize(("policy", "expected"), [("truncate", 20), ("drop", 10)])
def test_over_long_samples(tmp_path: Path, policy: Any, expected: int) -> None:
    pairs = [(words(3, i), "yes") for i in range(10)] + [(words(60, i), words(30)) for i in range(10)]
    path = write_pairs(tmp_path / "a.jsonl", pairs)
    request = TextRequest((path,), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0), limits=(20, 8), over_long=policy)
    manifest = prepare_text(request)
    data = open_data(tmp_path / "out")
    assert len(data) == manifest.counts["kept"] == expected
    assert max(data.lengths[0]) <= 20 and max(data.lengths[1]) <= 8
    assert all(int(data[i]["target"][-1]) == manifest.end_token for i in range(len(data)))
    assert manifest.counts["truncated" if policy == "truncate" else "over-long"] == 10


def test_a_target_keeps_its_end_token_at_every_length(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [(f"{i}", words(i)) for i in range(1, 20)])
    request = TextRequest((path,), tmp_path / "whole", train_tokenizer=400, split=(1.0, 0.0, 0.0))
    prepare_text(request)
    whole = open_data(tmp_path / "whole")
    lengths = [len(whole[i]["target"]) for i in range(19)]
    for limit in sorted({length - 1 for length in lengths})[1:4]:  # as long as one of them is without its end
        out = tmp_path / str(limit)
        tokenizer = str(tmp_path / "whole" / "tokenizer.json")
        found = prepare_text(replace(request, out=out, tokenizer=tokenizer, train_tokenizer=None, limits=(None, limit)))
        cut = [open_data(out)[i]["target"].tolist() for i in range(19)]
        for before, after in zip((whole[i]["target"].tolist() for i in range(19)), cut, strict=True):
            assert after == (before if len(before) <= limit else [*before[: limit - 1], found.end_token])
        assert found.counts["truncated"] == sum(length > limit for length in lengths)


BAD = [
    ('{"input": "a", "target": "b"}\n{"input": "a"}\n', r"a\.jsonl, line 2: .*missing required field `target`.*Expected was"),
    ('{"input": "a", "target": "b"}\n\n{"input": 5, "target": "b"}\n', r"a\.jsonl, line 3: Expected `str`, got `int` - at `\$\.input`"),
    ('{"input": "a", "target": "b"}\nnot json\n', r"a\.jsonl, line 2: JSON is malformed"),
    ('{"prompt": "a"}\n', r"a\.jsonl, line 1: fields are prompt\. Expected was"), ("[1]\n", r"a\.jsonl, line 1: Expected `object`"),
    ('{"instruction": "a", "input": "b", "output": "c"}\n', r"fields are instruction, input, output\. .*--set data\.fields="),
    ('[{"text": "a"}]\n', r"each on a line of its own: jq -c '\.\[\]' .*a\.jsonl > lines\.jsonl"),
    ("\n \n", r"a\.jsonl' holds no samples"), ("", r"a\.jsonl' holds no samples"),
    ('{"input": "", "target": "b"}\n', "no sample is left of 1: 1 are empty, 0 duplicates"),
    ('{"input": "a", "target": "b"}\n\xff\xfe\n', r"a\.jsonl, line 2: "),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_lines_are_named_and_nothing_is_left(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=message):
        prepare_text(TextRequest((tmp_path / "a.jsonl",), tmp_path / "out", train_tokenizer=300))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_line_in_a_later_piece_has_its_number_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n' * 900 + '{"text": }\n' + '{"text": "x"}\n' * 50)
    monkeypatch.setattr("penstock.data.text.prepare.pieces_of", lambda path: pieces_of(path, 1000))
    with pytest.raises(InputError, match="line 901: JSON is malformed"):
        prepare_text(TextRequest((path,), tmp_path / "out", train_tokenizer=300))


TRAIN = ["--train-tokenizer", "300"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokenizer", "nowhere"], "tokenizer 'nowhere' does not exist"), ([], "give a tokenizer"),
        (["--train-tokenizer", "100"], "too small"), ([*TRAIN, "--weights", "1,2"], "2 weights given for 1 input."),
        ([*TRAIN, "--weights", "x"], "--weights is 'x'"), ([*TRAIN, "--weights", "-1"], "not shares"),
        ([*TRAIN, "--split", "0,1"], "--split is '0,1'"), ([*TRAIN, "--max-input", "1"], "--max-input is 1; 2 or more"),
        ([*TRAIN, "--over-long", "dorp"], "Did you mean 'drop'"), ([*TRAIN, "--end-token", "<none>"], "'<|endoftext|>', not with '<none>'"),
        ([*TRAIN, "--workers", "-1"], "--workers is -1"),
    ],
)  # fmt: skip
def test_wrong_options(tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [("a", "b"), ("c", "d")])
    assert run(["prepare-data", str(path), "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_inputs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    same = write_pairs(tmp_path / "a.jsonl", [("a", "b")]), write_pairs(tmp_path / "b" / "a.jsonl", [("a", "b")])
    for inputs, message in (
        ((), "no input"),
        (same, "2 inputs are called 'a'"),
        ((tmp_path / "c.jsonl",), "does not exist"),
        ((tmp_path,), "is a directory"),
    ):
        with pytest.raises(InputError, match=message):
            prepare_text(TextRequest(inputs, tmp_path / "out", train_tokenizer=300))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").touch()
    with pytest.raises(InputError, match="is not an empty folder"):
        prepare_text(TextRequest(same[:1], tmp_path / "out", train_tokenizer=300))


@given(st.lists(st.integers(0, 5), max_size=40), st.data())
def test_duplicates_and_splits_against_plain_python(values: list[int], data: st.DataObject) -> None:
    digests = np.array([[value, 7] for value in values], np.uint64).reshape(-1, 2)
    fresh = first_of_equals(digests)
    assert fresh.tolist() == [value not in values[:i] for i, value in enumerate(values)]
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))), bool)
    codes = split_samples(digests, kept, (2.0, 1.0, 1.0))
    assert ((codes == DROPPED) == ~kept).all()
    assert abs((codes == 0).sum() - kept.sum() / 2) < 1


def test_a_sample_stays_in_its_split_when_files_are_reordered() -> None:
    digests = np.random.default_rng(0).integers(0, 2**63, (500, 2)).astype(np.uint64)
    codes = split_samples(digests, np.ones(500, bool), (8.0, 1.0, 1.0))
    order = np.random.default_rng(1).permutation(500)
    assert (split_samples(digests[order], np.ones(500, bool), (8.0, 1.0, 1.0)) == codes[order]).all()


def test_parts_of_a_split() -> None:
    assert parse_split("949,50,1") == (949.0, 50.0, 1.0) and parse_split("1") == (1.0, 0.0, 0.0)
    for text in ("", "a", "1,2,3,4", "0,1,1", "1,-1", "nan", "inf"):
        with pytest.raises(InputError, match="--split"):
            parse_split(text)


def test_opening_what_is_not_prepared(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no prepared data"):
        open_data(tmp_path)
    path = write_pairs(tmp_path / "a.jsonl", [("a", "b")])
    prepare_text(TextRequest((path,), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0)))
    with pytest.raises(InputError, match=r"no split 'tain'\. Did you mean 'train'"):
        open_data(tmp_path / "out", "tain")
    for beyond in (1, -1):
        with pytest.raises(IndexError):
            open_data(tmp_path / "out")[beyond]
    manifest = tmp_path / "out" / "data.json"
    good = manifest.read_text()
    changes = (
        (good.replace('"version": 1', '"version": 2'), "version 2"),
            (good.replace('"samples": 1', '"samples": 2'), "its tasks have 1 sample, the split 2"),
            (good.replace('"samples": 1', '"samples": 2').replace('"stop": 1', '"stop": 2'), "data.json says 2"),
        (good[:50], "not valid"), (good.replace('"text"', '"song"'), "Invalid enum value"),
    )  # fmt: skip
    for bad, message in changes:
        manifest.write_text(bad)
        with pytest.raises(InputError, match=message):
            open_data(tmp_path / "out")


def test_samples_are_drawn_by_the_weights_that_were_given(tmp_path: Path) -> None:
    paths = tuple(write_pairs(tmp_path / f"{name}.jsonl", [(words(3, i), name) for i in range(20)]) for name in ("rare", "often"))
    request = TextRequest(paths, tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0), weights=(1.0, 3.0))
    prepare_text(request)
    data = open_data(tmp_path / "out")
    (rare,) = (task for task in data.manifest.splits["train"].tasks if task.name == "rare")
    drawn = [int(sample) for batch in range(4) for sample in data.batches(10)[batch].samples]
    assert sum(rare.start <= sample < rare.stop for sample in drawn) == 10  # one in four of an epoch's 40


def test_a_task_without_samples_in_a_split_has_no_share_of_it(tmp_path: Path) -> None:
    """One sample is all in training: a validation of both tasks by weight would have nothing to draw of it."""
    sizes = {"one": 1, "many": 20}
    paths = tuple(write_pairs(tmp_path / f"{name}.jsonl", [(words(3, i), name) for i in range(count)]) for name, count in sizes.items())
    prepare_text(TextRequest(paths, tmp_path / "out", train_tokenizer=300, split=(3.0, 1.0, 0.0), weights=(1.0, 1.0)))
    held_out = open_data(tmp_path / "out", "validation")
    assert held_out.mixture().shares() == [0, len(held_out)] and len(held_out.batches(4)[0].samples) == 4
    assert [task.weight for task in open_data(tmp_path / "out").manifest.splits["train"].tasks] == [1.0, 1.0]


def test_a_tokenizer_is_trained_on_so_much_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pieces of all files in turn: what is trained on must fit into memory."""
    monkeypatch.setattr("penstock.data.text.prepare._TRAINING_BYTES", 40)
    paths = [write_pairs(tmp_path / f"{name}.jsonl", [(f"{name}{i}", "x" * 9) for i in range(30)]) for name in "ab"]
    pieces = [pieces_of(path, 60) for path in paths]
    codes = [[np.zeros(len(list(read_samples(piece, PAIRS))), np.uint8) for piece in parts] for parts in pieces]
    texts = list(_training_texts(PAIRS, pieces, codes))
    assert sum(map(len, texts)) < 120 and texts[:2] == ["a0", "x" * 9] and any(text.startswith("b") for text in texts)


def test_kept_lengths_are_those_of_the_data(tmp_path: Path) -> None:
    """Whatever they are: those of a few words, and of many hundreds."""
    path = write_pairs(tmp_path / "a.jsonl", [(words(count, count), words(3, count)) for count in (1, 300, 70_000)])
    prepare_text(TextRequest((path,), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0)))
    data = open_data(tmp_path / "out")
    keep_lengths(data, tmp_path / "kept")
    kept = open_data(tmp_path / "kept")
    assert [side.tolist() for side in kept.lengths] == [np.asarray(side).tolist() for side in data.lengths]
    assert kept.lengths[0].max() > 2**16
    assert [batch.samples.tolist() for batch in map(kept.batches(2).__getitem__, range(4))] == [
        batch.samples.tolist() for batch in map(data.batches(2).__getitem__, range(4))
    ]
    with pytest.raises(InputError, match="keeps the lengths of samples alone"):
        kept.check()


def test_more_samples_than_the_manifest_knows_are_refused(tmp_path: Path) -> None:
    for name, count in (("few", 2), ("many", 3)):
        path = write_pairs(tmp_path / f"{name}.jsonl", [(words(3, i), "x") for i in range(count)])
        prepare_text(TextRequest((path,), tmp_path / name, train_tokenizer=300, split=(1.0, 0.0, 0.0)))
    (tmp_path / "few" / "data.json").replace(tmp_path / "many" / "data.json")
    with pytest.raises(InputError, match=r"has 3 samples, data\.json says 2"):
        open_data(tmp_path / "many")


def test_pairs_that_have_a_text_besides_are_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b", "input": "a", "target": "b"}\n')
    assert detect_fields(tmp_path / "a.jsonl") == PAIRS


def test_lengths_come_without_touching_tokens(tmp_path: Path) -> None:
    path = write_pairs(tmp_path / "a.jsonl", [(words(i + 1), "x") for i in range(30)])
    prepare_text(TextRequest((path,), tmp_path / "out", train_tokenizer=300, split=(1.0, 0.0, 0.0)))
    before = open_data(tmp_path / "out").lengths[0].tolist()
    size = os.path.getsize(tmp_path / "out" / "train_input.bin")
    (tmp_path / "out" / "train_input.bin").write_bytes(bytes(size))  # other tokens, same lengths
    data = open_data(tmp_path / "out")
    assert data.lengths[0].tolist() == before and data[0]["input"].tolist() == [0] * before[0]
    assert isinstance(data.ragged["input"], IndexedTokens) and not data[0]["input"].flags.writeable


def test_the_bundled_set_is_what_its_script_writes(tmp_path: Path) -> None:
    generate(tmp_path)
    assert [file.name for file in bundled_files()] == [f"{name}.jsonl" for name in sorted(TASKS)]
    for file in bundled_files():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes()


def test_the_bundled_set_is_small_and_its_lengths_are_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(file.stat().st_size for file in bundled_files()) < 800_000
    assert run(["prepare-data", "bundled", "--train-tokenizer", "1024", "--out", str(tmp_path / "data")]) == 0
    assert "read 1" in capsys.readouterr().out
    data = open_data(tmp_path / "data")
    logs = np.log(np.asarray(data.lengths[0], float))
    assert 0.9 < logs.std() < 1.4 and max(data.lengths[0]) > 12 * np.median(data.lengths[0])
    assert abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.6  # log-normal: no skew left in the logarithm
    assert len(data.manifest.splits["train"].tasks) == 6


def test_every_rank_count_draws_the_same_batches(tmp_path: Path) -> None:
    """A batch is a function of data, seed and step: there is nothing that could depend on who asks."""
    prepare_text(TextRequest(tuple(bundled_files()), tmp_path / "data", train_tokenizer=1024))
    ranks = [open_data(tmp_path / "data").batches(tokens_per_batch=16384, limits=Limits((1024, 256)), seed=3) for _ in range(3)]
    for step in (0, 11, 4):
        drawn = [rank[step].samples.tolist() for rank in ranks]
        assert drawn[0] == drawn[1] == drawn[2] and ranks[0][step].num_tokens <= 16384


def test_a_piece_of_nothing() -> None:
    assert list(read_samples(LineSpan(Path("/dev/null"), 0, 0), TEXT)) == []


def test_texts_under_other_names(tmp_path: Path) -> None:
    """A field map reads what the same lines give under our names, also where a name is none of Python's."""
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    pairs = [(f"what is {number}?", f"it is {number}") for number in range(50)]
    ours.write_text("".join(json.dumps({"input": one, "target": other}) + "\n" for one, other in pairs))
    theirs.write_text("".join(json.dumps({"the answer": other, "in-puts": one, "input": "not this"}) + "\n" for one, other in pairs))
    for name, fields in (("ours", ()), ("theirs", parse_fields("target=the answer, input=in-puts"))):
        prepare_text(TextRequest((tmp_path / f"{name}.jsonl",), tmp_path / name, train_tokenizer=300, fields=fields))
    for side in ("input", "target"):
        one, other = ((tmp_path / name / f"train_{side}.bin").read_bytes() for name in ("ours", "theirs"))
        assert one == other != b""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("input=a", "those of input and target, or that of text"),
        ("input=a,target=b,text=c", "those of input and target, or that of text"),
        ("inputs=a,target=b", "'inputs' is no side of a sample. Did you mean 'input'"),
        ("input=a,input=b,target=c", "one name for 'input'"),
        ("input,target=b", "one name for 'input'"),
        ("", "'' is no side"),
    ],
)
def test_bad_field_maps(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_fields(text)
