"""Job files: what is written is read again, fields are put in by name, and what is unknown is refused with what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import InputError
from penstock.jobs.job_file import anywhere, changed, dotted_fields, job_from, parse_changes, read_job, write_job

LEAST: dict[str, Any] = {"out": "run", "model": {"source": "gpt-tiny"}, "data": {"path": ["a.jsonl"]}}


def test_a_file_repeats_a_job_and_says_what_its_fields_mean(tmp_path: Path) -> None:
    job = job_from(LEAST, {"train.lr": 1e-5, "data.path": "it's: [odd] #name.jsonl", "train.torch_profile": "3,4"}, "the job")
    write_job(tmp_path / "job.yaml", job)
    assert job_from(read_job(tmp_path / "job.yaml"), {}, "the file") == job
    text = (tmp_path / "job.yaml").read_text(encoding="utf-8")
    assert "  # Highest learning rate.\n  lr: 1.0e-05\n" in text
    written = {f"{group}.{name}" for group, fields in yaml.safe_load(text).items() if isinstance(fields, dict) for name in fields}
    assert {name for name, _ in dotted_fields() if "." in name} == written


@pytest.mark.parametrize("address", ["redis://user:word@there:1/0", "rediss://:word@there", "redis://there:1?db=0&password=word"])
def test_no_password_of_a_store_gets_into_the_file(address: str) -> None:
    """Nor onto a terminal: the message says where a password may be, and not which it was."""
    with pytest.raises(InputError, match="address holds a password") as refused:
        job_from(LEAST, {"train.store": address}, "the job")
    assert "word@" not in str(refused.value) and "=word" not in str(refused.value) and "--store file:" in str(refused.value)


@pytest.mark.parametrize("address", ["redis://there:1/0", "rediss://there?ssl_ca_certs=ca.pem", "file:password:a@b.json", "tcp://[::1"])
def test_addresses_without_a_password_pass(address: str) -> None:
    """What is wrong with an address is told where it is connected to."""
    assert job_from(LEAST, {"train.store": address}, "the job").train.store == address


def test_every_field_is_explained() -> None:
    assert [name for name, meaning in dotted_fields() if not meaning] == []


def test_the_reference_has_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "job.md").read_text(encoding="utf-8")
    assert [name for name, meaning in dotted_fields() if f"| `{name}` |" not in text or meaning not in text] == []


def test_fields_are_changed_by_their_names() -> None:
    changes = parse_changes(["train.lr=1e-5", "train.deterministic=true", "data.path=[a.jsonl, b.jsonl]", "plan.cluster=2xcpu"])
    before, after = job_from(LEAST, {}, "the job"), job_from(LEAST, changes, "the job")
    assert after.train.lr == 1e-5 and after.train.deterministic and after.data.path == ["a.jsonl", "b.jsonl"]
    assert changed(before, after) == [
        "data.path: ['a.jsonl'] → ['a.jsonl', 'b.jsonl']", "plan.cluster: local → 2xcpu", "train.lr: 0.0003 → 1e-05",
        "train.deterministic: False → True",
    ]  # fmt: skip
    assert changed(after, after) == []


def test_paths_mean_the_same_in_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they name something that is here; names of other things stay, though a folder may be called so."""
    here, there = tmp_path / "here", tmp_path / "there"
    for name in ("llama", "checkpoint", "local", "gpt-tiny", "auto", "roofline"):
        (here / name).mkdir(parents=True)
    there.mkdir()
    for name in ("net.py", "plan.json", "two.yaml", "mine.yaml", "own.json", "words.json", "store.json", "a.jsonl"):
        (here / name).touch()
    paths = {
        "out": "run", "data.path": ["a.jsonl"], "data.tokenizer": "words.json", "model.source": "module:net.py:make",
        "model.weights": "checkpoint", "plan.cluster": "two.yaml", "plan.costs": "profile:own.json", "plan.file": "plan.json",
        "train.store": "file:store.json",
    }  # fmt: skip
    monkeypatch.chdir(here)
    typed = job_from(LEAST, paths, "the job")
    written = anywhere(typed)
    assert written.model.source == f"module:{here}/net.py:make" and written.plan.costs == f"profile:{here}/own.json"
    assert changed(typed, written) == []  # of a run whose file has them as they were typed
    assert len(changed(typed, typed.with_values(plan__costs="profile:other.json"))) == 1
    for source, found in (("hf:llama", f"hf:{here}/llama"), ("transformers:llama", f"transformers:{here}/llama"), ("gpt-tiny", "gpt-tiny"),
                          ("mine.yaml", f"{here}/mine.yaml"), ("hf:Qwen/Qwen3-8B", "hf:Qwen/Qwen3-8B")):  # fmt: skip
        assert anywhere(job_from(LEAST, {"model.source": source}, "the job")).model.source == found
    names = {"plan.cluster": "local", "plan.costs": "roofline", "model.weights": "auto", "model.source": "gpt-tiny", "out": "/run"}
    named = job_from(LEAST, {**names, "data.path": ["/a.jsonl"]}, "the job")
    assert anywhere(named) == named
    monkeypatch.chdir(there)
    assert anywhere(written) == written


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        ({}, {"train.learning": 1}, "no field 'train.learning'. Did you mean"),
        ({}, {"train": 1}, "no field 'train'"),
        ({}, {"lr": 1}, "no field 'lr'"),
        ({"trian": {}}, {}, "trian: this field does not exist. Did you mean 'train'"),
        ({"train": {"lrr": 1}}, {}, "train.lrr: this field does not exist. Did you mean 'lr'"),
        ({"train": 7}, {}, "train: Input should be"),
        ({"version": 2}, {}, "version: Input should be 1"),
        ({}, {"train.lr": 0}, "train.lr: Input should be greater than 0"),
        ({}, {"train.lr": float("nan")}, "train.lr:"),
        ({}, {"save.keep": 0}, "save.keep: Input should be greater than or equal to 1"),
        ({"data": {"path": []}}, {}, "data.path: List should have at least 1 item"),
    ],
)
def test_what_no_job_has(values: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        job_from({**LEAST, **values}, changes, "the job")
    assert message in str(error.value)


def test_files_that_are_no_jobs(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    for text, message in (("[1, 2]", "holds list; groups such as"), ("format: penstock-plan\nversion: 1", "is of format 'penstock-plan'")):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            read_job(path)


@pytest.mark.parametrize("text", ["train.lr", "train.lr=[1", f"train.lr={'[' * 3000}", "train.lr=!!bool maybe", f"train.lr={'9' * 5000}"])
def test_changes_that_are_no_values(text: str) -> None:
    with pytest.raises(InputError, match="--set is") as error:
        parse_changes([text])
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("text", "value"),
    [("train.adapt=off", "off"), ("train.lr=1e-5", 1e-5), ("train.lr=2024-13-45", "2024-13-45"), ("train.steps=010", 10),
     ("data.split=1", "1"), ("out=007", "007"), ("train.torch_profile= 3", "3"), ("data.path=1e3", "1e3"), ("model.precision=null", None)],
)  # fmt: skip
def test_values_of_changes(text: str, value: Any) -> None:
    assert list(parse_changes([text]).values()) == [value]


def test_a_field_without_its_group_is_told_with_it() -> None:
    with pytest.raises(InputError, match=r"a job has no field 'lr'\. Known: train\.lr\.$"):
        job_from(LEAST, {"lr": 1.0}, "the job")


def test_times_of_day_are_no_numbers_of_steps() -> None:
    with pytest.raises(InputError, match=r"train\.steps: Input should be a valid integer"):
        job_from(LEAST, parse_changes(["train.steps=1:30"]), "the job")


def test_adapting_is_switched_off_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("out: run\nmodel: {source: gpt-350m}\ndata: {path: a.jsonl}\ntrain: {adapt: off, lr: 1e-5}\n", encoding="utf-8")
    assert job_from(read_job(path), {}, "the file").train.adapt == "off"


def test_names_that_look_like_numbers_come_back(tmp_path: Path) -> None:
    job = job_from({**LEAST, "out": "1e5", "data": {"path": ["0o17", "no"]}}, {}, "the job")
    write_job(tmp_path / "job.yaml", job)
    assert job_from(read_job(tmp_path / "job.yaml"), {}, "the file") == job
