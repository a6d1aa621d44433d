"""Chats become what the tokenizer's template makes of them, and what the assistant says counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli.main import run
from penstock.data import open_data
from penstock.data.forms import SampleForm
from penstock.data.samples import Samples
from penstock.data.text.chats import ChatTemplate
from penstock.data.text.tokenizer import train_tokenizer

transformers = pytest.importorskip("transformers")

PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""As Qwen3's: a last answer is written otherwise than one that is followed."""
PROMPTING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""As DeepSeek-R1's: the prompt begins a thought, which answers need not have."""
WITHOUT_PROMPT = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
CHATS = [
    [("system", "be kind"), ("user", "how are you?"), ("assistant", "a")],
    [("user", "one"), ("assistant", "two"), ("user", "two"), ("assistant", "three is more than two")],
    [("user", "nobody answers")],
]


def tokenizer(folder: Path, template: str | None) -> str:
    made = train_tokenizer((said for chat in CHATS for _, said in chat), 300)
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    extra = {"chat_template": template} if template else {}
    kept = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", **extra)
    kept.save_pretrained(folder)
    return str(folder)


def chats(folder: Path, given: list[list[tuple[str, str]]] = CHATS) -> str:
    lines = ({"messages": [{"role": role, "content": said} for role, said in chat]} for chat in given)
    (folder / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "chats.jsonl")


@pytest.mark.parametrize(
    ("template", "answers"),
    [(PLAIN, ("a<|end|>\n", "two<|end|>\nthree is more than two<|end|>\n")),
     (PROMPTING, ("a<|end|>\n", "two<|end|>\nthree is more than two<|end|>\n")),
     (WITHOUT_PROMPT, ("a<|end|>\n", "two<|end|>\nthree is more than two<|end|>\n")),
     (THINKING, ("<think></think>a<|end|>\n", "two<|end|><think></think>three is more than two<|end|>\n"))],
    ids=["plain", "prompting", "without_prompt", "thinking"],
)  # fmt: skip
def test_what_the_assistant_says_counts(template: str, answers: tuple[str, ...], tmp_path: Path) -> None:
    folder, out = tokenizer(tmp_path / "tokenizer", template), tmp_path / "data"
    assert run(["prepare-data", chats(tmp_path), "--tokenizer", folder, "--split", "1,0,0", "--out", str(out)]) == 0
    theirs, data = transformers.AutoTokenizer.from_pretrained(folder), open_data(out)
    assert data.manifest.counts["without an answer"] == 1 and data.manifest.sides == ["input"]
    assert len(data) == len(answers)
    for place, (chat, wanted) in enumerate(zip(CHATS, answers, strict=False)):
        messages = [{"role": role, "content": said} for role, said in chat]
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert data[place]["input"].tolist() == ids
        found = Samples(data, SampleForm("decoder", paired=False)).sample(0, place, len(ids) - 1, 0)
        assert found.counted is not None and theirs.decode(found.labels[found.counted]) == wanted
        cut = SampleForm("decoder", paired=False).answers(data[place]["spans"], len(ids) - 3)
        assert cut.sum() == found.counted[:-2].sum()
        assert Samples(data, SampleForm("decoder", paired=False, prompt_loss=True)).sample(0, place, len(ids) - 1, 0).counted.all()  # type: ignore[union-attr]


def test_an_assistant_may_begin(tmp_path: Path) -> None:
    """Its name before its first words is the template's."""
    chat = [{"role": "assistant", "content": "  an answer"}, {"role": "user", "content": "so"}]
    text, spans = ChatTemplate(tokenizer(tmp_path, PLAIN)).written(json.dumps(chat))
    assert [text[first:last] for first, last in spans] == ["  an answer<|end|>\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [({"messages": [{"role": "user"}]}, "line 1: Object missing required field `content`"), ({"messages": []}, "of length >= 1")],
)
def test_lines_that_are_no_chats(line: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(line) + "\n")
    folder = tokenizer(tmp_path / "tokenizer", PLAIN)
    assert run(["prepare-data", str(tmp_path / "chats.jsonl"), "--tokenizer", folder, "--out", str(tmp_path / "data")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_tokenizers_and_templates_that_do_not_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*options: str) -> str:
        assert run(["prepare-data", chats(tmp_path), *options, "--out", str(tmp_path / "data")]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "trained here has no chat template. Give one: --tokenizer FOLDER" in told("--train-tokenizer", "300")
    without, refusing = tokenizer(tmp_path / "a", None), tokenizer(tmp_path / "b", "{{ raise_exception('roles must alternate') }}")
    assert f"the tokenizer in '{without}' has no chat template" in told("--tokenizer", without)
    assert "refuses the chat that begins with 'be kind': roles must alternate" in told("--tokenizer", refusing)
    moody = tokenizer(tmp_path / "c", "{{ messages | length }}" + PLAIN)
    assert "writes turns before turn 3 otherwise once it follows" in told("--tokenizer", moody)
    assert not (tmp_path / "data").exists()


def test_batches_of_chats_know_how_many_tokens_count(tmp_path: Path) -> None:
    """Planners see the spans that loaders see: a plan for the file, and its first global batch."""
    folder = tokenizer(tmp_path / "tokenizer", PLAIN)
    given = chats(tmp_path, [[("user", f"what is {n}?"), ("assistant", f"{n} is " + "one more than " * (n % 3) + "it")] for n in range(24)])
    plan = penstock.find_plans("gpt-tiny", "1xcpu", data=given, tokenizer=folder, tokens_per_batch=300)[0]
    _, batch = next(iter(penstock.DynamicLoader(given, plan, tokenizer=folder)))
    samples = [sample for micro in batch.micro_batches for sample in micro.samples.values()]
    counted = [int(sample.counted.sum()) for sample in samples if sample.counted is not None]
    assert len(counted) == len(samples) == plan.global_batch and batch.program.loss_tokens == sum(counted)
    assert all(0 < count < len(sample.labels) for count, sample in zip(counted, samples, strict=True))
