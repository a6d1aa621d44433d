"""Chats, {"messages": [{"role": "user", "content": "…"}, …]}: written out by a tokenizer's template, and what the assistant said in them.

    <|im_start|>user\\nHow are you?<|im_end|>\\n<|im_start|>assistant\\nFine.<|im_end|>\\n
                                                                    ─────────────────  a span: its tokens count in the loss
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.data.text.declared import tokenizer_folder
from penstock.errors import InputError

__all__ = ["TEMPLATE_FILES", "ChatTemplate", "Spans"]

TEMPLATE_FILES = "chat_template.jinja", "tokenizer_config.json"
"""Where folders have a template."""
Spans = list[tuple[int, int]]
"""[first, last) of characters or of tokens."""


class ChatTemplate:
    """The chat template of a tokenizer's folder."""

    def __init__(self, path: str) -> None:
        """`path` is the tokenizer's folder, or a file in it."""
        folder = tokenizer_folder(path)
        if not any((folder / name).is_file() for name in TEMPLATE_FILES):
            raise InputError(_none(folder))
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise InputError("chats are written out by transformers, which is not there. Run: pip install 'penstock[hf]'") from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise InputError(f"the tokenizer in '{folder}' cannot be read: {next(iter(str(error).splitlines()), '')}") from None
        if not self._tokenizer.chat_template:
            raise InputError(_none(folder))

    def written(self, messages: str) -> tuple[str, Spans]:
        """The text of a chat, given as JSON, and which of its characters the assistant said."""
        chat = json.loads(messages)
        text = self._text(chat)
        return text, list(self._spoken(chat, text))

    def _text(self, chat: list[dict[str, Any]], answer: bool = False) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=answer))
        except Exception as error:  # templates raise what they like
            raise InputError(f"the chat template refuses the chat that begins with {_words(chat)}: {error}.") from None

    def _spoken(self, chat: list[dict[str, Any]], text: str) -> Iterator[tuple[int, int]]:
        """From where the template would let the assistant begin to where its turn ends."""
        for turn, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            start = self._start(chat, turn, text)
            if start is None:
                raise InputError(
                    f"the chat template writes turns before turn {turn + 1} otherwise once it follows, in the chat that begins with "
                    f"{_words(chat)}: what the assistant said cannot be told from the rest. Write such chats out as "
                    '{"input": "…", "target": "…"}.'
                )
            yield start, self._end(chat, turn, text, start)

    def _start(self, chat: list[dict[str, Any]], turn: int, text: str) -> int | None:
        """Where a turn of the assistant begins; None where the turns before it do not stand at the beginning of the text."""
        prompt, before = (self._text(chat[:turn], answer) if turn else "" for answer in (True, False))
        if prompt != before and text.startswith(prompt):
            return len(prompt)
        if not text.startswith(before):
            return None
        # A prompt may begin the answer too (with `<think>`), or there is none: the answer begins where another one would be seen.
        message = chat[turn]
        other = {**message, "content": "B" if message["content"].strip().startswith("A") else "A"}
        beside = self._text([*chat[:turn], other, *chat[turn + 1 :]])
        return max(len(before), next((at for at, both in enumerate(zip(text, beside, strict=False)) if both[0] != both[1]), 0))

    def _end(self, chat: list[dict[str, Any]], turn: int, text: str, start: int) -> int:
        until = self._text(chat[: turn + 1])
        if text.startswith(until):
            return len(until)
        # The template treats a last answer otherwise (thoughts are kept there): the turn goes on to where the next one begins.
        said = text.find(chat[turn]["content"].strip(), start)
        if said < 0:
            raise InputError(f"the chat template leaves out what is said in turn {turn + 1} of the chat that begins with {_words(chat)}.")
        end = said + len(chat[turn]["content"].strip())
        closing = next((token for token in self._tokenizer.all_special_tokens if text.startswith(token, end)), "")
        return end + len(closing)


def _none(folder: Path) -> str:
    return (
        f"samples are chats, but the tokenizer in '{folder}' has no chat template ({' or '.join(TEMPLATE_FILES)}). Use one of a model that "
        'was made for chats, or write them out as {"text": "…"} or {"input": "…", "target": "…"}.'
    )


def _words(chat: list[dict[str, Any]]) -> str:
    first = str(chat[0]["content"]) if chat else ""
    return repr(first if len(first) <= 40 else first[:40] + "…")
